"""Turns the parameters of a pipeline run, a configuration and its knobs, into a run and its folder.

A run is one training. Its folder keeps the configuration that it was started with, and a run that is opened
again must still be the same training: launch settings may change, the model may not.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kftrain import config as configuration
from kftrain.config import Config
from kftrain.core import credentials, storage
from kftrain.core.plugins import is_plugin
from kftrain.data.settings import ORDER, DataConfig
from kftrain.errors import CheckpointError, ConfigError, DataError, OtherTrainingError
from kftrain.kubeflow import parameters
from kftrain.run import attempts, commit
from kftrain.run.commit import list_differences, require_present_order
from kftrain.run.config import is_opened, keep_config, read_config
from kftrain.run.paths import RunPaths
from kftrain.sharding.sources.resolve_source import BUILT_IN
from kftrain.sharding.sources.webdataset import is_shard_pattern
from kftrain.trust import permit

Knobs = dict[str, str | int | float]
"""Pipeline parameter -> its value; '' and 0 mean that it is not set."""

KNOBS = {
    "source": "data.source",
    "storage_root": "run.storage_root",
    "model_name": "registry.model_name",
    "nodes": "launch.nodes",
    "processes_per_node": "launch.processes_per_node",
    "steps": "train.steps",
    "learning_rate": "optimizer.learning_rate",
    "promotion": "registry.promotion",
    "trainer_image": "launch.kubernetes.trainer_image",
    "queue": "launch.kubernetes.queue",
}
"""Pipeline parameter -> the configuration key that it sets."""

RUN_ID = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""A Kubernetes label value, and a plain folder name."""

JOB_ID_CHARACTERS = 12
"""Number of characters of a Kubeflow run id (a UUID) in the folder's name: 48 bits."""


@dataclass(frozen=True)
class OpenedRun:
    """A run's folder, with the configuration that is in it now."""

    config: Config
    paths: RunPaths
    previous: Config | None = None
    """The configuration with which the run was opened the last time; None: it is new."""
    is_resumed: bool = False


def resolve_run(
    text: str,
    knobs: Mapping[str, str | int | float],
    resume_run: str,
    base: str | Path = ".",
    values: Mapping[str, Any] | None = None,
) -> tuple[Config, str]:
    """Return the configuration of a pipeline run, and the id of the run that it resumes; empty if it starts a new one.

    Args:
        text: YAML, or the URI of a file; empty takes the defaults, or the configuration of the run to resume.
        knobs: Values of the pipeline's parameters; those that are not '' or 0 replace the values of their keys.
        resume_run: Id of the run, or URI of its folder.
        base: Relative paths start there.
        values: Further values as an object, over the text and under the knobs.

    Raises ConfigError, and RetryableError if a file cannot be read now.
    """
    overrides = [f"{KNOBS[knob]}={json.dumps(value)}" for knob, value in knobs.items() if value]
    above = parameters.restore_object(values)
    if above:
        parameters.require_small(text, above)
    layers = {parameters.OBJECT: above} if above else {}
    content, where = parameters.read_config_parameter(text)
    if resume_run and not text.strip():
        place = {where: {"run": values["run"]} for where, values in layers.items() if "run" in values}
        config = anchor_paths(configuration.parse("", select_place_overrides(overrides), where, place), base)
        return resume_config(config, overrides, resume_run, base, keep=True, above=layers)
    config = anchor_paths(configuration.parse(content, overrides, where, layers), base)
    if not resume_run:
        return config, ""
    return resume_config(config, overrides, resume_run, base, keep=False, above=layers)


