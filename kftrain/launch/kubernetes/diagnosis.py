"""The diagnosis of a failed job: workers' errors, the ends of pods and last log lines become one summary.

Pure. The first failing process's own error is worth most, except where it only lost a peer: then the peer that the
kernel or the cluster took away is the cause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kftrain import errors
from kftrain.core.credentials import redact
from kftrain.errors import FailureClass, KftrainError, LaunchError, StorageError
from kftrain.launch.kubernetes.logs import FIRST
from kftrain.launch.kubernetes.observation import Pod, format_place
from kftrain.launch.spec import WORKER
from kftrain.process.termination import parse_message
from kftrain.run.advice import make_fix
from kftrain.run.error import ErrorDocument

OUT_OF_MEMORY = "OOMKilled"
NO_COMMAND = frozenset(("StartError", "ContainerCannotRun"))
"""Reasons by which a container says that its image lacks the command to run."""

SHOWN_LINES = 20


def diagnose(
    task: str,
    error: ErrorDocument | None,
    ended: Sequence[Pod],
    tails: Mapping[str, Sequence[str]],
    failure: tuple[int, str] | None = None,
) -> ErrorDocument:
    """Summarize a failed attempt: its class, its line and the last lines of the pod that caused it.

    Args:
        task: Name of the job's task.
        error: What the first failing worker wrote into error.json, if anything.
        ended: Pods that ended with a failure, the first one first.
        tails: The last log lines of each pod, by its place.
        failure: See `Kind.read_failure`.
    """
    killed = next((pod for pod in ended if pod.end_reason == OUT_OF_MEMORY), None)
    taken = next((pod for pod in ended if pod.disruption), None)
    fatal = next((pod for pod in ended if pod.failed and _read_code(pod) < errors.FIRST_RETRYABLE_CODE), None)
    if killed is not None and fatal is None and _is_consequence(error):
        line = f"{killed.name} was killed: it used more memory than its limit"
        return _summarize_pod(task, FailureClass.HOST_MEMORY, line, errors.SIGKILLED, killed, tails)
    if taken is not None and fatal is None and _is_consequence(error):
        kind = FailureClass.NODE if "Taint" in taken.disruption else FailureClass.PREEMPTED
        code = taken.exit_code or errors.Preempted.exit_code
        return _summarize_pod(task, kind, f"{taken.name} was taken away: {taken.disruption}", code, taken, tails)
    if error is not None:
        return _summarize_error(task, error, tails)
    if failure is not None:
        code, words = failure
        line = f"the job ended with {code} {words}".strip()[:500]
        return _summarize_pod(task, errors.class_of("", code), line, code, ended[0] if ended else None, tails)
    if ended:
        pod = fatal or ended[0]
        line = " ".join(f"{pod.name} ended with {_read_code(pod)} {pod.end_reason} {_read_words(pod)}".split())
        return _summarize_pod(task, _classify_by_code(pod, ended), line[:500], _read_code(pod), pod, tails)
    return _summarize_pod(task, FailureClass.UNKNOWN, "the job failed and left no reason", errors.BUG_CODE, None, tails)


def summarize_launch(
    task: str, kind: FailureClass, error: KftrainError, last_summary: ErrorDocument | None = None
) -> ErrorDocument:
    """Summarize a job that the launcher gave up itself; `last_summary` is the summary of its last attempt."""
    return ErrorDocument.of(error, stage=task).with_findings(last_summary).model_copy(update={"failure_class": kind})


def _classify_by_code(pod: Pod, ended: Sequence[Pod]) -> FailureClass:
    """Classify an attempt that left no error, by its exit code: a worker with a code of ours could not write one."""
    if pod.end_reason in NO_COMMAND:
        return FailureClass.IMAGE
    if all(_read_code(other) == StorageError.exit_code for other in ended):
        return FailureClass.STORAGE
    return errors.class_of("", _read_code(pod))


def _is_consequence(error: ErrorDocument | None) -> bool:
    """True without an error, or if it only says that a peer was gone or that a process was killed from outside."""
    return error is None or error.exit_code >= errors.FIRST_RETRYABLE_CODE


def _summarize_error(task: str, error: ErrorDocument, tails: Mapping[str, Sequence[str]]) -> ErrorDocument:
    """Summarize an attempt by its workers' own error, without credentials and with that worker's last lines."""
    texts = {name: redact(getattr(error, name)) for name in ("line", "what", "where", "fix")}
    last_lines = _list_last_lines(tails, format_place(WORKER, error.node_rank or 0))
    return error.model_copy(update={**texts, "stage": task, "last_lines": last_lines})


def _summarize_pod(
    task: str, kind: FailureClass, line: str, code: int, pod: Pod | None, tails: Mapping[str, Sequence[str]]
) -> ErrorDocument:
    return ErrorDocument(
        stage=task,
        kind=StorageError.__name__ if (kind, code) == (FailureClass.STORAGE, StorageError.exit_code) else "",
        failure_class=kind,
        line=redact(line),
        what=redact(line),
        exit_code=code,
        node=pod.node if pod else "",
        pod=pod.name if pod else "",
        last_lines=_list_last_lines(tails, pod.place if pod else FIRST),
    )


def _list_last_lines(tails: Mapping[str, Sequence[str]], place: str) -> list[str]:
    """Return the last lines of a pod's log, without the credentials that drivers and libraries quote."""
    return [redact(line) for line in list(tails.get(place, ()))[-SHOWN_LINES:]]


def _read_words(pod: Pod) -> str:
    """Return the line for people in a pod's termination message; the whole message where our format is missing."""
    message = parse_message(pod.end_message)
    return message.line if message is not None else pod.end_message


def _read_code(pod: Pod) -> int:
    return pod.exit_code or errors.BUG_CODE


class JobFailedError(Exception):
    """The launcher gave a job up, for a reason of a known class."""

    def __init__(self, what: str, kind: FailureClass, *, where: str, last_summary: ErrorDocument | None = None) -> None:
        """`last_summary` is the summary of the last attempt, where attempts have failed."""
        error = StorageError if last_summary is not None and is_lack_of_storage(last_summary) else LaunchError
        super().__init__(what)
        self.error = error(what, where=where, fix=make_fix(kind)).of_class(kind)
        """Error that the launcher raises: StorageError, worth another try, for lack of storage; else LaunchError."""
        self.kind = kind
        self.last_summary = last_summary


def is_lack_of_storage(summary: ErrorDocument) -> bool:
    """Tell whether an attempt failed because storage is full or cannot be reached."""
    return (summary.failure_class, summary.exit_code) == (FailureClass.STORAGE, StorageError.exit_code)
