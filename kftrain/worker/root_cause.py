"""The choice of the error that ended a node, and of the cause among those of several nodes. All of it is pure."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from kftrain.errors import FIRST_RETRYABLE_CODE, LauncherGoneError, LostPeerError, Preempted, RetryableError
from kftrain.process.signals import describe_end, to_shell_code
from kftrain.run.error import ErrorDocument
from kftrain.run.job_tasks import JOB_TASKS
from kftrain.worker.node import NodeSpec

LOST_PEER = "lost contact with another process"
"""Message of a process whose peer was gone."""

SAME_TIME_SECONDS = 1.0
"""Seconds by which a killed process may be seen to end after the peers that lost it."""


@dataclass(frozen=True)
class Failure:
    """A process that failed, as the agent saw it."""

    rank: int
    returncode: int
    """Return code of `subprocess`: -N for death by signal N."""
    timestamp: float
    """Time at which the agent saw the end, in seconds since the epoch."""


@dataclass
class Stop:
    """The requests to a node's processes while they ran. A field becomes true once and stays so: it needs no lock."""

    asked: bool = False
    """True once they were asked to stop, by a signal or because the launcher is silent."""
    silent_seconds: float = 0.0
    """Seconds for which the launcher has been silent, once that is too long; else 0."""
    killed: bool = False
    """True once they were killed because they did not stop."""


def describe_silent_end(returncode: int, rank: int | None = None) -> ErrorDocument:
    """Build the error of a process that left none: of a rank, or of the node's agent where `rank` is None."""
    name = "the agent" if rank is None else f"rank {rank}"
    line = f"{name} ended by {describe_end(returncode)} without a word"
    return ErrorDocument.salvage({"exit_code": to_shell_code(returncode), "line": line, "rank": rank})


def is_lost_peer(document: ErrorDocument) -> bool:
    """Tell whether a process failed only because another one was gone."""
    return document.kind == LostPeerError.__name__


def find_cause(failures: Sequence[Failure], left: ErrorDocument | None) -> tuple[Failure, ErrorDocument | None]:
    """Return the process whose failure is the cause, and an error for it where it left none itself.

    Args:
        failures: All failures of a node, in the order in which the agent noticed them.
        left: The error that a process of the node wrote, if any did. Where it only lost a peer, the cause is a
            process that was killed at the same time.
    """
    first = min(failures, key=lambda failure: failure.timestamp)
    early = [failure for failure in failures if failure.timestamp <= first.timestamp + SAME_TIME_SECONDS]
    killed = [failure for failure in early if failure.returncode < 0 and failure.returncode != -signal.SIGTERM]
    if left is None or (is_lost_peer(left) and killed):  # SIGTERM does not count: the agent itself sends it
        silent = killed[0] if killed else first
        return silent, describe_silent_end(silent.returncode, silent.rank)
    return first, None


def may_be_complete(error: ErrorDocument | None, stop: Stop) -> bool:
    """Tell whether processes that ended so may have completed their job: those that failed by themselves have not."""
    return error is None or error.exit_code == Preempted.exit_code or stop.killed


def judge_node(error: ErrorDocument | None, stop: Stop, node: NodeSpec) -> ErrorDocument | None:
    """Return the error of a node whose job is not complete, from the error that its processes left.

    None where they all ended with 0: only the first node of those that meet has to prove that the job is complete.
    """
    if error is None:
        what = "all processes ended with 0, but the job is not complete"
        must_prove = node.is_first and JOB_TASKS[node.task].meets
        return ErrorDocument.of(RetryableError(what, where=node.run_uri)) if must_prove else None
    if stop.silent_seconds:
        return explain_silent_launcher(error, stop.silent_seconds, stop.killed)
    return explain_stop(error, node.task) if stop.asked else error


def explain_stop(document: ErrorDocument, task: str) -> ErrorDocument:
    """Return the error of a node that was asked to stop: a process that could not say why it ended was preempted."""
    if document.exit_code == Preempted.exit_code and not document.kind:
        return ErrorDocument.of(Preempted(JOB_TASKS[task].stop_message))
    return document


def explain_silent_launcher(document: ErrorDocument, timeout_seconds: float, killed: bool) -> ErrorDocument:
    """Return the error of a node that was stopped because its launcher had been silent for so long.

    An error that has nothing to do with the stop is kept. `killed`: the processes did not stop when they were asked to.
    """
    if killed:
        how = "the processes did not stop and were killed"
    elif document.exit_code == Preempted.exit_code or is_lost_peer(document):
        how = "stopped after a commit"
    else:
        return document
    what = f"the launcher has been silent for {timeout_seconds:g} s; {how}"
    return ErrorDocument.of(LauncherGoneError(what, fix="resume the run"))


def outranks(document: ErrorDocument, published: ErrorDocument) -> bool:
    """Tell whether a node's error replaces another's that came first: a cause does, a consequence does not."""
    if is_lost_peer(published):
        return not is_lost_peer(document)
    return published.exit_code >= FIRST_RETRYABLE_CODE > document.exit_code
