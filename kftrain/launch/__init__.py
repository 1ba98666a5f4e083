"""Jobs: what runs on many processes, where it is started, and how its success is known. Imports no torch."""

from typing import TYPE_CHECKING

from kftrain.core.lazy import attributes

if TYPE_CHECKING:
    from kftrain.launch.base import build_launcher as build_launcher
    from kftrain.launch.base import find_jobs as find_jobs
    from kftrain.launch.base import require_remote_jobs as require_remote_jobs
    from kftrain.launch.jobs import run_bandwidth as run_bandwidth
    from kftrain.launch.jobs import run_evaluation as run_evaluation
    from kftrain.launch.jobs import run_sharding as run_sharding
    from kftrain.launch.jobs import run_training as run_training
    from kftrain.launch.kubernetes.ownership import is_pipeline_pod as is_pipeline_pod
    from kftrain.launch.kubernetes.workflow import build_pipeline_tags as build_pipeline_tags
    from kftrain.launch.kubernetes.workflow import explain_pipeline_run as explain_pipeline_run
    from kftrain.launch.kubernetes.workflow import find_pipeline_place as find_pipeline_place
    from kftrain.launch.kubernetes.workflow import is_pipeline_over as is_pipeline_over

__getattr__ = attributes(
    __name__,
    {
        "kftrain.launch.base": ("build_launcher", "find_jobs", "require_remote_jobs"),
        "kftrain.launch.jobs": ("run_bandwidth", "run_evaluation", "run_sharding", "run_training"),
        "kftrain.launch.kubernetes.ownership": ("is_pipeline_pod",),
        "kftrain.launch.kubernetes.workflow": (
            "explain_pipeline_run",
            "build_pipeline_tags",
            "find_pipeline_place",
            "is_pipeline_over",
        ),
    },
)
