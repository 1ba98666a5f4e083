"""Makes the files that a registered version carries for people and servers; a warning names what cannot be made."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from kftrain import report
from kftrain.config import Config
from kftrain.core.plugins import user_code
from kftrain.core.progress import Progress
from kftrain.data.opened import OpenedDataset
from kftrain.data.shards.manifest import Manifest
from kftrain.errors import KftrainError
from kftrain.registry.package import STORES, ModelPackage, requirements
from kftrain.registry.wheel import own_wheel
from kftrain.run.documents import Completion, Evaluation, RunShards
from kftrain.tasks import Task, build_task_of
from kftrain.tracking.runs import model_parameters

Made = TypeVar("Made")


def package_of(
    config: Config,
    shards: RunShards,
    manifest: Manifest,
    completion: Completion,
    evaluation: Evaluation,
    progress: Progress,
) -> ModelPackage:
    """Make the package of a run's model. Registering needs none of its parts, so none of them fails a run."""

    def make_or_warn(what: str, make: Callable[[], Made], otherwise: Made) -> Made:
        try:
            return make()
        except KftrainError as error:
            progress(f"warning: the registered version has no {what}: {error.line}")
            return otherwise

    no_example: tuple[Mapping[str, Any], Mapping[str, str]] = ({}, {})
    example, types = make_or_warn("input example", lambda: _make_example(config, shards, manifest), no_example)
    card = make_or_warn("card", lambda: report.model_card(config, manifest.to_dict(), completion, evaluation), "")
    return ModelPackage(
        card=card,
        params=model_parameters(config),
        requirements=requirements(completion.packages, _list_installed(), completion.export_uri),
        wheel=make_or_warn("wheel of kftrain", own_wheel, None),
        input_example=example,
        answer_types=types,
    )


def _make_example(config: Config, shards: RunShards, manifest: Manifest) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """Return a row for `predict`, made of the first validation sample, and the types of the columns of its answer."""
    task: Task = build_task_of(config.task, shards.manifest_uri, manifest.task_settings)
    dataset = OpenedDataset(shards.manifest_uri, manifest, "validation")
    if not len(dataset):
        return {}, {}
    with user_code("task.input_example"):
        example = task.input_example(dataset[0])
        return (example, task.answer_types()) if example else ({}, {})


def _list_installed() -> dict[str, str]:
    """Return the installed distributions among those that a server may need, name -> version."""
    versions = {}
    for name in ("mlflow", *(name for names in STORES.values() for name in names)):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
