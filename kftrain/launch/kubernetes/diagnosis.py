"""Why a job failed: from what its workers said, how its pods ended and what the last lines were, to a summary.

Pure. The first failing process's own error is worth most, except where it only lost a peer: then the peer that the
kernel or the cluster took away is the cause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kftrain import errors
from kftrain.credentials import redacted
from kftrain.errors import KftrainError
from kftrain.launch.kubernetes.logs import FIRST
from kftrain.launch.kubernetes.observation import Pod, place_of
from kftrain.launch.spec import WORKER
from kftrain.run import advice
from kftrain.run.advice import FailureClass
from kftrain.run.documents import FailureSummary

OUT_OF_MEMORY = "OOMKilled"
NO_COMMAND = frozenset(("StartError", "ContainerCannotRun"))
"""The image has not what it is to run."""

SIGKILLED = 137
SHOWN_LINES = 20


def diagnose(
    task: str, error: Mapping[str, Any] | None, ended: Sequence[Pod], tails: Mapping[str, Sequence[str]]
) -> FailureSummary:
    """The summary of a failed attempt.

    Args:
        task: `train` or `evaluate`.
        error: What the first failing worker wrote into error.json, if anything.
        ended: Pods that ended with a failure, the first one first.
        tails: The last log lines of each pod, by its place.
    """
    killed = next((pod for pod in ended if pod.end_reason == OUT_OF_MEMORY), None)
    taken = next((pod for pod in ended if pod.disruption), None)
    fatal = next((pod for pod in ended if pod.failed and _code(pod) < errors.FIRST_RETRYABLE_CODE), None)
    if killed is not None and fatal is None and _is_consequence(error):
        line = f"{killed.name} was killed: it used more memory than its limit"
        return _summary(task, FailureClass.HOST_MEMORY, line, SIGKILLED, killed, tails)
    if taken is not None and fatal is None and _is_consequence(error):
        kind = FailureClass.NODE if "Taint" in taken.disruption else FailureClass.PREEMPTED
        code = taken.exit_code or errors.Preempted.exit_code
        return _summary(task, kind, f"{taken.name} was taken away: {taken.disruption}", code, taken, tails)
    if error is not None:
        return _from_error(task, error, tails)
    if ended:
        pod = fatal or ended[0]
        line = " ".join(f"{pod.name} ended with {_code(pod)} {pod.end_reason} {pod.end_message}".split())
        return _summary(task, _class_without_error(pod, ended), line[:500], _code(pod), pod, tails)
    return _summary(task, FailureClass.UNKNOWN, "the job failed and left no reason", errors.BUG_CODE, None, tails)


def of_launch(
    task: str, kind: FailureClass, error: KftrainError, found: FailureSummary | None = None
) -> FailureSummary:
    """The summary of a job that the launcher gave up itself; `found` is that of its last attempt."""
    if found is not None:
        return found.model_copy(update={"line": error.line, "exit_code": error.exit_code})
    return _summary(task, kind, error.line, error.exit_code, None, {})


def _class_without_error(pod: Pod, ended: Sequence[Pod]) -> FailureClass:
    """Of an attempt of which no error is to be found. Who ends with a code of ours could not write it."""
    if pod.end_reason in NO_COMMAND:
        return FailureClass.IMAGE
    if all(_code(each) == errors.StorageError.exit_code for each in ended):
        return FailureClass.STORAGE
    return advice.class_of_code(_code(pod))


def _is_consequence(error: Mapping[str, Any] | None) -> bool:
    """Whether an error only says that somebody else was gone, or that a process was killed from outside."""
    return error is None or int(error["exit_code"]) >= errors.FIRST_RETRYABLE_CODE


def _from_error(task: str, error: Mapping[str, Any], tails: Mapping[str, Sequence[str]]) -> FailureSummary:
    code, line = int(error["exit_code"]), redacted(str(error["line"]))
    kind = advice.class_of(error)
    place = place_of(WORKER, error.get("node_rank") or 0)
    return FailureSummary(
        task=task,
        failure_class=kind.value,
        line=line,
        exit_code=code,
        rank=error.get("rank"),
        node=str(error.get("node") or ""),
        pod=str(error.get("pod") or ""),
        last_lines=_last_lines(tails, place),
        advice=advice.remedy(kind),
    )


def _summary(
    task: str, kind: FailureClass, line: str, code: int, pod: Pod | None, tails: Mapping[str, Sequence[str]]
) -> FailureSummary:
    return FailureSummary(
        task=task,
        failure_class=kind.value,
        line=redacted(line),
        exit_code=code,
        node=pod.node if pod else "",
        pod=pod.name if pod else "",
        last_lines=_last_lines(tails, pod.place if pod else FIRST),
        advice=advice.remedy(kind),
    )


def _last_lines(tails: Mapping[str, Sequence[str]], place: str) -> list[str]:
    """Of a pod, without the credentials that drivers and libraries quote."""
    return [redacted(line) for line in list(tails.get(place, ()))[-SHOWN_LINES:]]


def _code(pod: Pod) -> int:
    return errors.BUG_CODE if pod.exit_code is None else pod.exit_code
