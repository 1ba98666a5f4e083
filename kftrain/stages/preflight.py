"""Checks a run before its first expensive step: a run that cannot end well should end in seconds."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kftrain import launch, tracking
from kftrain.config import Config
from kftrain.core import credentials, storage
from kftrain.core.plugins import is_plugin
from kftrain.data.order import BatchPlan
from kftrain.errors import ConfigError, LaunchError, TrackingError
from kftrain.launch.kubernetes.reachable import require_remote_storage, require_tracking_server
from kftrain.models import options
from kftrain.models.registry import BUILT_IN as MODELS
from kftrain.models.signature import check_options, splits_of
from kftrain.sharding.sources.resolve_source import BUILT_IN as SOURCES
from kftrain.sharding.sources.resolve_source import require_there
from kftrain.tasks import build_task
from kftrain.tasks.registry import BUILT_IN as TASKS
from kftrain.tracking.endpoint import probe_database, require_private_credentials, sqlite_path
from kftrain.trust import require_written

MIN_FREE_SHARDS = 2
"""There must be room for this many shards; whoever needs more finds out later, but not within the first one."""

MAX_MODEL_NAME_CHARACTERS = 256
"""Longest name that MLflow's databases hold."""


def check_names(config: Config, folder: str = ".", sources: Sequence[str] = ()) -> None:
    """Raises ConfigError or DataError where code or a source that is named is not there, as far as files tell.

    Nothing is imported. Modules are looked for in `folder`, too; what only remote jobs need may be there alone.
    """
    named: list[tuple[str, str, Any]] = [("task.kind", config.task.kind, TASKS)]
    named += [("data.source", source, SOURCES) for source in sources]
    if not config.launch.is_remote:
        named += [("model.kind", config.model.kind, MODELS)]
        named += [("evaluate.metrics", metric, ()) for metric in config.evaluate.metrics]
    for where, kind, built_in in named:
        if is_plugin(kind):
            require_written(kind, where, folder)
        elif kind not in built_in and where == "data.source":
            require_there(kind)
        elif kind not in built_in:
            options.import_kind(kind, built_in, where.partition(".")[0])  # which names the nearest


def describe_oddities(config: Config) -> list[str]:
    """Return a warning for every setting that is allowed, but probably not meant."""
    warmup_steps, steps = config.optimizer.warmup_steps, config.train.steps
    what = f"optimizer.warmup_steps ({warmup_steps}) is more than train.steps ({steps})"
    is_odd = warmup_steps > steps and config.optimizer.schedule != "constant" and not config.train.command
    return [f"warning: {what}: the learning rate rises until the last step"] if is_odd else []


def check_run(config: Config) -> None:
    """Raises ConfigError or TrackingError for the first thing that would make the run fail later."""
    check_names(config)
    check_batch(config)
    check_model(config)
    check_model_name(config.model_name)
    check_free_space(config)
    check_shard_pods(config)
    require_private_credentials(config.tracking)
    tracking.check(config.tracking.uri)


def check_model(config: Config) -> None:
    """Raises ConfigError where task and model, or their sizes, cannot go together, as far as options alone tell.

    What a user's task requires of the model is asked where torch is: its code may need it.
    """
    task = build_task(config.task) if config.task.kind in TASKS else None
    arguments = task.model_arguments() if task else None
    check_options(config.model, arguments)
    if task:
        config.parallel.require_sequences(task.sequence_dims)
    config.parallel.require_fitting(splits_of(config.model, arguments))


def check_model_name(name: str) -> None:
    """Raises ConfigError for the name of a registered model that MLflow refuses, or that cannot be searched for."""
    if len(name) > MAX_MODEL_NAME_CHARACTERS or set(name) & set("/:'\"`\\"):
        fix = f"at most {MAX_MODEL_NAME_CHARACTERS} characters, without quotes, slashes and colons"
        raise ConfigError("no name of a registered model", where="registry.model_name", value=name, fix=fix)


def require_database(uri: str) -> None:
    """Raises TrackingError where a file is to be read that is not there, which MLflow would make, or is no database."""
    path = sqlite_path(uri)
    if path is None:
        return
    if not path.is_file():
        raise TrackingError("there is no such database", where="tracking.uri", value=uri, fix="check --config or --run")
    probe_database(path)


def check_batch(config: Config) -> None:
    """Raises ConfigError where the processes form no mesh, or would be left without a sample in every step."""
    nodes, per_node, batch = config.launch.nodes, config.launch.processes_per_node, config.train.batch_sizes.sizes[0]
    num_data_ranks = nodes if per_node == "auto" else config.parallel.shape(nodes * per_node).num_data_ranks
    if num_data_ranks > batch:
        what = f"{num_data_ranks} processes cannot share a batch of {batch} samples"
        fix = "raise it, or lower launch.nodes or launch.processes_per_node"
        where = "train.batch_warmup" if config.train.batch_warmup else "train.global_batch_size"
        raise ConfigError(what, where=where, fix=fix)
    plan = BatchPlan(config.train.global_batch_size, num_data_ranks, config.train.most_micro_rows)
    if per_node != "auto":
        config.parallel.require_micro_batches(plan.num_micro_batches)
        config.parallel.require_equal_islands(batch, num_data_ranks)


