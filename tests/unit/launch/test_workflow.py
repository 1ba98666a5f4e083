"""What a Workflow says about steps that were stopped from outside; messages as Argo wrote them on a cluster."""

import pytest

from kftrain.launch import workflow


def node(message, phase="Failed", finished="2026-11-21T10:00:00Z", name="train", kind="Pod"):
    return {
        "type": kind,
        "phase": phase,
        "message": message,
        "displayName": name,
        "id": f"w-{name}",
        "finishedAt": finished,
    }


def a_workflow(*nodes, **spec):
    return {"spec": spec, "status": {"phase": "Failed", "nodes": {str(n): found for n, found in enumerate(nodes)}}}


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("main: OOMKilled (exit code 1)", "out of memory on the host"),
        ("Pod was active on the node longer than the specified deadline", "deadline"),
        ("ImagePullBackOff: Back-off pulling image", "image"),
        ("pod deleted", "preempted"),
        (
            "main: Error (exit code 1): another launcher holds this run by now, and follows its job",
            "superseded by a newer attempt",
        ),
        ("main: Error (exit code 1): RuntimeError: lease: host-3 holds this run", "unknown"),
        ("main: Error (exit code 1): digest mismatch: shard 3", "unknown"),
    ],
)
def test_the_message_of_the_failed_step_is_the_reason(message, kind):
    found = workflow.explain(a_workflow(node("", "Succeeded", name="shard"), node(message)))
    assert (found.failure_class, found.line) == (kind, f"step train: {message}")
    assert found.pod == "w-train" and found.advice


@pytest.mark.parametrize("message", ["main: OOMKilled (exit code 1)", "ImagePullBackOff: Back-off pulling image"])
def test_the_advice_about_a_step_is_not_that_about_a_worker(message):
    assert "launch.kubernetes" not in workflow.explain(a_workflow(node(message))).advice


def test_the_first_of_several_failures_is_the_cause():
    later = node("main: Error (exit code 1)", finished="2026-11-21T10:05:00Z", name="evaluate")
    steps = node("child failed", kind="DAG", finished="2026-11-21T09:00:00Z", name="root")
    assert "train" in workflow.explain(a_workflow(steps, later, node("OOMKilled"))).line


def test_the_last_try_of_a_step_says_why_it_failed():
    first = node("pod deleted", finished="2026-11-21T10:00:00Z", name="train(0)")
    second = node("another launcher holds this run by now", finished="2026-11-21T10:10:00Z", name="train(1)")
    assert workflow.explain(a_workflow(second, first)).failure_class == "superseded by a newer attempt"


def test_terminate_is_told_from_a_failure():
    found = workflow.explain(a_workflow(node("main: Error (exit code 143)"), activeDeadlineSeconds=0))
    assert (found.failure_class, found.exit_code) == ("terminated", 143) and "terminated the run" in found.line


def test_a_workflow_without_a_failed_pod_explains_nothing():
    assert workflow.explain(a_workflow(node("", "Running"))) is None
    assert workflow.explain({"spec": {}}) is None


def test_outside_a_pod_nobody_is_asked():
    assert workflow.explain_pipeline_run() is None
