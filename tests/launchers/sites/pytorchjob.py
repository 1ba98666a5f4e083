"""PyTorchJobs of the training operator, version 1."""

from launchers.sites.cluster import open_cluster


def open_site(request, folder):
    return open_cluster(
        request,
        "pytorchjob",
        ("kubeflow.org", "v1", "pytorchjobs"),
        "training-operator",
        refused={"servers": "a PyTorchJob has workers alone"},
    )
