"""Why a job failed: from what its workers said, how its pods ended and what the last lines were, to a summary.

Pure. The first failing process's own error is worth most, except where it only lost a peer: then the peer that the
kernel or the cluster took away is the cause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kftrain import errors
from kftrain.contracts import FailureSummary
from kftrain.errors import KftrainError
from kftrain.launch.observation import Pod
from kftrain.launch.states import FailureClass

OUT_OF_MEMORY = "OOMKilled"
NO_COMMAND = frozenset(("StartError", "ContainerCannotRun"))
"""The image has not what it is to run."""

SIGKILLED = 137
SHOWN_LINES = 20

CLASS_OF_CODE: dict[int, FailureClass] = {
    errors.ConfigError.exit_code: FailureClass.CONFIG,
    errors.DataError.exit_code: FailureClass.DATA,
    errors.CheckpointError.exit_code: FailureClass.CHECKPOINT,
    errors.EvaluationError.exit_code: FailureClass.EVALUATION,
    errors.TrackingError.exit_code: FailureClass.TRACKING,
    errors.UserCodeError.exit_code: FailureClass.USER_CODE,
    errors.FencedError.exit_code: FailureClass.FENCED,
    errors.LauncherGoneError.exit_code: FailureClass.LAUNCHER,
    errors.DivergedError.exit_code: FailureClass.DIVERGED,
    errors.RetryableError.exit_code: FailureClass.NETWORK,
    errors.HangError.exit_code: FailureClass.HANG,
    errors.Preempted.exit_code: FailureClass.PREEMPTED,
    SIGKILLED: FailureClass.HOST_MEMORY,
    errors.BUG_CODE: FailureClass.BUG,
}

CLASS_OF_WORDS = {
    "out of GPU memory": FailureClass.GPU_MEMORY,
    "storage cannot be reached": FailureClass.STORAGE,
    "the checkpoint could not be": FailureClass.STORAGE,
}
"""Where the exit code says less than a worker's own words."""

ADVICE: dict[FailureClass, str] = {
    FailureClass.CONFIG: "Correct the setting that is named and resume the run; another model needs a new one.",
    FailureClass.DATA: "Check the shards: kftrain shards verify RUN. Shard again where they are damaged.",
    FailureClass.CHECKPOINT: "List what is committed: kftrain checkpoints list RUN.",
    FailureClass.EVALUATION: "Correct what the message names; training is complete and is not repeated.",
    FailureClass.TRACKING: "See that the MLflow server answers, then resume the run.",
    FailureClass.HOST_MEMORY: "Raise launch.kubernetes.memory, or lower train.micro_batch_size.",
    FailureClass.GPU_MEMORY: "Lower train.micro_batch_size, or set train.activation_checkpointing=blocks.",
    FailureClass.NETWORK: "A worker went away or the network broke: resume the run; look at the node if it repeats.",
    FailureClass.STORAGE: "See that the storage answers, from the pods too, then resume the run.",
    FailureClass.PREEMPTED: "Resume the run: it goes on after the last commit.",
    FailureClass.NODE: "Resume the run on other nodes; it goes on after the last commit.",
    FailureClass.IMAGE: "Check launch.kubernetes.trainer_image, its tag and image_pull_secrets.",
    FailureClass.VOLUME: "Check launch.kubernetes.volumes: the claim, secret or config map must exist.",
    FailureClass.QUOTA: "Ask for less, or use another launch.kubernetes.queue.",
    FailureClass.SCHEDULING: "No node fits: check GPUs, cpu, memory, node_selector, tolerations of launch.kubernetes.",
    FailureClass.HANG: "The log of that rank says where it stood; if it was only slow, raise launch.timeout_seconds.",
    FailureClass.DEADLINE: "Raise the limit that is named, or find out why it took so long; what is committed is kept.",
    FailureClass.DIVERGED: "Start a new run with a lower optimizer.learning_rate.",
    FailureClass.USER_CODE: "The traceback is in the log; correct the code, build the image, resume the run.",
    FailureClass.OPERATOR: "See that the training operator runs: kubectl get pods -A | grep training-operator.",
    FailureClass.FENCED: "Another attempt of this run is at work; nothing is lost.",
    FailureClass.LAUNCHER: "The step that followed the job vanished; the job committed and ended. Resume the run.",
    FailureClass.DELETED: "Somebody deleted the job; resume the run to go on after the last commit.",
    FailureClass.TERMINATED: "Start a run with resume_run to go on after the last commit.",
    FailureClass.BUG: "This is not an expected failure: the traceback is in the log. What is committed is kept.",
    FailureClass.UNKNOWN: "Nothing is known but this; what is committed is kept, resume the run.",
}
"""What to do, in one sentence."""


def diagnose(
    task: str, error: Mapping[str, Any] | None, ended: Sequence[Pod], tails: Mapping[int, Sequence[str]]
) -> FailureSummary:
    """The summary of a failed attempt.

    Args:
        task: `train` or `evaluate`.
        error: What the first failing worker wrote into error.json, if anything.
        ended: Pods that ended with a failure, the first one first.
        tails: The last log lines of each worker.
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
        kind = FailureClass.IMAGE if pod.end_reason in NO_COMMAND else _class_of_code(_code(pod))
        return _summary(task, kind, line[:500], _code(pod), pod, tails)
    return _summary(task, FailureClass.UNKNOWN, "the job failed and left no reason", errors.BUG_CODE, None, tails)


def of_launch(
    task: str, kind: FailureClass, error: KftrainError, found: FailureSummary | None = None
) -> FailureSummary:
    """The summary of a job that the launcher gave up itself; `found` is that of its last attempt."""
    if found is not None:
        return found.model_copy(update={"line": error.line, "exit_code": error.exit_code})
    return _summary(task, kind, error.line, error.exit_code, None, {})


def _is_consequence(error: Mapping[str, Any] | None) -> bool:
    """Whether an error only says that somebody else was gone, or that a process was killed from outside."""
    return error is None or int(error["exit_code"]) >= errors.FIRST_RETRYABLE_CODE


def _from_error(task: str, error: Mapping[str, Any], tails: Mapping[int, Sequence[str]]) -> FailureSummary:
    code, line = int(error["exit_code"]), str(error["line"])
    kind = next((kind for part, kind in CLASS_OF_WORDS.items() if part in line), _class_of_code(code))
    index = error.get("node_rank") or 0
    return FailureSummary(
        task=task,
        failure_class=kind.value,
        line=line,
        exit_code=code,
        rank=error.get("rank"),
        node=str(error.get("node") or ""),
        pod=str(error.get("pod") or ""),
        last_lines=list(tails.get(index, ()))[-SHOWN_LINES:],
        advice=ADVICE[kind],
    )


def _summary(
    task: str, kind: FailureClass, line: str, code: int, pod: Pod | None, tails: Mapping[int, Sequence[str]]
) -> FailureSummary:
    return FailureSummary(
        task=task,
        failure_class=kind.value,
        line=line,
        exit_code=code,
        node=pod.node if pod else "",
        pod=pod.name if pod else "",
        last_lines=list(tails.get(pod.index if pod else 0, ()))[-SHOWN_LINES:],
        advice=ADVICE[kind],
    )


def _class_of_code(code: int) -> FailureClass:
    return CLASS_OF_CODE.get(code, FailureClass.UNKNOWN)


def _code(pod: Pod) -> int:
    return errors.BUG_CODE if pod.exit_code is None else pod.exit_code
