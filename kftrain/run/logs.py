"""The logs of a run: a folder for each attempt and one for each other task, a file for each process."""

from __future__ import annotations

from pathlib import Path

from kftrain.core import storage
from kftrain.run import attempts
from kftrain.run.best_effort import REPORT_SECONDS, best_effort
from kftrain.run.job_tasks import JOB_TASKS
from kftrain.run.log_size import shorten_log
from kftrain.run.paths import RunPaths


def find_next_attempt(paths: RunPaths, task: str) -> int | None:
    """Return the number of the attempt that a job's next claim will make; None for a task that claims none."""
    return attempts.find_last_attempt(paths) + 1 if JOB_TASKS[task].commits else None


def build_logs_uri(paths: RunPaths, task: str, attempt: int | None) -> str:
    """Return the folder of a job's logs. An attempt that fails before its claim shares it with the next one.

    An attempt of unknown number counts as the first.
    """
    return storage.join(paths.logs, JOB_TASKS[task].log_folder or f"attempt-{attempt or 1}")


def find_last_logs(paths: RunPaths, task: str) -> str:
    """Return the folder of the logs of a task's last job; it may not be there."""
    if folder := JOB_TASKS[task].log_folder:
        return storage.join(paths.logs, folder)
    names = [name for name in storage.list_names(paths.logs) if name.startswith("attempt-")]
    return storage.join(paths.logs, max(names, key=lambda name: (len(name), name), default="attempt-1"))


def publish_log(path: Path, uri: str) -> None:
    """Append a local log to what is published at `uri` from an earlier start; a failure is a warning."""
    with best_effort(f"{path.name} could not be published", REPORT_SECONDS):
        before = storage.read_bytes(uri) if storage.exists(uri) else b""
        storage.publish(uri, shorten_log(before + path.read_bytes()))
