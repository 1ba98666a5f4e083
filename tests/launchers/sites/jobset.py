"""JobSets of the controller of JobSet 0.12."""

from launchers.sites.cluster import open_cluster


def open_site(request, folder):
    return open_cluster(request, "jobset", ("jobset.x-k8s.io", "v1alpha2", "jobsets"), "jobset-controller-manager")
