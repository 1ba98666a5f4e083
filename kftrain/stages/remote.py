"""What a pipeline on a cluster cannot do with a configuration is refused before anything is uploaded."""

from __future__ import annotations

from urllib.parse import urlsplit

from kftrain import storage
from kftrain.config import Config
from kftrain.data.sources import BUILT_IN
from kftrain.errors import LaunchError
from kftrain.launch.reachable import require_remote_storage, require_tracking_server
from kftrain.plugins import is_plugin

STEPS = "the pipeline's steps"


def require_remote(config: Config) -> None:
    """Raises LaunchError for the first setting that works on this machine only.

    The steps mount no volumes, not even those of the worker pods, so a folder is always one of this machine.
    """
    if config.launch.backend == "local":
        raise LaunchError(
            f"{STEPS} have neither torch nor a GPU: they launch jobs",
            where="launch.backend",
            value="local",
            fix="set it to pytorchjob",
        )
    require_remote_storage(config, STEPS)
    require_tracking_server(config, STEPS)
    _require_remote_source(config)
    _require_no_password(config)


def _require_remote_source(config: Config) -> None:
    source = config.data.source
    if source not in BUILT_IN and not is_plugin(source) and storage.is_local(source):
        raise LaunchError(
            f"{STEPS} cannot reach a file or folder of this machine",
            where="data.source",
            value=source,
            fix=f"use an object store (s3://…), module:attr, or one of: {', '.join(BUILT_IN)}",
        )


def _require_no_password(config: Config) -> None:
    """Kubeflow shows every parameter, and the configuration is one."""
    if urlsplit(config.tracking.uri).password is not None:
        raise LaunchError(
            "Kubeflow would show the password in this URI to everybody",
            where="tracking.uri",
            fix="leave it out and put it into the secret kftrain-mlflow",
        )
