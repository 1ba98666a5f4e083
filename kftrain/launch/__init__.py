"""Jobs: what runs on many processes, where it is started, and how its success is known. Imports no torch."""

from kftrain.launch.jobs import run_evaluation, run_training
from kftrain.launch.kubernetes.access import require_jobs
from kftrain.launch.kubernetes.ownership import is_pipeline_pod
from kftrain.launch.kubernetes.workflow import explain_pipeline_run, pipeline_tags

__all__ = ["run_evaluation", "run_training", "require_jobs", "is_pipeline_pod", "explain_pipeline_run", "pipeline_tags"]
