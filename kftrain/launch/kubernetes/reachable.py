"""Refusals of storage and MLflow that pods could not reach, a folder or an sqlite file here, before there is a pod."""

from __future__ import annotations

from kftrain.config import Config
from kftrain.core import storage
from kftrain.errors import LaunchError


def require_reachable(config: Config) -> None:
    """Raise LaunchError if the worker pods of a job could not reach the storage root or MLflow."""
    if not config.launch.kubernetes.volumes:
        fix = "use an object store (s3://…), or mount a volume there by launch.kubernetes.volumes"
        require_remote_storage(config, "worker pods", fix)
    require_tracking_server(config, "worker pods")


def require_remote_storage(config: Config, pods: str, fix: str = "use an object store (s3://…)") -> None:
    """Raise LaunchError if the storage root is a folder of this machine. `pods`: who cannot reach it."""
    if storage.is_local(config.run.storage_root):
        what = f"{pods} cannot reach a folder of this machine"
        raise LaunchError(what, where="run.storage_root", value=config.run.storage_root, fix=fix)


def require_tracking_server(config: Config, pods: str) -> None:
    """Raise LaunchError if MLflow's records are in a file of this machine. `pods`: who cannot reach it."""
    if not config.tracking.uri.startswith(("http://", "https://")):
        what, fix = f"{pods} cannot reach an sqlite file of this machine", "use an MLflow server, http://…"
        raise LaunchError(what, where="tracking.uri", value=config.tracking.uri, fix=fix)
