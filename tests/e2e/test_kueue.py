"""Jobs in a Kueue queue: they wait with the reason, are preempted and resumed; what never fits fails at once."""

import secrets

import pytest
from e2e.commands import kftrain, options, running
from kubernetes import client
from kubernetes.client.exceptions import ApiException

from kftrain.run import attempts
from kftrain.run.paths import RunPaths

pytestmark = pytest.mark.timeout(900, func_only=True)

KUEUE = ("kueue.x-k8s.io", "v1beta1")


@pytest.fixture(scope="module")
def queue(namespace):
    """A LocalQueue whose ClusterQueue has one CPU, and two priority classes: (queue, low, high)."""
    custom, name = client.CustomObjectsApi(), f"e2e-{secrets.token_hex(3)}"
    quota = [{"name": "cpu", "nominalQuota": "1"}, {"name": "memory", "nominalQuota": "4Gi"}]
    covered = {"coveredResources": ["cpu", "memory"], "flavors": [{"name": name, "resources": quota}]}
    cluster_wide = {
        "resourceflavors": [{"metadata": {"name": name}}],
        "workloadpriorityclasses": [
            {"metadata": {"name": f"{name}-low"}, "value": 1},
            {"metadata": {"name": f"{name}-high"}, "value": 1000},
        ],
        "clusterqueues": [
            {
                "metadata": {"name": name},
                "spec": {
                    "namespaceSelector": {},
                    "resourceGroups": [covered],
                    "preemption": {"withinClusterQueue": "LowerPriority"},
                },
            }
        ],
    }
    kinds = {"resourceflavors": "ResourceFlavor", "workloadpriorityclasses": "WorkloadPriorityClass"}
    kinds["clusterqueues"] = "ClusterQueue"
    try:
        for plural, bodies in cluster_wide.items():
            for body in bodies:
                document = {"apiVersion": "/".join(KUEUE), "kind": kinds[plural], **body}
                custom.create_cluster_custom_object(*KUEUE, plural, document)
    except ApiException as error:
        assert error.status == 404, error
        pytest.skip("Kueue is not installed")
    local = {"apiVersion": "/".join(KUEUE), "kind": "LocalQueue", "metadata": {"name": name}}
    local["spec"] = {"clusterQueue": name}
    custom.create_namespaced_custom_object(*KUEUE, namespace.name, "localqueues", local)
    yield name, f"{name}-low", f"{name}-high"
    for plural, bodies in reversed(cluster_wide.items()):
        for body in bodies:
            custom.delete_cluster_custom_object(*KUEUE, plural, body["metadata"]["name"])


@pytest.fixture
def queued(settings, queue):
    """Settings of a small training in the queue, of low priority."""
    one = {"launch.nodes": 1, "launch.processes_per_node": 1, "train.steps": 60, "model.dim": 192}
    return {**settings, **one, "launch.kubernetes.queue": queue[0], "launch.kubernetes.queue_priority": queue[1]}


def shard(pairs, folder):
    return kftrain("shard", *options(pairs), folder=folder)["run_uri"]


def test_a_job_waits_with_the_reason_is_preempted_and_goes_on(queued, queue, tmp_path):
    low = shard({**queued, "train.steps": 400}, tmp_path)  # long enough to be there when the other one comes
    high = shard({**queued, "launch.kubernetes.queue_priority": queue[2], "train.steps": 20}, tmp_path)
    with running("train", low, folder=tmp_path) as victim:
        victim.wait_for("checkpoint at step 10 started", 300)
        with running("train", high, folder=tmp_path) as winner:
            victim.wait_for("Queued: ", 120)
            winner.wait_for("Training", 300)
            winner.finish()
        victim.finish()
    assert "insufficient unused quota for cpu" in victim.output
    assert "going on after step" in victim.output
    assert attempts.find_last_attempt(RunPaths(low)) == 2 and attempts.find_last_attempt(RunPaths(high)) == 1


def test_what_never_fits_fails_at_once(queued, tmp_path):
    run_uri = shard({**queued, "launch.kubernetes.cpu": 3}, tmp_path)
    with running("train", run_uri, folder=tmp_path) as command:
        command.wait_for("it never fits", 60)
        command.finish(code=13, seconds=60)
    assert "request > maximum capacity" in command.output


def test_a_queue_that_does_not_exist_is_named(queued, tmp_path):
    limit = {"launch.kubernetes.queue": "nowhere", "launch.kubernetes.queue_timeout_seconds": 20}
    run_uri = shard({**queued, **limit}, tmp_path)
    with running("train", run_uri, folder=tmp_path) as command:
        command.wait_for("LocalQueue nowhere doesn't exist", 60)
        command.finish(code=13, seconds=120)
    assert "Queued for longer than" in command.output


def test_a_priority_class_that_does_not_exist_is_suspected(queued, tmp_path):
    limit = {"launch.kubernetes.queue_priority": "nope", "launch.kubernetes.queue_timeout_seconds": 25}
    run_uri = shard({**queued, **limit}, tmp_path)
    with running("train", run_uri, folder=tmp_path) as command:
        command.wait_for("Kueue has made no Workload of it", 60)
        command.finish(code=13, seconds=120)
