"""The owner of a job: the Workflow of the pipeline run that the launcher's pod is a step of.

A run that is deleted takes its Workflow along, and Kubernetes then deletes what the Workflow owns: within seconds no
pod of the job is left, whatever the launcher was doing.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kftrain.launch.kubernetes.client import Cluster

POD_NAME_ENV = "KFP_POD_NAME"
"""Variable in which Kubeflow tells every step the name of its pod."""

RUN_ID_LABEL = "pipeline/runid"


def is_pipeline_pod() -> bool:
    """Tell whether this process is a step in a pod of a Kubeflow backend."""
    return bool(os.environ.get(POD_NAME_ENV))


def find_owner(cluster: Cluster) -> tuple[dict[str, Any] | None, str]:
    """Return the owner reference for a job of this launcher and the Kubeflow run id; None and '' outside a pipeline.

    The uid is read from the API server now, because Kubernetes deletes a job whose owner does not exist within
    milliseconds. A job in another namespace than the step's can have no owner there.
    """
    name = os.environ.get(POD_NAME_ENV, "")
    if not name or not cluster.own_namespace:
        return None, ""
    pod = cluster.read_pod(name, cluster.own_namespace)
    if pod is None:
        return None, ""
    metadata = pod["metadata"]
    owners = metadata.get("ownerReferences", []) if cluster.own_namespace == cluster.namespace else []
    owner = next((o for o in owners if o["kind"] == "Workflow"), None)
    if owner is not None:  # `blockOwnerDeletion` stays false: a step may not set finalizers of Workflows
        kept = {key: owner[key] for key in ("apiVersion", "kind", "name", "uid")}
        owner = {**kept, "controller": False, "blockOwnerDeletion": False}
    return owner, metadata.get("labels", {}).get(RUN_ID_LABEL, "")
