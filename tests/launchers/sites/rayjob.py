"""RayJobs of the KubeRay operator 1.6, whose pods have an image with Ray."""

from launchers.sites.cluster import GRACE, ClusterSite, open_cluster


class RayJobSite(ClusterSite):
    """Pods bear no number: the head's is taken for the one of rank 0."""

    def _find_pod(self, run_uri, rank):
        node_type = "worker" if rank else "head"
        for name, pod in self._pods(run_uri).items():
            if pod.metadata.labels["ray.io/node-type"] == node_type and pod.status.phase == "Running":
                return name
        raise AssertionError(f"no pod of a {node_type}")


def open_site(request, folder):
    return open_cluster(
        request,
        "rayjob",
        ("ray.io", "v1", "rayjobs"),
        "kuberay-operator",
        build_flags="--build-arg RAY=1",
        make_site=RayJobSite,
        changes={"launch.kubernetes.memory": "3Gi", "launch.kubernetes.cpu": "450m"},  # Ray has processes of its own
        small=GRACE,  # it loses its node alone
        refused={"servers": "a RayJob has workers alone"},
    )
