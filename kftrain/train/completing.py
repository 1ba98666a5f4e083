"""The end of a training: the export of the checkpoint that counts, then COMPLETE.json. One process does it."""

from __future__ import annotations

import importlib.metadata
import sys
from dataclasses import dataclass
from typing import Any

from torch import nn

from kftrain.checkpoint import exporting
from kftrain.checkpoint.export import Description
from kftrain.config import Config
from kftrain.core import storage
from kftrain.core.plugins import user_code
from kftrain.core.progress import to_log
from kftrain.data.shards.manifest import read_manifest
from kftrain.errors import CheckpointError
from kftrain.models import build_model
from kftrain.run import attempts, commit
from kftrain.run.commit import CheckpointName
from kftrain.run.documents import Completion
from kftrain.run.paths import RunPaths
from kftrain.run.selection import BestEvaluation, in_order
from kftrain.tasks import build_task, build_task_of
from kftrain.tasks.base import Task
from kftrain.train.reading import Training, training_samples
from kftrain.trust import read_shards


@dataclass(frozen=True)
class Finished:
    """What rank 0 knows after the last step."""

    attempt: int
    world_size: int
    num_parameters: int
    history: list[dict[str, Any]]
    described: Described
    last_step: int
    selection: BestEvaluation | None
    """The best evaluation, where that decides what is exported."""


def complete(training: Training, finished: Finished, seconds: float) -> None:
    """Exports, and says so. Raises FencedError, CheckpointError and RetryableError."""
    paths = training.paths
    attempts.require_held(paths, finished.attempt)
    checkpoint_uri, (export_uri, export_digest) = _export(paths, finished)
    checkpoint, digest = commit.read_checkpoint_manifest(checkpoint_uri)
    history = [point for point in finished.history if point["step"] <= checkpoint.step]
    completion = Completion(
        run_id=paths.run_id,
        step=checkpoint.step,
        samples_consumed=checkpoint.samples_consumed,
        attempt=finished.attempt,
        world_size=finished.world_size,
        checkpoint_uri=checkpoint_uri,
        checkpoint_digest=digest,
        export_uri=export_uri,
        export_digest=export_digest,
        dataset_digest=training.manifest.dataset_digest,
        training_digest=checkpoint.training_digest,
        num_parameters=finished.num_parameters,
        metrics=_last_values(history),
        selection=finished.selection,
        trained_steps=finished.last_step,
        seconds=seconds,
        loss_unit=training.task.loss_unit,
        num_training_samples=training_samples(training).num_samples,
        packages=packages_in_use(),
    )
    attempts.require_held(paths, finished.attempt)
    storage.publish_json(paths.complete, completion.to_dict())
    to_log(f"complete: step {completion.step}, exported to {export_uri}")


def _export(paths: RunPaths, finished: Finished) -> tuple[str, tuple[str, str]]:
    """The checkpoint that is exported, and URI and digest of its export: the first that is whole of those that may be.

    Raises CheckpointError where none is.
    """
    names, described = commit.committed(paths), finished.described
    steps = in_order(finished.selection, _values_of(finished), [name.step for name in names])
    candidates = [name for step in steps for name in names if name.step == step]
    problems: list[CheckpointError] = []
    for name in candidates:
        uri = storage.join(paths.checkpoints, str(name))
        try:
            export = exporting.export_checkpoint(
                paths, uri, described.description, described.model_config, described.task_files
            )
        except CheckpointError as error:
            to_log(f"warning: the checkpoint at step {name.step} cannot be exported: {error.line}")
            problems.append(error)
            continue
        _warn_of_another(finished.selection, name)
        return uri, export
    resume = "resume the run, which goes on from the checkpoint before, or " if len(candidates) < len(names) else ""
    raise CheckpointError(
        f"no checkpoint that could be the model is whole: {problems[0].what if problems else 'there is none'}",
        where=problems[0].where if problems else paths.checkpoints,
        fix=f"{resume}start a new run",
    )


def _warn_of_another(selection: BestEvaluation | None, name: CheckpointName) -> None:
    if selection is not None and selection.value is not None and name.step != selection.step:
        best = f"the best checkpoint, of step {selection.step:,}, is damaged or gone"
        to_log(f"warning: {best}: that of step {name.step:,} is exported as the model")


def _values_of(finished: Finished) -> dict[int, float]:
    """Step -> value of the metric by which the best checkpoint is chosen."""
    if finished.selection is None:
        return {}
    key = f"validation/{finished.selection.metric}"
    return {point["step"]: float(point[key]) for point in finished.history if key in point}


def _last_values(history: list[dict[str, Any]]) -> dict[str, float]:
    values: dict[str, float] = {}
    for point in history:
        values.update({name: float(value) for name, value in point.items() if name != "step"})
    return values


DISTRIBUTIONS = {
    "torch": "torch",
    "numpy": "numpy",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "PIL": "pillow",
}
"""Top-level module -> the distribution that it comes from."""


def packages_in_use() -> dict[str, str]:
    """Distribution -> version, of those that this process has imported."""
    found = {}
    for module, distribution in DISTRIBUTIONS.items():
        if module in sys.modules:
            try:
                found[distribution] = importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:  # built in some way of its own
                continue
    return found


@dataclass(frozen=True)
class Described:
    """What stands beside exported weights; known before the first step, so that nothing is trained in vain."""

    description: Description
    model_config: dict[str, Any]
    task_files: dict[str, bytes]
    """File name -> content."""


def describe_export(model: nn.Module, config: Config, task: Task, arguments: dict[str, Any]) -> Described:
    """What stands beside the weights of a model that was built with these arguments of the task.

    Raises UserCodeError where the model cannot say what it is, ConfigError for files of impossible names.
    """
    with user_code("task.export_files"):
        task_files = dict(task.export_files())
    for name in task_files:
        exporting.require_task_file(name)
    describe_ = getattr(model, "export_config", None)
    model_config: dict[str, Any] = {"kind": config.model.kind, **config.model.options()}
    with user_code("model.export_config"):
        model_config = describe_() if callable(describe_) else model_config
        storage.dump_json({"config": model_config, "arguments": arguments})
    exporting.require_types(model)
    description = Description(
        model=config.model.model_dump(mode="json"), task=config.task.model_dump(mode="json"), model_arguments=arguments
    )
    return Described(description, model_config, task_files)


def model_arguments(task: Task) -> dict[str, Any]:
    """What the task tells the model. Raises UserCodeError."""
    with user_code("task.model_arguments"):
        return task.model_arguments()


def task_of_run(paths: RunPaths, config: Config) -> Task:
    """The task of a run, with the files of its dataset where it has any. Raises DataError where those are gone."""
    task = build_task(config.task)
    if not task.asset_names:
        return task
    shards = read_shards(paths)
    return build_task_of(config.task, shards.manifest_uri, read_manifest(shards.manifest_uri).task_settings)


def export_model(paths: RunPaths, config: Config, task: Task, checkpoint_uri: str) -> tuple[str, str]:
    """Exports a committed checkpoint of a run; returns the export's URI and digest."""
    arguments = model_arguments(task)
    described = describe_export(build_model(config.model, arguments), config, task, arguments)
    return exporting.export_checkpoint(
        paths, checkpoint_uri, described.description, described.model_config, described.task_files
    )
