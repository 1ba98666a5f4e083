"""Whether jobs can be created at all, asked before the hours of work that would end in one."""

from __future__ import annotations

from kftrain.errors import LaunchError
from kftrain.launch.kubernetes.job_client import JobClient

NEEDED = ("create", "get", "list", "delete")
"""What a launcher does with its jobs; it can do without the rest."""


def require_jobs(cluster: JobClient) -> None:
    """Raises LaunchError where no such jobs can be created."""
    kind = cluster.kind
    if not cluster.knows_jobs():
        raise LaunchError(
            f"this cluster has no {kind.name}s ({kind.api_version})", where="launch.backend", fix=kind.install
        )
    refused = [verb for verb in NEEDED if not cluster.may(verb)]
    if refused:
        raise LaunchError(
            f"the account of this launcher may not {', '.join(refused)} {kind.name}s",
            where=f"namespace {cluster.namespace}",
            fix="give it a role with these verbs, or leave launch.kubernetes.namespace empty",
        )
