"""The test's own process as a step of a pipeline run, in a scripted namespace."""

from helpers.fakes.kube_namespace import NAME

from kftrain.launch.kubernetes import ownership
from kftrain.launch.kubernetes.client import Cluster

POD = "step"
WORKFLOW = "flow"


def workflow(namespace, name=WORKFLOW):
    """Creates a Workflow; returns a reference to it as an owner."""
    uid = namespace.create("workflows", {"metadata": {"name": name}, "spec": {}})["metadata"]["uid"]
    return {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": name, "uid": uid, "controller": True}


def become(namespace, monkeypatch, run_id=""):
    """From now on this process runs in a pod of a Workflow; returns the pod."""
    connect = Cluster.__init__

    def in_cluster(self, *arguments):
        connect(self, *arguments)
        self.own_namespace = NAME

    monkeypatch.setattr(Cluster, "__init__", in_cluster)
    monkeypatch.setenv(ownership.POD_NAME_ENV, POD)
    labels = {ownership.RUN_ID_LABEL: run_id} if run_id else {}
    metadata = {"name": POD, "labels": labels, "ownerReferences": [workflow(namespace)]}
    namespace.create("pods", {"metadata": metadata, "spec": {}, "status": {"phase": "Running"}})
    return namespace.objects["pods"][POD]
