"""What is checked before the first expensive step: a run that cannot end well should end in seconds."""

from __future__ import annotations

import secrets
import shutil

from kftrain import credentials, storage, tracking
from kftrain.config import Config
from kftrain.errors import ConfigError, TrackingError
from kftrain.models.signature import check_options, splits_of
from kftrain.tasks import build_task
from kftrain.tasks.registry import BUILT_IN as TASKS
from kftrain.tracking.endpoint import probe_database, require_private_credentials, sqlite_path

MIN_FREE_SHARDS = 2
"""There must be room for this many shards; whoever needs more finds out later, but not within the first one."""


MAX_MODEL_NAME_CHARACTERS = 256
"""What MLflow's databases hold."""


def check_run(config: Config) -> None:
    """Raises ConfigError or TrackingError for the first thing that would make the run fail later."""
    check_batch(config)
    check_model(config)
    check_model_name(config.model_name)
    check_free_space(config)
    require_private_credentials(config.tracking)
    tracking.check(config.tracking.uri)


def check_model(config: Config) -> None:
    """Raises ConfigError where task and model, or their sizes, cannot go together, as far as options alone tell.

    What a user's task requires of the model is asked where torch is: its code may need it.
    """
    is_ours = config.task.kind in TASKS
    arguments = build_task(config.task).model_arguments() if is_ours else None
    check_options(config.model, arguments)
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
    per_node = config.launch.processes_per_node
    if per_node == "auto":
        num_data_ranks = config.launch.nodes
    else:
        num_data_ranks = config.parallel.shape(config.launch.nodes * per_node).num_data_ranks
    if num_data_ranks > config.train.global_batch_size:
        raise ConfigError(
            f"{num_data_ranks} processes cannot share a batch of {config.train.global_batch_size} samples",
            where="train.global_batch_size",
            fix="raise it, or lower launch.nodes or launch.processes_per_node",
        )


def check_samples(config: Config, num_samples: int) -> None:
    """Raises ConfigError where the training split is smaller than one batch."""
    if num_samples < config.train.global_batch_size:
        raise ConfigError(
            f"a batch of {config.train.global_batch_size} samples is more than the {num_samples} for training",
            where="train.global_batch_size",
            fix="lower it, or train on more data",
        )


def check_credentials(config: Config) -> None:
    """Raises ConfigError where a text holds a password, a token or a signature: the run's folder keeps all of them."""
    for key in credentials.keys_with_credentials(config.to_dict()):
        fix = "set MLFLOW_TRACKING_USERNAME and _PASSWORD, or _TOKEN, instead" if key == "tracking.uri" else ""
        raise ConfigError(
            "a URI with credentials would be kept and shown",
            where=key,
            fix=fix or "put them into the environment, where its reader looks for them",
        )


def check_writable(config: Config) -> None:
    """Raises ConfigError where a file below the storage root cannot be written, read back and removed."""
    root = config.run.storage_root
    probe = storage.join(root, f".kftrain-probe-{secrets.token_hex(4)}")
    try:
        with storage.plain_errors(root):
            storage.publish(probe, "kftrain\n")
            found = storage.read_text(probe)
            storage.remove(probe)
    except OSError as error:
        raise ConfigError(
            f"the storage root cannot be written: {type(error).__name__}: {error}",
            where="run.storage_root",
            value=root,
            fix="check the path, the permissions and the credentials",
        ) from error
    assert found == "kftrain\n", found


def check_free_space(config: Config) -> None:
    """Raises ConfigError where a local storage root has no room for a few shards."""
    root = config.run.storage_root
    if not storage.is_local(root):
        return
    free, needed = shutil.disk_usage(storage.local_path(root)).free, MIN_FREE_SHARDS * config.data.shard_size_bytes
    if free < needed:
        raise ConfigError(
            f"only {free / 1e6:.0f} MB are free, two shards need {needed / 1e6:.0f} MB",
            where="run.storage_root",
            value=root,
            fix="free some space or use another folder",
        )
