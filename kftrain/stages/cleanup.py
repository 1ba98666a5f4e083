"""What each launch backend leaves behind, and how the exit handler removes it."""

from __future__ import annotations

import time
from collections.abc import Callable

from kftrain import storage
from kftrain.config import Config
from kftrain.contracts import RunPaths

STALE_SECONDS = 3600.0
"""A temporary file that nobody has touched for so long belongs to a process that is gone."""


def clean_up(config: Config, paths: RunPaths) -> list[str]:
    """Removes what the run's jobs left behind; returns what was removed."""
    return CLEANERS[config.launch.backend](config, paths)


def delete_jobs(config: Config, paths: RunPaths) -> list[str]:
    """Deletes the run's jobs on the cluster: those of a step that was killed are still there, and hold GPUs."""
    from kftrain.launch.kubernetes_api import Cluster
    from kftrain.launch.pytorchjob import RUN_LABEL, label_value

    cluster = Cluster(config.launch.kubernetes.namespace)
    jobs = [job["metadata"] for job in cluster.list_jobs(f"{RUN_LABEL}={label_value(paths.run_id)}")]
    for job in jobs:
        cluster.delete_job(job["name"], job["uid"])
    return [f"job {job['name']}" for job in jobs]


def remove_temporary_files(config: Config, paths: RunPaths) -> list[str]:
    """Removes files and folders that a killed process was still writing, from a storage root on this machine."""
    if not storage.is_local(paths.uri):
        return []
    oldest = time.time() - STALE_SECONDS
    found = [path for path in storage.local_path(paths.uri).rglob(".tmp-*") if path.stat().st_mtime < oldest]
    for path in found:
        storage.remove(str(path))
    return [str(path) for path in found]


CLEANERS: dict[str, Callable[[Config, RunPaths], list[str]]] = {
    "local": remove_temporary_files,
    "pytorchjob": delete_jobs,
}
"""By `launch.backend`."""
