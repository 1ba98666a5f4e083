"""What stands beside exported weights: how model and task are built again, and the task's own files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from kftrain.checkpoint import exporting
from kftrain.checkpoint.export import Description
from kftrain.config import Config
from kftrain.core import storage
from kftrain.core.plugins import user_code
from kftrain.data.shards.manifest import read_manifest
from kftrain.models import build_model
from kftrain.run.paths import RunPaths
from kftrain.tasks import build_task, build_task_of
from kftrain.tasks.base import Task
from kftrain.trust import read_shards


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
