"""Which tasks there are, by the `kind` of the configuration's `task` section. Nothing here imports torch."""

from __future__ import annotations

from typing import cast

from kftrain.errors import ConfigError
from kftrain.models import options
from kftrain.tasks.base import Task
from kftrain.tasks.settings import TaskConfig

BUILT_IN = {
    "language_modeling": "kftrain.tasks.language_modeling:LanguageModeling",
    "image_classification": "kftrain.tasks.image_classification:ImageClassification",
}
"""Kind -> `module:attr`, imported when it is built."""

MAX_NAME_CHARACTERS = 80

METHODS = tuple(name for name in vars(Task) if not name.startswith("_"))
"""What a task must have."""


def build_task(config: TaskConfig) -> Task:
    """The task of a `task` section.

    Raises ConfigError for an unknown kind, an option that is unknown, missing or of the wrong type, and where
    a user's `module:attr` lacks a method; UserCodeError where it raises.
    """
    target = options.find(config.kind, BUILT_IN, "task")
    if isinstance(target, type):  # before it is called
        _require_methods(target, config.kind)
    task = options.construct(target, config.kind, "task", config.options())
    _require_methods(task, config.kind)
    for name in ("loss_unit", "loss_metric"):
        _require_text(name, getattr(task, name, ""), config.kind)
    return cast(Task, task)


def _require_text(name: str, value: object, kind: str) -> None:
    if not isinstance(value, str) or len(value) > MAX_NAME_CHARACTERS:
        raise ConfigError(f"{name} must be text of at most {MAX_NAME_CHARACTERS} characters", where=kind, value=value)


def _require_methods(task: object, kind: str) -> None:
    missing = [name for name in METHODS if not callable(getattr(task, name, None))]
    if missing:
        raise ConfigError(f"lacks {', '.join(missing)}", where="task.kind", value=kind, fix="see kftrain/tasks/base.py")