def check_samples(config: Config, num_samples: int) -> None:
    """Raises ConfigError where the training split is smaller than one batch."""
    if num_samples < config.train.global_batch_size:
        what = f"a batch of {config.train.global_batch_size} samples is more than the {num_samples} for training"
        raise ConfigError(what, where="train.global_batch_size", fix="lower it, or train on more data")


def check_credentials(config: Config) -> None:
    """Raises ConfigError where a text holds a password, a token or a signature: the run's folder keeps all of them."""
    for key in credentials.find_credentials(config.to_dict()):
        fix = "put them into the environment, where its reader looks for them"
        if key == "tracking.uri":
            fix = "set MLFLOW_TRACKING_USERNAME and _PASSWORD, or _TOKEN, instead"
        raise ConfigError("a URI with credentials would be kept and shown", where=key, fix=fix)


def check_writable(config: Config) -> None:
    """Raises ConfigError where a file below the storage root cannot be written, read back and removed."""
    root = config.run.storage_root
    probe = storage.join(root, f".kftrain-probe-{secrets.token_hex(4)}")
    try:
        with storage.simplify_errors(root):
            storage.publish(probe, "kftrain\n")
            content = storage.read_text(probe)
            storage.remove(probe)
    except OSError as error:
        what, fix = f"{type(error).__name__}: {error}", "check the path, the permissions and the credentials"
        what = f"the storage root cannot be written: {what}"
        raise ConfigError(what, where="run.storage_root", value=root, fix=fix) from error
    assert content == "kftrain\n", content


def check_free_space(config: Config) -> None:
    """Raises ConfigError where a local storage root has no room for a few shards."""
    root = config.run.storage_root
    if not storage.is_local(root):
        return
    free, needed = shutil.disk_usage(storage.local_path(root)).free, MIN_FREE_SHARDS * config.data.shard_size_bytes
    if free < needed:
        what = f"only {free / 1e6:.0f} MB are free, two shards need {needed / 1e6:.0f} MB"
        raise ConfigError(what, where="run.storage_root", value=root, fix="free some space or use another folder")


def check_shard_pods(config: Config) -> None:
    """Raises LaunchError where the pods of `data.shard_pods` could not reach a source that lies on this machine."""
    if config.data.shard_pods > 1 and config.launch.has_pods and not config.launch.kubernetes.volumes:
        for key, source in config.data.sources.items():
            _require_remote_source(key, source, "the pods of data.shard_pods")


STEPS = "the pipeline's steps"


def require_from_here(config: Config) -> None:
    """Raise LaunchError for settings that the steps after this one could not use, and if no job can be created.

    In a pod of Kubeflow it refuses what `kftrain submit` refuses, but for folders on a volume that the pod mounts: who
    builds a pipeline of their own may mount one in every step.
    """
    if launch.is_pipeline_pod():
        require_remote(config, _is_mounted)
    launch.build_launcher(config).check()


def require_remote(config: Config, is_shared: Callable[[str], bool] = lambda uri: False) -> None:
    """Raise LaunchError for the first setting that works on this machine only.

    The steps mount no volumes, not even those of the worker pods, so a folder is one of this machine, unless
    `is_shared` knows better.
    """
    launch.require_remote_jobs(config, STEPS)
    if not is_shared(config.run.storage_root):
        require_remote_storage(config, STEPS)
    require_tracking_server(config, STEPS)
    for key, source in config.data.sources.items():
        if not is_shared(source):
            _require_remote_source(key, source, STEPS)
    _require_no_password(config)


def _require_remote_source(key: str, source: str, who: str) -> None:
    if source not in SOURCES and not is_plugin(source) and storage.is_local(source):
        fix = f"use an object store (s3://…), module:attr, or one of: {', '.join(SOURCES)}"
        raise LaunchError(f"{who} cannot reach a file or folder of this machine", where=key, value=source, fix=fix)


def _require_no_password(config: Config) -> None:
    """Raise LaunchError for a URI with a password: Kubeflow shows every parameter, and the configuration is one."""
    for key in credentials.find_credentials(config.to_dict()):
        fix = "leave it out and put it into the secret kftrain-mlflow, or kftrain-storage"
        raise LaunchError("Kubeflow would show the password or token in this URI to everybody", where=key, fix=fix)


def _is_mounted(uri: str) -> bool:
    """Return True if a path lies on a volume of this pod, and not in its own container."""
    if not storage.is_local(uri):
        return False
    path = Path(storage.local_path(uri)).absolute()
    return any(os.path.ismount(folder) for folder in (path, *path.parents) if folder != Path(folder.anchor))
