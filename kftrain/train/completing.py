"""The end of a training: the export of the checkpoint that counts, then COMPLETE.json. One process does it.

What will stand beside the exported weights is described before the first step, so that nothing is trained in vain.
"""

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
from kftrain.errors import CheckpointError
from kftrain.models import build_model
from kftrain.run import attempts, commit
from kftrain.run.documents import Completion
from kftrain.run.paths import RunPaths
from kftrain.run.selection import BestEvaluation, order_steps
from kftrain.tasks import build_task, build_task_of
from kftrain.tasks.base import Task
from kftrain.tasks.run_dataset import read_dataset
from kftrain.train.reading import Training, open_training_samples


@dataclass(frozen=True)
class Finished:
    """The results of an attempt that has taken its last step, as the first process knows them."""

    attempt: int
    world_size: int
    num_parameters: int
    history: list[dict[str, Any]]
    description: ExportDescription
    last_step: int
    selection: BestEvaluation | None
    """The best evaluation, where that decides what is exported."""
    copy_tensors: exporting.CopyTensors | None = None
    """See `exporting.export_checkpoint`."""


def complete(training: Training, finished: Finished, seconds: float) -> None:
    """Export the model and write COMPLETE.json. Raises FencedError, CheckpointError and RetryableError."""
    paths = training.paths
    attempts.require_held(paths, finished.attempt)  # an attempt that is fenced writes no export
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
        metrics=_take_last_values(history),
        selection=finished.selection,
        trained_steps=finished.last_step,
        seconds=seconds,
        loss_unit=training.task.loss_unit,
        num_training_samples=open_training_samples(training)[0].num_samples,
        packages=list_packages_in_use(),
    )
    # Asked again, since exporting may have taken long: another attempt may have begun meanwhile.
    attempts.require_held(paths, finished.attempt)
    storage.publish_json(paths.complete, completion.to_dict())
    to_log(f"complete: step {completion.step}, exported to {export_uri}")


def _export(paths: RunPaths, finished: Finished) -> tuple[str, tuple[str, str]]:
    """Export the first whole checkpoint of those that may be the model; return its URI, and the export's with digest.

    Raises CheckpointError where none is whole.
    """
    names, description = commit.list_committed(paths), finished.description
    steps = order_steps(finished.selection, _read_metric_by_step(finished), [name.step for name in names])
    candidates = [name for step in steps for name in names if name.step == step]
    problems: list[CheckpointError] = []
    for name in candidates:
        uri = storage.join(paths.checkpoints, str(name))
        try:
            export = _export_checkpoint(paths, uri, description, finished.copy_tensors)
        except CheckpointError as error:  # the next one may be whole; an outage is raised, and says nothing of this one
            to_log(f"warning: the checkpoint at step {name.step} cannot be exported: {error.line}")
            problems.append(error)
            continue
        best = finished.selection
        if best is not None and best.value is not None and name.step != best.step:
            gone = f"the best checkpoint, of step {best.step:,}, is damaged or gone"
            to_log(f"warning: {gone}: that of step {name.step:,} is exported as the model")
        return uri, export
    resume = "resume the run, which goes on from the checkpoint before, or " if len(candidates) < len(names) else ""
    raise CheckpointError(
        f"no checkpoint that could be the model is whole: {problems[0].what if problems else 'there is none'}",
        where=problems[0].where if problems else paths.checkpoints,
        fix=f"{resume}start a new run",
    )


def _read_metric_by_step(finished: Finished) -> dict[int, float]:
    """Return the values of the metric by which the best checkpoint is chosen, by step."""
    if finished.selection is None:
        return {}
    key = f"validation/{finished.selection.metric}"
    return {point["step"]: float(point[key]) for point in finished.history if key in point}


def _take_last_values(history: list[dict[str, Any]]) -> dict[str, float]:
    return {name: float(value) for point in history for name, value in point.items() if name != "step"}


DISTRIBUTIONS = {
    "torch": "torch",
    "numpy": "numpy",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "PIL": "pillow",
}
"""Top-level module -> the distribution that installs it."""


def list_packages_in_use() -> dict[str, str]:
    """Return the versions of those distributions that this process has imported, by name."""
    versions = {}
    for module, distribution in DISTRIBUTIONS.items():
        if module in sys.modules:
            try:
                versions[distribution] = importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:  # built in some way of its own
                continue
    return versions


@dataclass(frozen=True)
class ExportDescription:
    """The documents and files that stand beside exported weights."""

    description: Description
    model_config: dict[str, Any]
    task_files: dict[str, bytes]
    """Name of a file of the task's own -> its content."""


def describe_export(model: nn.Module, config: Config, task: Task, arguments: dict[str, Any]) -> ExportDescription:
    """Describe the export of a model that was built with these arguments of the task.

    Raises UserCodeError where the model cannot say what it is, ConfigError for files of impossible names.
    """
    with user_code("task.export_files"):
        task_files = dict(task.export_files())
    for name in task_files:
        exporting.require_task_file(name)
    own_config = getattr(model, "export_config", None)
    model_config: dict[str, Any] = {"kind": config.model.kind, **config.model.options()}
    with user_code("model.export_config"):
        model_config = own_config() if callable(own_config) else model_config
        storage.dump_json({"config": model_config, "arguments": arguments})  # for its error alone
    exporting.require_types(model)
    description = Description(
        model=config.model.model_dump(mode="json"), task=config.task.model_dump(mode="json"), model_arguments=arguments
    )
    return ExportDescription(description, model_config, task_files)


def ask_model_arguments(task: Task) -> dict[str, Any]:
    """Ask the task for the arguments of the model's constructor. Raises UserCodeError."""
    with user_code("task.model_arguments"):
        return task.model_arguments()


def build_task_of_run(paths: RunPaths, config: Config) -> Task:
    """Build the task of a run, with its dataset's files where it needs some. Raises DataError where those are gone."""
    task = build_task(config.task)
    if not task.asset_names:
        return task
    shards, manifest = read_dataset(paths, config.data)
    return build_task_of(config.task, shards.manifest_uri, manifest.task_settings)


def export_model(paths: RunPaths, config: Config, task: Task, checkpoint_uri: str) -> tuple[str, str]:
    """Export a committed checkpoint of a run; return the export's URI and digest."""
    arguments = ask_model_arguments(task)
    description = describe_export(build_model(config.model, arguments), config, task, arguments)
    return _export_checkpoint(paths, checkpoint_uri, description)


def _export_checkpoint(
    paths: RunPaths, uri: str, beside: ExportDescription, copy: exporting.CopyTensors | None = None
) -> tuple[str, str]:
    return exporting.export_checkpoint(paths, uri, beside.description, beside.model_config, beside.task_files, copy)
