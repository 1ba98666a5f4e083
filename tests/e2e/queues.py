"""A queue of Kueue for a test, with the quota of one small pod."""

import contextlib
import secrets

import pytest
from kubernetes import client
from kubernetes.client.exceptions import ApiException

KUEUE = ("kueue.x-k8s.io", "v1beta1")


@contextlib.contextmanager
def open_queue(namespace):
    """Makes a LocalQueue whose ClusterQueue has one CPU, and two priority classes; yields (queue, low, high)."""
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
