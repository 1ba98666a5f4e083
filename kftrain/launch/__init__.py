"""Jobs: what runs on many processes, where it is started, and how its success is known. Imports no torch."""

from typing import TYPE_CHECKING

from kftrain.core.lazy import attributes

if TYPE_CHECKING:
    from kftrain.launch.base import build_launcher, find_jobs, require_remote_jobs
    from kftrain.launch.jobs import run_bandwidth, run_evaluation, run_sharding, run_training
    from kftrain.launch.kubernetes.ownership import is_pipeline_pod
    from kftrain.launch.kubernetes.workflow import (
        build_pipeline_tags,
        explain_pipeline_run,
        find_pipeline_place,
        is_pipeline_over,
    )

__all__ = [
    "build_launcher",
    "find_jobs",
    "require_remote_jobs",
    "run_bandwidth",
    "run_evaluation",
    "run_sharding",
    "run_training",
    "is_pipeline_pod",
    "explain_pipeline_run",
    "build_pipeline_tags",
    "find_pipeline_place",
    "is_pipeline_over",
]

__getattr__ = attributes(
    __name__,
    {
        "build_launcher": "kftrain.launch.base",
        "find_jobs": "kftrain.launch.base",
        "require_remote_jobs": "kftrain.launch.base",
        "run_bandwidth": "kftrain.launch.jobs",
        "run_evaluation": "kftrain.launch.jobs",
        "run_sharding": "kftrain.launch.jobs",
        "run_training": "kftrain.launch.jobs",
        "is_pipeline_pod": "kftrain.launch.kubernetes.ownership",
        "explain_pipeline_run": "kftrain.launch.kubernetes.workflow",
        "build_pipeline_tags": "kftrain.launch.kubernetes.workflow",
        "find_pipeline_place": "kftrain.launch.kubernetes.workflow",
        "is_pipeline_over": "kftrain.launch.kubernetes.workflow",
    },
)
