"""What a Workflow says about steps that were stopped from outside; messages as Argo wrote them on a cluster."""

import pytest

from kftrain.launch.kubernetes import workflow
from kftrain.run.advice import find_remedy


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
        ("main: OOMKilled (exit code 1)", "out of memory in a step"),
        ("Pod was active on the node longer than the specified deadline", "deadline"),
        ("ImagePullBackOff: Back-off pulling image", "image of a step"),
        ("pod deleted", "preempted"),
        (
            "main: Error (exit code 1): kftrain exit code 17: another launcher holds this run by now",
            "superseded by a newer attempt",
        ),
        ("main: Error (exit code 1): RuntimeError: lease: host-3 holds this run", "unknown"),
        ("main: Error (exit code 1): digest mismatch: shard 3", "unknown"),
        ("kftrain exit code 12: no usable checkpoint", "checkpoint"),
        ("main: Error (exit code 1): kftrain exit code 16: KeyError: 'pod deleted'", "user code"),
        ("main: Error (exit code 1): kftrain exit code 1: kftrain exit code 17: a user's words", "bug"),
        ("main: Error (exit code 1): ValueError: a newer attempt holds this run", "unknown"),
        ("main: Error (exit code 1): ValueError: kftrain exit code 17: a newer attempt holds this run", "unknown"),
    ],
)
def test_the_message_of_the_failed_step_is_the_reason(message, kind):
    found = workflow.explain(a_workflow(node("", "Succeeded", name="shard"), node(message)))
    assert (found.failure_class.value, found.line) == (kind, f"step train: {message}")
    assert found.pod == "w-train" and find_remedy(found.failure_class)


@pytest.mark.parametrize("message", ["main: OOMKilled (exit code 1)", "ImagePullBackOff: Back-off pulling image"])
def test_the_advice_about_a_step_is_not_that_about_a_worker(message):
    assert "launch.kubernetes" not in find_remedy(workflow.explain(a_workflow(node(message))).failure_class)


def test_the_first_of_several_failures_is_the_cause():
    later = node("main: Error (exit code 1)", finished="2026-11-21T10:05:00Z", name="evaluate")
    steps = node("child failed", kind="DAG", finished="2026-11-21T09:00:00Z", name="root")
    assert "train" in workflow.explain(a_workflow(steps, later, node("OOMKilled"))).line


def test_the_last_try_of_a_step_says_why_it_failed():
    first = node("pod deleted", finished="2026-11-21T10:00:00Z", name="train(0)")
    second = node("kftrain exit code 17: a newer attempt", finished="2026-11-21T10:10:00Z", name="train(1)")
    assert workflow.explain(a_workflow(second, first)).failure_class.value == "superseded by a newer attempt"


def kubeflow_node(step, number, message, phase="Failed", finished="2026-11-21T10:00:00Z", attempt=0, driver=False):
    """As KFP 2.17 on Argo 4.0 makes them: every step's pod is displayed as `executor(0)`."""
    inner = f"{step}-driver({attempt})" if driver else f"{step}({attempt}).executor(0)"
    return {
        "type": "Pod",
        "phase": phase,
        "message": message,
        "displayName": f"{step}-driver({attempt})" if driver else "executor(0)",
        "name": f"kftrain-train-x7k2p.root.exit-handler-1.{inner}",
        "id": f"kftrain-train-x7k2p-{number}",
        "templateName": "system-container-driver" if driver else "system-container-impl",
        "finishedAt": finished,
    }


def test_a_step_is_named_as_in_the_pipeline_and_its_pod_as_kubectl_does():
    flow = a_workflow(
        kubeflow_node("shard", 11, "", "Succeeded", "2026-11-21T09:00:00Z"),
        kubeflow_node("train", 2345678901, "main: Error (exit code 1): digest mismatch"),
    )
    found = workflow.explain({**flow, "metadata": {"name": "kftrain-train-x7k2p"}})
    assert found.line == "step train: main: Error (exit code 1): digest mismatch"
    assert found.pod == "kftrain-train-x7k2p-system-container-impl-2345678901"


def test_steps_whose_pods_argo_calls_the_same_do_not_share_their_tries():
    train = kubeflow_node("train", 1, "main: OOMKilled (exit code 1)", finished="2026-11-21T10:00:00Z")
    other = kubeflow_node("audit", 2, "main: Error (exit code 1)", finished="2026-11-21T10:05:00Z")
    assert workflow.explain(a_workflow(other, train)).line == "step train: main: OOMKilled (exit code 1)"


def test_a_try_that_a_later_one_has_made_good_is_no_reason():
    deleted = kubeflow_node("shard", 1, "pod deleted", "Error", "2026-11-21T10:00:00Z")
    again = kubeflow_node("shard", 2, "", "Succeeded", "2026-11-21T10:01:00Z", attempt=1)
    train = kubeflow_node("train", 3, "main: Error (exit code 1): E042", finished="2026-11-21T10:05:00Z")
    assert workflow.explain(a_workflow(deleted, again, train)).line.startswith("step train: ")


def test_a_driver_that_failed_is_the_failure_of_its_step():
    found = workflow.explain(a_workflow(kubeflow_node("train", 7, "main: Error (exit code 1)", driver=True)))
    assert found.line.startswith("step train: ")


def test_terminate_is_told_from_a_failure():
    found = workflow.explain(a_workflow(node("main: Error (exit code 143)"), activeDeadlineSeconds=0))
    assert (found.failure_class.value, found.exit_code) == ("terminated", 143) and "terminated the run" in found.line


def test_a_workflow_without_a_failed_pod_explains_nothing():
    assert workflow.explain(a_workflow(node("", "Running"))) is None
    assert workflow.explain({"spec": {}}) is None


def test_outside_a_pod_nobody_is_asked():
    assert workflow.explain_pipeline_run() is None
