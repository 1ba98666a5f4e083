"""The logs of a run: a folder for each attempt and one for the evaluation, a file for each process."""

from __future__ import annotations

from pathlib import Path

from kftrain.core import storage
from kftrain.run import attempts
from kftrain.run.best_effort import REPORT_SECONDS, best_effort
from kftrain.run.completion import JobTask
from kftrain.run.log_size import shortened
from kftrain.run.paths import RunPaths


def next_attempt(paths: RunPaths, task: JobTask) -> int | None:
    """Return the number of the attempt that a job's next claim will make; an evaluation has none."""
    return attempts.last_attempt(paths) + 1 if task == "train" else None


def logs_uri(paths: RunPaths, attempt: int | None) -> str:
    """Return the folder of a job's logs. An attempt that fails before its claim shares it with the next one."""
    return storage.join(paths.logs, "evaluation" if attempt is None else f"attempt-{attempt}")


def last_logs_uri(paths: RunPaths, task: str) -> str:
    """Return the folder of the logs of the last attempt, or of the evaluation; it may not be there."""
    if task == "evaluate":
        return logs_uri(paths, None)
    names = [name for name in storage.list_names(paths.logs) if name.startswith("attempt-")]
    return storage.join(paths.logs, max(names, key=lambda name: (len(name), name), default="attempt-1"))


def publish_log(path: Path, uri: str) -> None:
    """Append a local log to what is published at `uri` from an earlier start; a failure is a warning."""
    with best_effort(f"{path.name} could not be published", REPORT_SECONDS):
        before = storage.read_bytes(uri) if storage.exists(uri) else b""
        storage.publish(uri, shortened(before + path.read_bytes()))