def select_place_overrides(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that say where runs are; others may fit only the configuration of the run to resume."""
    return [override for override in overrides if override.startswith("run.")]


def resume_config(
    config: Config,
    overrides: Sequence[str],
    run: str,
    base: str | Path,
    keep: bool,
    above: dict[str, dict[str, Any]] | None = None,
) -> tuple[Config, str]:
    """Return the configuration with which a run goes on, and the run's id.

    Args:
        config: The configuration that was given; it says where runs are, in case `run` is only an id.
        overrides: Assignments such as `train.steps=200`.
        run: Id of the run, or URI of its folder.
        base: Relative paths start there.
        keep: True if no configuration was given: the run keeps its own, but for the overrides and the layers above it.
        above: Layers over the run's own configuration: origin -> values.

    Raises ConfigError.
    """
    uri = run if "/" in run else RunPaths.of(config.run.storage_root, require_run_id(run)).uri
    paths = _find_run_folder(storage.absolute(uri, base))
    if keep:
        saved = read_config(paths).to_yaml()
        config = anchor_paths(permit(configuration.parse_kept(saved, paths.config, overrides, above)), base)
    section = config.run.model_copy(update={"storage_root": paths.storage_root})
    return config.model_copy(update={"run": section}), paths.run_id


def anchor_paths(config: Config, base: str | Path) -> Config:
    """Return the configuration with its paths made absolute against `base`.

    For jobs that inherit our environment, user and password of MLflow move from the URI into it, so that nothing
    written from here on holds them. Remote jobs have secrets; there a URI with a password is refused.
    """
    data = config.data
    if not config.launch.is_remote:
        uri, variables = credentials.take_out_credentials(config.tracking.uri)
        for name, value in variables.items():
            os.environ.setdefault(name, value)
        config = config.model_copy(update={"tracking": config.tracking.model_copy(update={"uri": uri})})
    mixture = tuple(
        component.model_copy(update={"source": _anchor(component.source, base)}) for component in data.mixture
    )
    data = data.model_copy(update={"source": _anchor(data.source, base), "mixture": mixture})
    train = config.train
    if "/" in train.start_from:
        train = train.model_copy(update={"start_from": storage.absolute(train.start_from, base)})
    return config.anchored(base).model_copy(update={"data": data, "train": train})


def _anchor(source: str, base: str | Path) -> str:
    return storage.absolute(source, base) if _names_a_path(source, base) else source


def _names_a_path(source: str, base: str | Path) -> bool:
    """Return True if a source is a file or a folder. An unknown name stays as it is, so that its refusal shows it."""
    if source in BUILT_IN or is_plugin(source):
        return False
    return "/" in source or is_shard_pattern(source) or storage.exists(storage.absolute(source, base))


def _find_run_folder(uri: str) -> RunPaths:
    """Return a run by the URI of its folder. Raises ConfigError for any other place: a run there may be a copy."""
    paths = RunPaths(uri)
    if RunPaths.of(paths.storage_root, paths.run_id).uri != uri.rstrip("/"):
        raise ConfigError("not a run's folder", where="run", value=uri, fix="it lies below runs/ in the storage root")
    require_run_id(paths.run_id)
    return paths


def make_run_id(resume_run: str, job_id: str, name: str) -> str:
    """Return the id of the run that a pipeline run works on: the one to resume, or one made of Kubeflow's job id.

    The job id is the same in all tasks of a pipeline run and in all their retries. Raises ConfigError for an
    unusable name.
    """
    if resume_run:
        return require_run_id(resume_run)
    characters = re.sub(r"[^a-z0-9]", "", job_id.lower())
    if not characters or "{{" in job_id:
        raise ConfigError("no job id to name the run by", where="job_id", value=job_id, fix="run it as a pipeline")
    return require_run_id(f"{name}-{characters[:JOB_ID_CHARACTERS]}")


def require_run_id(run_id: str) -> str:
    """Return the id. Raises ConfigError unless it is a plain name."""
    if not RUN_ID.fullmatch(run_id):
        fix = "use at most 63 lower-case letters, digits and dashes"
        raise ConfigError("not a run id", where="run", value=run_id, fix=fix)
    return run_id


def open_run(config: Config, run_id: str, must_exist: bool = False) -> OpenedRun:
    """Return a run, new or with the configuration that it was opened with; nothing is written.

    Raises ConfigError if a run that must exist does not, and OtherTrainingError if it is another training.
    """
    paths = RunPaths.of(config.run.storage_root, run_id)
    previous = read_config(paths) if is_opened(paths) else None
    if previous is None and must_exist:
        raise _describe_missing_run(config, run_id)
    if previous is not None and has_trained(paths):
        identity = _read_checkpoint_identity(paths)
        if identity and not storage.exists(paths.complete):  # a complete run takes no further step
            require_present_order(identity, paths.uri)
        if identity != config.training_identity(""):
            require_same_settings(previous, config, paths.uri)
    return OpenedRun(config, paths, previous, must_exist)


def with_order(config: Config, paths: RunPaths) -> Config:
    """Return the configuration with the order of samples that its run was opened with, and in order 2 without lanes."""
    order = min(config.data.order, read_config(paths).data.order if is_opened(paths) else ORDER)
    own = {} if order == ORDER else {"order": order, "lanes": DataConfig().lanes}
    return config.model_copy(update={"data": config.data.model_copy(update=own)})


def keep_run(run: OpenedRun, job_id: str = "") -> None:
    """Open a run: write its configuration into its folder, and the pipeline run that works on it from now on.

    A run that was opened before may be opened again only when nothing can refuse it any more.
    """
    if job_id:
        storage.publish_json(_opener_uri(run.paths, job_id), {"job_id": job_id, "time": time.time()})
    data = run.config.data.model_copy(update={"rehash": False})  # a wish of whoever opens it now
    keep_config(run.paths, run.config.model_copy(update={"data": data}), run.previous)


def read_openings(paths: RunPaths) -> list[float]:
    """Return the times at which pipeline runs have opened a run, in seconds since 1970; damaged ones are left out."""
    folder, times = storage.join(paths.uri, "pipelines"), []
    for name in storage.list_names(folder):
        with contextlib.suppress(DataError, ValueError, KeyError, TypeError, FileNotFoundError):
            times.append(float(storage.read_json(storage.join(folder, name))["time"]))
    return times


def is_opened_by(paths: RunPaths, job_id: str) -> bool:
    """Return True if the pipeline run has opened the run; one that was refused must leave the run as it was."""
    return storage.exists(_opener_uri(paths, job_id))


def _opener_uri(paths: RunPaths, job_id: str) -> str:
    return storage.join(paths.uri, "pipelines", f"{re.sub(r'[^A-Za-z0-9-]', '', job_id)}.json")


def has_trained(paths: RunPaths) -> bool:
    """Return True if a checkpoint was ever committed: from then on the run cannot become another training."""
    return (
        bool(commit.list_committed(paths)) or attempts.read_last_start_step(paths) > 0 or storage.exists(paths.complete)
    )


def _read_checkpoint_identity(paths: RunPaths) -> dict[str, Any]:
    """Read whose training the newest checkpoint is, whatever the folder's configuration says by now; empty if none is.

    The identity is without the dataset's digest, as that of a configuration.
    """
    for name in commit.list_committed(paths)[:1]:
        with contextlib.suppress(CheckpointError):  # damaged, or retired this moment
            manifest, _ = commit.read_checkpoint_manifest(storage.join(paths.checkpoints, str(name)))
            return {**manifest.training_identity, "dataset": ""}
    return {}


def require_same_settings(previous: Config, config: Config, where: str) -> None:
    """Raise OtherTrainingError, which names every setting that differs, unless both are the same training."""
    old, new = previous.training_identity(""), config.training_identity("")
    changes = list_differences(old, new)
    if changes:
        what = f"this run is another training: {', '.join(f'{key} {old} -> {new}' for key, old, new in changes)}"
        raise OtherTrainingError(what, where=where, fix="start a new run, or set them back")


def _describe_missing_run(config: Config, run_id: str) -> ConfigError:
    folder = storage.join(config.run.storage_root, "runs")
    runs = storage.list_names(folder)
    fix = f"there are: {', '.join(runs[-5:])}" if runs else "there are no runs yet"
    return ConfigError("no such run", where=folder, value=run_id, fix=fix)
