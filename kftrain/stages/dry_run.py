"""Shows the jobs of a run as text, as a launcher would create them, without starting anything."""

from __future__ import annotations

from collections.abc import Sequence

from kftrain.config import Config
from kftrain.launch.base import build_launcher
from kftrain.launch.spec import MLFLOW_RUN_ID_ENV, JobSpec, evaluate_job, train_job
from kftrain.run.completion import JobTask
from kftrain.run.config import read_config
from kftrain.run.paths import RunPaths
from kftrain.stages import preflight, tracked

ALL_TASKS: tuple[JobTask, ...] = ("train", "evaluate")


def jobs_of_new_run(config: Config, run_id: str = "") -> str:
    """Return the jobs of a run that need not exist, as text. Touches no storage.

    `run_id`: empty: `<run.name>-dry-run`. Raises ConfigError or LaunchError if the job would be refused.
    """
    paths = RunPaths.of(config.run.storage_root, run_id or f"{config.run.name}-dry-run")
    return _format_jobs(paths, config, ALL_TASKS)


def job_of_run(run_uri: str, task: JobTask) -> str:
    """Return a job of a run that exists, as text; the run is only read. Raises ConfigError or LaunchError."""
    paths = RunPaths(run_uri)
    return _format_jobs(paths, read_config(RunPaths(run_uri)), (task,), tracked.read(paths))


def _format_jobs(paths: RunPaths, config: Config, tasks: Sequence[JobTask], mlflow_run_id: str = "") -> str:
    preflight.check_batch(config)
    preflight.check_model(config)
    launcher = build_launcher(config)
    specs = [_make_spec(task, paths, config, mlflow_run_id) for task in tasks]
    return "".join(f"{_format_heading(spec)}{launcher.build(spec).text}" for spec in specs)


def _make_spec(task: JobTask, paths: RunPaths, config: Config, mlflow_run_id: str) -> JobSpec:
    if task == "train":
        return train_job(paths, config, mlflow_run_id)
    # Where its metrics will be depends on the trained model; the launcher alone looks there, not the job.
    return evaluate_job(paths, config, paths.evaluation_request)


def _format_heading(spec: JobSpec) -> str:
    line = f"# {spec.task}: {spec.size}\n"
    if spec.task == "train" and MLFLOW_RUN_ID_ENV not in spec.environment:
        line += f"# The launcher adds {MLFLOW_RUN_ID_ENV}, once MLflow has a run.\n"
    return line
