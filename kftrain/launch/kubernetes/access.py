"""Whether jobs can be created at all, asked before the hours of work that would end in one."""

from __future__ import annotations

from kftrain.config import Config
from kftrain.errors import LaunchError
from kftrain.launch.kubernetes.client import Cluster
from kftrain.launch.kubernetes.kinds.pytorchjob import API_VERSION, KIND

NEEDED = ("create", "get", "list", "delete")
"""What a launcher does with its jobs; it can do without the rest."""


def require_jobs(config: Config, cluster: Cluster | None = None) -> None:
    """Raises LaunchError where the jobs of this configuration cannot be created. Local ones always can."""
    if config.launch.backend != "pytorchjob":
        return
    cluster = cluster or Cluster(config.launch.kubernetes.namespace)
    if not cluster.knows_jobs():
        raise LaunchError(
            f"this cluster has no {KIND}s ({API_VERSION})",
            where="launch.backend",
            value="pytorchjob",
            fix="install version 1 of the Kubeflow training operator",
        )
    refused = [verb for verb in NEEDED if not cluster.may(verb)]
    if refused:
        raise LaunchError(
            f"the account of this launcher may not {', '.join(refused)} {KIND}s",
            where=f"namespace {cluster.namespace}",
            fix="give it a role with these verbs, or leave launch.kubernetes.namespace empty",
        )
