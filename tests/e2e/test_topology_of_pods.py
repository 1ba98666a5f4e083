"""Which axes of a mesh leave their machines: what the processes of real pods find out and say."""

import json

import pytest
from e2e.commands import kftrain, options, running
from e2e.namespace import connect

pytestmark = pytest.mark.timeout(900, func_only=True)

HOSTNAME = "kubernetes.io/hostname"
INDEX = "training.kubeflow.org/replica-index"
"""A label at hand that differs by pod."""

TENSOR_OVER_TWO_PODS = {
    "launch.nodes": 2,
    "launch.processes_per_node": 1,
    "parallel.tensor": 2,
    "train.steps": 4,
    "launch.kubernetes.cpu": "250m",  # so that one machine has room for both
}
TERM = {
    "labelSelector": {"matchExpressions": [{"key": "training.kubeflow.org/job-name", "operator": "Exists"}]},
    "topologyKey": HOSTNAME,
}
APART = {
    "launch.kubernetes.affinity": json.dumps(
        {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [TERM]}}
    )
}


def said(settings, folder):
    """Lines of a training about places."""
    run_uri = kftrain("shard", *options({**settings, **TENSOR_OVER_TWO_PODS}), folder=folder)["run_uri"]
    with running("train", run_uri, folder=folder) as training:
        training.finish()
    return [line for line in training.lines if "groups stand on" in line]


def test_pods_in_two_racks_that_split_a_matrix_say_so(settings, tmp_path):
    (line,) = said({**settings, **APART, "launch.kubernetes.rack_label": INDEX}, tmp_path)
    assert "parallel.tensor 2: 1 of 1 groups stand on several racks" in line


def test_pods_of_one_machine_say_nothing(settings, tmp_path):
    node = connect().list_node().items[0].metadata.labels[HOSTNAME]
    assert not said({**settings, "launch.kubernetes.node_selector": json.dumps({HOSTNAME: node})}, tmp_path)
