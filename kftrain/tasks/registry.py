"""Table of tasks by the `kind` of the configuration's `task` section. Nothing here imports torch."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from typing import Any, cast

from kftrain.core.plugins import is_plugin, user_code
from kftrain.data.assets import find_storage_root, read_assets
from kftrain.errors import ConfigError, DataError
from kftrain.models import options
from kftrain.tasks.base import Task
from kftrain.tasks.settings import TaskConfig

BUILT_IN = {
    "click_prediction": "kftrain.tasks.click_prediction:ClickPrediction",
    "language_modeling": "kftrain.tasks.language_modeling:LanguageModeling",
    "image_classification": "kftrain.tasks.image_classification:ImageClassification",
    "skip_gram": "kftrain.tasks.skip_gram:SkipGram",
}
"""Kind -> `module:attr`, imported when it is built."""

MAX_NAME_CHARACTERS = 80

METHODS = tuple(name for name in dir(Task) if inspect.isfunction(getattr(Task, name)))


def build_task_of(config: TaskConfig, manifest_uri: str, settings: Mapping[str, Any]) -> Task:
    """Build the task of a `task` section and restore the files that a dataset was encoded with.

    `settings`: the dataset's, from its manifest. Raises as `build_task` does, and DataError if the files are gone.
    """
    task = build_task(config)
    if task.asset_names:
        assets = read_assets(find_storage_root(manifest_uri), settings)
        if missing := [name for name in task.asset_names if name not in assets]:
            what = f"the shards were written without {missing[0]}, which the task needs"
            raise DataError(what, where=manifest_uri, fix="run the shard step again")
        with user_code("task.restore") if is_plugin(config.kind) else contextlib.nullcontext():
            task.restore(assets)
    return task


def build_task(config: TaskConfig) -> Task:
    """Build the task of a `task` section.

    Raises ConfigError for an unknown kind, for an option that is unknown, missing or of the wrong type, and if a user's
    `module:attr` is no task; UserCodeError if it raises.
    """
    target = options.import_kind(config.kind, BUILT_IN, "task")
    if isinstance(target, type):  # before it is called
        _require_task(target, config.kind)
    task = options.construct(target, config.kind, "task", config.options())
    _require_task(type(task), config.kind)
    hidden = [name for name in METHODS if not callable(getattr(task, name))]
    if hidden:
        raise ConfigError("an attribute of its own hides a method", where="task.kind", value=hidden, fix="rename it")
    task.built_from = config
    task.options = options.with_defaults(target, config.options())
    for name in ("loss_unit", "loss_metric"):
        value: object = getattr(task, name)
        if not isinstance(value, str) or len(value) > MAX_NAME_CHARACTERS:
            what = f"{name} must be text of at most {MAX_NAME_CHARACTERS} characters"
            raise ConfigError(what, where=config.kind, value=value)
    return cast(Task, task)


def _require_task(target: type, kind: str) -> None:
    """Raise ConfigError for a class that is no task, or lacks a method."""
    if not issubclass(target, Task):
        raise ConfigError("is no task", where="task.kind", value=kind, fix="derive from kftrain.tasks.Task")
    if target.__abstractmethods__:
        raise ConfigError(f"lacks {', '.join(sorted(target.__abstractmethods__))}", where="task.kind", value=kind)
