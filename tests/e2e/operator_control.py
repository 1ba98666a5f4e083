"""The training operator, taken away and brought back."""

import contextlib

from e2e.namespace import connect, wait_until
from kubernetes import client

NAME = "training-operator"


def move_operators(node):
    """Lets every operator, or webhook, that runs on a node run on another one, and returns when all are ready."""
    core, apps = connect(), client.AppsV1Api()
    core.patch_node(node, {"spec": {"unschedulable": True}})
    try:
        for pod in core.list_pod_for_all_namespaces(field_selector=f"spec.nodeName={node}").items:
            if any(owner.kind == "ReplicaSet" for owner in pod.metadata.owner_references or ()):
                core.delete_namespaced_pod(pod.metadata.name, pod.metadata.namespace)
        wait_until(lambda: all(map(_is_whole, apps.list_deployment_for_all_namespaces().items)), 180, "the operators")
    finally:
        core.patch_node(node, {"spec": {"unschedulable": None}})


def _is_whole(deployment):
    status = deployment.status
    return (status.ready_replicas or 0) == (status.replicas or 0) == deployment.spec.replicas


class Operator:
    """An operator's deployment, wherever it is installed."""

    def __init__(self, name=NAME):
        self._name = name
        self._core = connect()
        self._apps = client.AppsV1Api()
        found = self._apps.list_deployment_for_all_namespaces(field_selector=f"metadata.name={name}").items
        self._namespace = found[0].metadata.namespace
        self._labels = ",".join(f"{k}={v}" for k, v in found[0].spec.selector.match_labels.items())

    @property
    def node_name(self):
        """Where it runs."""
        return self._pods()[0].spec.node_name

    def restart(self):
        """Deletes its pod; the deployment makes another."""
        for pod in self._pods():
            self._core.delete_namespaced_pod(pod.metadata.name, self._namespace)

    @contextlib.contextmanager
    def away(self):
        """Without any operator inside the block, unless `come_back` is called."""
        self._scale(0)
        wait_until(lambda: not self._pods(), 60, "the operator's end")
        try:
            yield
        finally:
            self.come_back()

    def come_back(self):
        """Returns when it is ready."""
        self._scale(1)
        wait_until(self._is_ready, 120, "the operator")

    def _is_ready(self):
        return (self._apps.read_namespaced_deployment(self._name, self._namespace).status.ready_replicas or 0) == 1

    def _scale(self, replicas):
        self._apps.patch_namespaced_deployment_scale(self._name, self._namespace, {"spec": {"replicas": replicas}})

    def _pods(self):
        return self._core.list_namespaced_pod(self._namespace, label_selector=self._labels).items
