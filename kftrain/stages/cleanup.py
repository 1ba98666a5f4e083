"""What each launch backend leaves behind, and how the exit handler removes it."""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kftrain import storage
from kftrain.config import Config
from kftrain.launch.kubernetes import ownership
from kftrain.launch.kubernetes.client import Cluster
from kftrain.launch.kubernetes.kinds.pytorchjob import KFP_RUN_LABEL, RUN_LABEL, label_value, started_for
from kftrain.launch.kubernetes.lease import delete_own
from kftrain.run.paths import RunPaths

STALE_SECONDS = 3600.0
"""A temporary file that nobody has touched for so long belongs to a process that is gone."""


def clean_up(config: Config, paths: RunPaths, job_id: str = "") -> list[str]:
    """Removes what the jobs of one pipeline run left behind; returns what was removed.

    Args:
        config: What the run is configured with now.
        paths: The run.
        job_id: Kubeflow's id of the pipeline run that ends. Another one may be at work on the same run.
    """
    return CLEANERS[config.launch.backend](config, paths, job_id)


def delete_jobs(config: Config, paths: RunPaths, job_id: str = "") -> list[str]:
    """Deletes the pipeline run's jobs on the cluster: those of a step that was killed are still there, and hold GPUs.

    Raises LaunchError.
    """
    cluster = Cluster(config.launch.kubernetes.namespace)
    selectors = {f"{RUN_LABEL}={label_value(paths.run_id)}"}
    if job_id:  # a configuration that lies in a file may name another run by now
        selectors.add(f"{KFP_RUN_LABEL}={label_value(job_id)}")
    jobs = {job["metadata"]["name"]: job for selector in selectors for job in cluster.list_jobs(selector)}.values()
    workflow = ownership.find_owner(cluster)[0] if jobs else None
    uid, digest = workflow["uid"] if workflow else "", config.digest()
    own = functools.partial(belongs, workflow_uid=uid, job_id=job_id, config_digest=digest)
    names = [str(job["metadata"]["name"]) for job in jobs if own(job)]
    return [f"job {name}" for name in names if delete_own(cluster, name, own)]


def belongs(job: Mapping[str, Any], workflow_uid: str, job_id: str, config_digest: str) -> bool:
    """Whether a job of a run is this pipeline run's own, and not that of another one which works on the same run.

    One that says nothing of a pipeline run, because its launcher ran on a laptop or in another namespace, is ours where
    we know of no Workflow either, and where it was started for the configuration that the run has now.

    Args:
        job: The PyTorchJob.
        workflow_uid: Of this pipeline run's Workflow; empty where it is not known.
        job_id: Kubeflow's id of this pipeline run.
        config_digest: Of the run's configuration.
    """
    metadata = job["metadata"]
    owners = [owner["uid"] for owner in metadata.get("ownerReferences") or [] if owner["kind"] == "Workflow"]
    label = (metadata.get("labels") or {}).get(KFP_RUN_LABEL, "")
    if owners or label:
        return workflow_uid in owners or (bool(label) and label == label_value(job_id))
    return not workflow_uid and started_for(job) == config_digest


def remove_temporary_files(config: Config, paths: RunPaths, job_id: str = "") -> list[str]:
    """Removes files and folders that a killed process was still writing, from a storage root on this machine."""
    if not storage.is_local(paths.uri):
        return []
    oldest = time.time() - STALE_SECONDS
    found = [path for path in _temporary(storage.local_path(paths.uri)) if _modified(path) < oldest]
    for path in found:
        storage.remove(str(path))
    return [str(path) for path in found]


def _temporary(folder: Path) -> Iterator[Path]:
    """Files and folders that are being written; others may finish or delete theirs meanwhile."""
    for parent, folders, files in os.walk(folder):  # leaves out a folder that has vanished
        yield from (Path(parent, name) for name in sorted([*folders, *files]) if name.startswith(".tmp-"))


def _modified(path: Path) -> float:
    """Seconds since the epoch; infinite for what has vanished."""
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return math.inf


CLEANERS: dict[str, Callable[[Config, RunPaths, str], list[str]]] = {
    "local": remove_temporary_files,
    "pytorchjob": delete_jobs,
}
"""By `launch.backend`."""
