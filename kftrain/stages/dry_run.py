"""Shows the jobs of a run as text, as a launcher would create them, without starting anything."""

from __future__ import annotations

from collections.abc import Sequence

from kftrain.config import Config
from kftrain.launch.base import build_launcher
from kftrain.launch.kubernetes.fabric import describe_fabric
from kftrain.launch.spec import MLFLOW_RUN_ID_ENV, make_job
from kftrain.run.config import read_config
from kftrain.run.job_tasks import JOB_TASKS, SHARDING, JobTask
from kftrain.run.paths import RunPaths
from kftrain.stages import preflight
from kftrain.stages.layouts import with_layout
from kftrain.tracking import mlflow_run


def describe_jobs_of_new_run(config: Config, run_id: str = "") -> str:
    """Return the jobs of a run that need not exist, as text. Touches no storage.

    `run_id`: empty: `<run.name>-dry-run`. Raises ConfigError or LaunchError if the job would be refused.
    """
    paths = RunPaths.of(config.run.storage_root, run_id or f"{config.run.name}-dry-run")
    tasks = [task for task in JOB_TASKS.values() if task.is_in_every_run]
    return _format_jobs(paths, config, [*tasks, SHARDING] if config.data.shard_pods > 1 else tasks)


def describe_job_of_run(run_uri: str, task: str) -> str:
    """Return a job of a run that exists, as text; the run is only read. Raises ConfigError or LaunchError."""
    paths = RunPaths(run_uri)
    return _format_jobs(paths, read_config(paths), [JOB_TASKS[task]], mlflow_run.read_mlflow_run_id(paths))


def _format_jobs(paths: RunPaths, config: Config, tasks: Sequence[JobTask], mlflow_run_id: str = "") -> str:
    config, table = with_layout(config)
    preflight.check_batch(config)
    preflight.check_model(config)
    preflight.check_shard_pods(config)
    launcher = build_launcher(config)
    text = "".join(f"# {line}\n" for line in table)
    for task in tasks:
        spec = make_job(task, paths, config, mlflow_run_id)
        text += f"# {spec.task}: {spec.size}\n"
        if task.is_tracked and MLFLOW_RUN_ID_ENV not in spec.environment:
            text += f"# The launcher adds {MLFLOW_RUN_ID_ENV}, once MLflow has a run.\n"
        if task.meets and config.launch.has_pods:
            lines = describe_fabric(config.launch.kubernetes, config.launch.environment)
            text += "".join(f"# {line}\n" for line in lines)
        text += launcher.build(spec).text
    return text
