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
    """The pod settings that Kubeflow passes through, in the Kubernetes API's form; None or empty: nothing was set."""

    node_selector: dict[str, str] | None
    tolerations: list[dict[str, Any]] | None
    affinity: dict[str, Any] | None
    volumes: list[dict[str, Any]] | None
    volume_mounts: list[dict[str, Any]] | None


def with_task_config(config: Config, task_config: TaskPodSettings | None) -> Config:
    """Return the configuration with the task's pod settings: maps and lists are added to its own, affinity wins."""
    if task_config is None:
        return config
    own = config.launch.kubernetes
    settings = own.model_copy(
        update={
            "node_selector": {**own.node_selector, **(task_config.node_selector or {})},
            "tolerations": _join(own.tolerations, task_config.tolerations),
            "affinity": task_config.affinity or own.affinity,
            "volumes": _join(own.volumes, task_config.volumes),
            "volume_mounts": _join(own.volume_mounts, task_config.volume_mounts),
        }
    )
    return config.model_copy(update={"launch": config.launch.model_copy(update={"kubernetes": settings})})


def apply_task_pods(config: Config, paths: RunPaths, task_config: TaskPodSettings | None) -> Config:
    """Return `with_task_config`, and save it in the run's folder if it changes anything: workers read it there."""
    changed = with_task_config(config, task_config)
    if changed != config:
        keep_config(paths, changed)
    return changed


def _join(own: tuple[dict[str, Any], ...], further: list[dict[str, Any]] | None) -> tuple[dict[str, Any], ...]:
    """Append the items that are not there yet: a retried step finds those that it has saved before."""
    return (*own, *(item for item in further or () if item not in own))
