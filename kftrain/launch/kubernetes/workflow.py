"""Reads the Workflow of a pipeline run for the ends of steps that could not report anything themselves.

Kubeflow keeps neither exit codes nor messages of its steps, but Argo does: in the Workflow's nodes, which a step may
read. The exit handler asks it about steps that were terminated, ran out of memory or never got an image.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

from kftrain.config import Config
from kftrain.core.progress import to_log
from kftrain.errors import BUG_CODE, FailureClass, KftrainError, Preempted, class_of
from kftrain.launch.kubernetes import ownership
from kftrain.launch.kubernetes.client import SERVICE_ACCOUNT, Cluster
from kftrain.launch.kubernetes.control import ENDED_PHASES
from kftrain.process.termination import parse_message
from kftrain.run.error import ErrorDocument

_TRY = re.compile(r"\(\d+\)$")
"""The number that Argo puts after the name of a node that may be tried again."""

EXECUTOR, DRIVER = "executor", "-driver"
"""Kubeflow's name for the pod of a step, and the end of the name of the pod that prepares a step."""

POD_NAMES_BY_ID = "v1"
MAX_POD_PREFIX = 242
"""Characters of a pod's name that Argo keeps before the hash."""

RUN_TAG, URL_TAG = "kftrain.kubeflow_run_id", "kftrain.kubeflow_url"
WORKFLOW_TAG, PLACE_TAG = "kftrain.kubeflow_workflow", "kftrain.kubeflow_place"

SIGNS: tuple[tuple[str, FailureClass], ...] = (
    ("OOMKilled", FailureClass.STEP_MEMORY),
    ("longer than the specified deadline", FailureClass.DEADLINE),
    ("ImagePull", FailureClass.STEP_IMAGE),
    ("pod deleted", FailureClass.PREEMPTED),
)
"""Words in Argo's messages about steps that could not say anything, with the class of failure that they mean."""


def explain_pipeline_run() -> ErrorDocument | None:
    """Summarize why this step's pipeline run failed; None outside a pipeline, or where nothing is known."""
    if not SERVICE_ACCOUNT.exists():
        return None
    try:
        cluster = Cluster()
        owner, _ = ownership.find_owner(cluster)
        workflow = cluster.read_workflow(owner["name"]) if owner else None
    except KftrainError as error:
        to_log(f"warning: the Workflow cannot be asked: {error.line}")
        return None
    return explain(workflow) if workflow else None


def build_pipeline_tags(config: Config) -> dict[str, str]:
    """Return the tags that lead from the MLflow run of a training to its pipeline run; values are '' without one."""
    cluster, name, run_id = _find_pipeline_run("MLflow will not say which pipeline run this is")
    url = config.tracking.kubeflow_url.rstrip("/")
    page = f"{url}/#/runs/details/{run_id}" if url and run_id else ""
    place = name_cluster_place(cluster) if cluster is not None else ""
    return {RUN_TAG: run_id, URL_TAG: page, WORKFLOW_TAG: name, PLACE_TAG: place}


def find_pipeline_place() -> tuple[str, str]:
    """Return the Workflow that this step belongs to, and its `name_cluster_place`; '' where there is none."""
    cluster, name, _ = _find_pipeline_run("nobody will see when this pipeline run is over")
    return (name, name_cluster_place(cluster)) if cluster is not None and name else ("", "")


def _find_pipeline_run(warning: str) -> tuple[Cluster | None, str, str]:
    """Return the cluster of this step, its Workflow's name and its run's id; None and '' outside a pipeline.

    So it does, with the warning, where the cluster cannot be asked.
    """
    if not ownership.is_pipeline_pod():
        return None, "", ""
    try:
        cluster = Cluster()
        owner, run_id = ownership.find_owner(cluster)
    except KftrainError as error:
        to_log(f"warning: {warning}: {error.line}")
        return None, "", ""
    return cluster, owner["name"] if owner else "", run_id


def is_pipeline_over(workflow: str, place: str) -> bool | None:
    """Tell whether a Workflow has ended or is gone; None if this process is not on its cluster or cannot ask."""
    if not ownership.is_pipeline_pod():
        return None
    try:
        cluster = Cluster()
        return is_over(cluster, workflow) if name_cluster_place(cluster) == place else None
    except KftrainError as error:
        to_log(f"warning: the Workflow {workflow} cannot be asked: {error.line}")
        return None


def is_over(cluster: Cluster, workflow: str) -> bool | None:
    """Tell whether a Workflow of this namespace has ended or is gone; None if not readable. Raises LaunchError."""
    item = cluster.read_workflow(workflow)
    if item is None:
        return True if cluster.sees_workflows else None
    return str((item.get("status") or {}).get("phase", "")) in ENDED_PHASES


