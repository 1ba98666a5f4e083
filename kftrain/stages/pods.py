"""Pod settings of a pipeline's task, for the workers instead of the step: Kubeflow's `dsl.TaskConfig`.

Who builds a pipeline of their own sets node selector, tolerations, affinity and volumes on the train task as on any
other task; the step itself needs none of them and hands them on.
"""

from __future__ import annotations

from typing import Any, Protocol

from kftrain.config import Config
from kftrain.run.config import keep_config
from kftrain.run.paths import RunPaths


class TaskPodSettings(Protocol):
    """What Kubeflow passes through, as the Kubernetes API writes it; None or empty: nothing was set."""

    node_selector: dict[str, str] | None
    tolerations: list[dict[str, Any]] | None
    affinity: dict[str, Any] | None
    volumes: list[dict[str, Any]] | None
    volume_mounts: list[dict[str, Any]] | None


def with_task_config(config: Config, task_config: TaskPodSettings | None) -> Config:
    """The configuration with what was set on the task in place of, or in addition to, its own pod settings."""
    if task_config is None:
        return config
    own = config.launch.kubernetes
    settings = own.model_copy(
        update={
            "node_selector": {**own.node_selector, **(task_config.node_selector or {})},
            "tolerations": _joined(own.tolerations, task_config.tolerations),
            "affinity": task_config.affinity or own.affinity,
            "volumes": _joined(own.volumes, task_config.volumes),
            "volume_mounts": _joined(own.volume_mounts, task_config.volume_mounts),
        }
    )
    return config.model_copy(update={"launch": config.launch.model_copy(update={"kubernetes": settings})})


def apply(config: Config, paths: RunPaths, task_config: TaskPodSettings | None) -> Config:
    """The same, saved in the run's folder where it changes anything: workers read it there."""
    changed = with_task_config(config, task_config)
    if changed != config:
        keep_config(paths, changed)
    return changed


def _joined(own: tuple[dict[str, Any], ...], further: list[dict[str, Any]] | None) -> tuple[dict[str, Any], ...]:
    """Each once: a retried step finds what it has saved."""
    return (*own, *(item for item in further or () if item not in own))
