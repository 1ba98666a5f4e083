"""Ends MLflow runs that are shown as RUNNING though nobody works on them, such as those of deleted pipeline runs.

A pipeline run that is deleted takes all its pods along, and one that was retried has no exit handler any more, so
nobody ends its MLflow run. Its tags say which Workflow of which cluster it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kftrain import tracking
from kftrain.launch.kubernetes.control import ENDED_PHASES, list_run_jobs
from kftrain.launch.kubernetes.job_client import JobClient
from kftrain.launch.kubernetes.workflow import PLACE_TAG, WORKFLOW_TAG, name_cluster_place
from kftrain.tracking.runs import RUN_ID_TAG


@dataclass(frozen=True)
class Orphan:
    """An MLflow run whose pipeline run is over."""

    mlflow_run_id: str
    run_id: str
    """Id of the training run, in the storage root."""
    why: str


def close_orphans(clusters: Sequence[JobClient], tracking_uri: str, dry_run: bool = False) -> list[Orphan]:
    """End the MLflow runs of this cluster's namespace whose pipeline run is over, and return them.

    Raises LaunchError or TrackingError.
    """
    orphans = []
    for mlflow_run_id, tags in tracking.find_running(tracking_uri, PLACE_TAG, name_cluster_place(clusters[0])).items():
        why = _explain_end(clusters, tags)
        if why:
            orphans.append(Orphan(mlflow_run_id, tags.get(RUN_ID_TAG, ""), why))
    for orphan in () if dry_run else orphans:
        tracking.finish_run(tracking_uri, orphan.mlflow_run_id, "KILLED", {"kftrain.error": orphan.why})
    return orphans


def _explain_end(clusters: Sequence[JobClient], tags: dict[str, str]) -> str:
    """Return the reason why nobody works on a run; empty if somebody may."""
    name, run_id = tags.get(WORKFLOW_TAG, ""), tags.get(RUN_ID_TAG, "")
    if not name or not run_id or list_run_jobs(clusters, run_id):
        return ""
    workflow = clusters[0].read_workflow(name)
    if workflow is None:
        return f"its pipeline run {name} was deleted" if clusters[0].sees_workflows else ""
    phase = str((workflow.get("status") or {}).get("phase", ""))
    return f"its pipeline run {name} has ended: {phase}" if phase in ENDED_PHASES else ""
