"""The jobs that a pipeline run leaves behind, and which of a run's jobs are its own."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from kftrain.config import Config
from kftrain.launch.kubernetes import ownership
from kftrain.launch.kubernetes.control import list_jobs
from kftrain.launch.kubernetes.job_client import JobClient
from kftrain.launch.kubernetes.kinds.kind import Kind
from kftrain.launch.kubernetes.labels import KFP_RUN_LABEL, RUN_LABEL, label_value, selector
from kftrain.launch.kubernetes.lease import delete_own
from kftrain.run.paths import RunPaths


def delete_jobs(clusters: Sequence[JobClient], config: Config, paths: RunPaths, job_id: str = "") -> list[str]:
    """Delete the jobs of a pipeline run that ends: those of a step that was killed are still there, and hold GPUs.

    Args:
        clusters: One for each kind of job.
        config: What the run is configured with now.
        paths: The run.
        job_id: Kubeflow's id of the pipeline run that ends. Another one may be at work on the same run.

    Raises LaunchError.
    """
    selectors = {selector(RUN_LABEL, paths.run_id)}
    if job_id:  # a configuration that lies in a file may name another run by now
        selectors.add(selector(KFP_RUN_LABEL, job_id))
    listed = [pair for selected in sorted(selectors) for pair in list_jobs(clusters, selected)]
    jobs = {job["metadata"]["uid"]: (cluster, job) for cluster, job in listed}.values()
    workflow = ownership.find_owner(clusters[0])[0] if jobs else None
    uid, digest = workflow["uid"] if workflow else "", config.digest()
    removed = []
    for cluster, job in jobs:
        name = str(job["metadata"]["name"])
        own = functools.partial(belongs, cluster.kind, workflow_uid=uid, job_id=job_id, config_digest=digest)
        if own(job) and delete_own(cluster, name, own):
            removed.append(f"job {name}")
    return removed


def belongs(kind: Kind, job: Mapping[str, Any], workflow_uid: str, job_id: str, config_digest: str) -> bool:
    """Tell whether a job belongs to this pipeline run, and not to another one that works on the same run.

    A job that names no pipeline run, because its launcher ran on a laptop or in another namespace, is ours if we know
    of no Workflow either and if the job was started for the configuration that the run has now.

    Args:
        kind: The kind of the job.
        job: The job.
        workflow_uid: Uid of this pipeline run's Workflow; empty where it is not known.
        job_id: Kubeflow's id of this pipeline run.
        config_digest: Digest of the run's configuration.
    """
    metadata = job["metadata"]
    owners = [owner["uid"] for owner in metadata.get("ownerReferences") or [] if owner["kind"] == "Workflow"]
    label = (metadata.get("labels") or {}).get(KFP_RUN_LABEL, "")
    if owners or label:
        return workflow_uid in owners or (bool(label) and label == label_value(job_id))
    return not workflow_uid and kind.started_for(job) == config_digest
