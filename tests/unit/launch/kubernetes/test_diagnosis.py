"""Why a job failed: which of all the errors is the cause."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain import errors
from kftrain.errors import DataError, FailureClass, HangError, KftrainError, RetryableError
from kftrain.launch.kubernetes import diagnosis
from kftrain.launch.kubernetes.diagnosis import JobFailedError, diagnose, summarize_launch
from kftrain.launch.kubernetes.observation import Pod
from kftrain.run.advice import find_remedy
from kftrain.run.error import ErrorDocument

TAILS = {"worker-0": ["first worker"], "worker-1": ["second worker"]}


def ended(index=0, code=1, **known):
    return Pod(f"w-{index}", f"u-{index}", index, node="n", exit_code=code, **known)


def found(error=None, *pods):
    summary = diagnose("train", ErrorDocument.of(error) if error else None, pods, TAILS)
    return summary.failure_class.value, summary.exit_code, summary.pod


@pytest.mark.parametrize(
    ("error", "pods", "failure_class", "code", "pod"),
    [
        (DataError("x"), [], "data", 11, ""),
        (DataError("x"), [ended(1, 137, end_reason="OOMKilled")], "data", 11, ""),
        (RetryableError("x"), [ended(0, 138), ended(1, 137, end_reason="OOMKilled")], "out of memory", 137, "w-1"),
        (RetryableError("x"), [ended(1, 143, disruption="PreemptionByScheduler")], "preempted", 143, "w-1"),
        (RetryableError("x"), [ended(1, None, disruption="DeletionByTaintManager")], "node lost", 143, "w-1"),
        (RetryableError("x"), [ended(1, 137, disruption="deleted")], "preempted", 137, "w-1"),
        (RetryableError("x"), [ended(0, 138)], "lost connection", 138, ""),
        (HangError("x"), [ended(0, 140)], "hang", 140, ""),
        (None, [ended(0, 138), ended(1, 1)], "bug", 1, "w-1"),
        (None, [ended(0, 1), ended(1, 143, disruption="deleted")], "bug", 1, "w-0"),
        (None, [ended(0, 1), ended(1, 137, end_reason="OOMKilled")], "bug", 1, "w-0"),
        (None, [ended(0, 128, end_reason="StartError")], "image", 128, "w-0"),
        (None, [ended(0, 139)], "unknown", 139, "w-0"),
        (None, [], "unknown", 1, ""),
    ],
)
def test_the_cause_is_found(error, pods, failure_class, code, pod):
    """A permanent error beats what its peers met; memory and preemption beat a lost connection."""
    named, exit_code, named_pod = found(error, *pods)
    assert named.startswith(failure_class) and (exit_code, named_pod) == (code, pod)


def test_the_error_keeps_its_rank_node_and_the_lines_of_its_worker():
    document = ErrorDocument.of(DataError("shard 3 is damaged"), rank=5, node="n", pod="w-1", node_rank=1)
    summary = diagnose("train", document, [], TAILS)
    assert (summary.rank, summary.node, summary.pod, summary.last_lines) == (5, "n", "w-1", ["second worker"])
    assert summary.line == "shard 3 is damaged" and summary.failure_class is FailureClass.DATA


def test_memory_of_the_gpu_is_told_from_a_wrong_setting():
    error = errors.GpuMemoryError("out of GPU memory", fix="lower it")
    assert found(error)[0] == "out of memory on the GPU"


def test_a_storage_that_is_away_is_no_lost_peer():
    for error in (
        errors.StorageAwayError("TimeoutError: x"),
        errors.StorageError("the checkpoint could not be written"),
    ):
        assert found(error)[0] == "storage"
    assert found(errors.LostPeerError("lost contact with another process"))[0] == "lost connection between workers"


def test_only_the_last_lines_are_kept():
    lines = [str(number) for number in range(100)]
    summary = diagnose("train", None, [ended()], {"worker-0": lines})
    assert summary.last_lines == lines[-diagnosis.SHOWN_LINES :]


def test_every_class_has_advice_and_every_error_a_class():
    assert all(find_remedy(kind) for kind in FailureClass)
    assert all(kind.failure_class is not FailureClass.UNKNOWN for kind in ERRORS)


def test_what_the_launcher_gives_up_keeps_what_was_found_out():
    last = diagnose("train", None, [ended(1, 137, end_reason="OOMKilled")], TAILS)
    failed = JobFailedError("2 attempts", FailureClass.HOST_MEMORY, where="job x", last_summary=last)
    error = failed.error
    summary = summarize_launch("train", failed.kind, error, failed.last_summary)
    assert (summary.pod, summary.last_lines) == ("w-1", ["second worker"])
    assert (summary.exit_code, summary.line) == (13, error.line)
    assert summarize_launch("train", FailureClass.DELETED, error).pod == ""


pods = st.builds(
    Pod,
    name=st.just("w"),
    uid=st.just("u"),
    index=st.integers(0, 3),
    exit_code=st.sampled_from([None, 0, 1, 10, 128, 137, 138, 143, 255]),
    end_reason=st.sampled_from(["", "OOMKilled", "Error", "StartError"]),
    end_message=st.text(max_size=20),
    disruption=st.sampled_from(["", "DeletionByTaintManager", "deleted"]),
)
ERRORS = [k for k in KftrainError.__subclasses__() if k.__module__ == errors.__name__ and k.__name__[0] != "_"]
kinds = st.sampled_from(ERRORS)


@settings(derandomize=True, max_examples=500, deadline=None)
@given(st.none() | kinds.map(lambda kind: ErrorDocument.of(kind("what"))), st.lists(pods, max_size=4))
def test_every_failure_has_a_summary_that_can_be_written(error, ended_pods):
    """Its code is never 0, and a permanent error is never called retryable."""
    summary = diagnose("train", error, ended_pods, {})
    assert summary.line and find_remedy(summary.failure_class) and summary.exit_code > 0
    assert type(summary).salvage(summary.to_dict()) == summary
    if error is not None and error.exit_code < 128:
        assert summary.exit_code == error.exit_code