def name_cluster_place(cluster: Cluster) -> str:
    """Return a name for the cluster and the namespace: several may share one MLflow server."""
    return f"{cluster.identity}/{cluster.namespace}"


def explain(workflow: Mapping[str, Any]) -> ErrorDocument | None:
    """Summarize why a Workflow failed, from its nodes; None where none of its pods failed."""
    if is_terminated(workflow):
        line, kind = "somebody terminated the run in the Kubeflow UI", FailureClass.TERMINATED
        return ErrorDocument(stage="run", failure_class=kind, line=line, exit_code=Preempted.exit_code)
    nodes = (workflow.get("status") or {}).get("nodes", {}).values()
    last: dict[str, Any] = {}
    for node in sorted((node for node in nodes if node.get("type") == "Pod"), key=_read_end):
        last[find_step(node)] = node  # the last try of a step says why the step has failed, if it has
    failed = [(step, node) for step, node in last.items() if node.get("phase") in ("Failed", "Error")]
    if not failed:
        return None
    step, first = min(failed, key=lambda pair: _read_end(pair[1]))
    message, pod = str(first.get("message") or "no message"), find_pod(workflow, first)
    line, kind = f"step {step}: {message}", _classify(message)
    return ErrorDocument(stage="run", failure_class=kind, line=line, exit_code=BUG_CODE, pod=pod)


def _classify(message: str) -> FailureClass:
    """Classify a failure by the exit code in the step's own message, never by its words, which may be a user's.

    Only a message that is not ours is searched for Argo's words.
    """
    left = parse_message(message)
    if left is not None:
        return class_of(left.kind, left.exit_code)
    return next((kind for sign, kind in SIGNS if sign in message), FailureClass.UNKNOWN)


def find_step(node: Mapping[str, Any]) -> str:
    """Return the name of the step that a pod's node belongs to, without the number of the try.

    Argo shows the pod of every step as `executor(0)`; the step stands before that in the node's full name,
    `FLOW.root.exit-handler-1.train(0).executor(0)`.
    """
    name = str(node.get("name") or node.get("displayName") or "")
    parts = [_TRY.sub("", part) for part in name.split(".")]
    inner = parts[-2] if len(parts) > 1 and parts[-1] == EXECUTOR else parts[-1]
    return inner.removesuffix(DRIVER)


def find_pod(workflow: Mapping[str, Any], node: Mapping[str, Any]) -> str:
    """Return the name of a node's pod: Argo puts the template's name between Workflow and hash of the node's id."""
    metadata, identity = workflow.get("metadata") or {}, str(node.get("id", ""))
    flow, template = str(metadata.get("name", "")), str(node.get("templateName", ""))
    by_id = (metadata.get("annotations") or {}).get("workflows.argoproj.io/pod-name-format") == POD_NAMES_BY_ID
    if by_id or not template or not identity.startswith(f"{flow}-"):
        return identity
    return f"{f'{flow}-{template}'[:MAX_POD_PREFIX]}-{identity.removeprefix(f'{flow}-')}"


def _read_end(node: Mapping[str, Any]) -> str:
    return str(node.get("finishedAt") or "9")


POLL_SECONDS = 2.0


def is_terminated(workflow: Mapping[str, Any]) -> bool:
    """Tell whether somebody pressed Terminate: Kubeflow then sets the deadline of the Workflow to 0."""
    return (workflow.get("spec") or {}).get("activeDeadlineSeconds") == 0


class TerminateWatch:
    """Context manager that watches the Workflow in a thread and calls `on_terminate` there once it is terminated.

    Kubeflow answers *Terminate* by marking the Workflow; Argo looks at it some 10 s later and then kills the step's pod
    within milliseconds, too soon for a handler of SIGTERM to delete a job. The exit handler deletes it afterwards, but
    not in a run that was retried. So a launcher looks at the mark itself, and deletes its job while it still can.

    Args:
        cluster: Where the Workflow is.
        owner: The reference to it, of which nothing but the name counts; None outside a pipeline: nothing happens.
        on_terminate: Called once at most.
    """

    def __init__(self, cluster: Cluster, owner: Mapping[str, Any] | None, on_terminate: Callable[[], None]) -> None:
        self._cluster = cluster
        self._name = str(owner["name"]) if owner else ""
        self._on_terminate = on_terminate
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="terminate-watch")

    def __enter__(self) -> TerminateWatch:
        if self._name:
            self._thread.start()
        return self

    def __exit__(self, *caught: object) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.is_set():
            workflow = self._cluster.read_workflow(self._name, retried=False)
            if workflow is not None and is_terminated(workflow) and not self._closed.is_set():
                self._on_terminate()
                return
            self._closed.wait(POLL_SECONDS)
