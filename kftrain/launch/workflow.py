"""What the Workflow of a pipeline run says about steps that could not say anything themselves.

Kubeflow keeps neither exit codes nor messages of its steps, but Argo does: in the Workflow's nodes, which a step may
read. The exit handler asks it about steps that were terminated, ran out of memory or never got an image.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kftrain.contracts import FailureSummary
from kftrain.errors import BUG_CODE, FencedError, KftrainError, Preempted
from kftrain.launch import ownership
from kftrain.launch.diagnosis import ADVICE
from kftrain.launch.kubernetes_api import SERVICE_ACCOUNT, Cluster
from kftrain.launch.states import FailureClass
from kftrain.progress import to_log

_TRY = re.compile(r"\(\d+\)$")
"""What Argo puts after a step's name where it is tried again."""

SIGNS: tuple[tuple[str, FailureClass], ...] = (
    ("OOMKilled", FailureClass.HOST_MEMORY),
    ("longer than the specified deadline", FailureClass.DEADLINE),
    ("ImagePull", FailureClass.IMAGE),
    ("pod deleted", FailureClass.PREEMPTED),
    (FencedError.BY_ATTEMPT, FailureClass.FENCED),
    (FencedError.BY_LAUNCHER, FailureClass.FENCED),
    (FencedError.BY_JOB, FailureClass.FENCED),
)
"""What Argo's messages and those of our steps contain, and what it means."""

STEP_ADVICE = {
    **ADVICE,
    FailureClass.HOST_MEMORY: "The step itself, not a worker, had too little memory: raise the limit of its namespace.",
    FailureClass.IMAGE: "Check the image of the step (kftrain submit --steps-image) and its account's pull secret.",
}
"""What to do about a step, in one sentence."""


def explain_pipeline_run() -> FailureSummary | None:
    """Why the pipeline run that this step belongs to failed; None outside a pipeline, or where nothing is known."""
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


def explain(workflow: Mapping[str, Any]) -> FailureSummary | None:
    """Why a Workflow failed, from its nodes; None where no pod of it did."""
    if workflow.get("spec", {}).get("activeDeadlineSeconds") == 0:
        line = "somebody terminated the run in the Kubeflow UI"
        return _summary(FailureClass.TERMINATED, line, "", Preempted.exit_code)
    nodes = (workflow.get("status") or {}).get("nodes", {}).values()
    failed = [node for node in nodes if node.get("type") == "Pod" and node.get("phase") in ("Failed", "Error")]
    if not failed:
        return None
    tries: dict[str, Any] = {}
    for node in sorted(failed, key=_end):  # the last try of a step says why the step has failed
        tries[_TRY.sub("", str(node.get("displayName", "")))] = node
    first = min(tries.values(), key=_end)
    message = str(first.get("message") or "no message")
    kind = next((kind for sign, kind in SIGNS if sign in message), FailureClass.UNKNOWN)
    return _summary(kind, f"step {first.get('displayName', '')}: {message}", str(first.get("id", "")), BUG_CODE)


def _end(node: Mapping[str, Any]) -> str:
    return str(node.get("finishedAt") or "9")


def _summary(kind: FailureClass, line: str, pod: str, code: int) -> FailureSummary:
    return FailureSummary(
        task="run", failure_class=kind.value, line=line, exit_code=code, pod=pod, advice=STEP_ADVICE[kind]
    )
