"""Refuses configurations that the steps of a pipeline on a cluster cannot use, before anything is uploaded.

The first step refuses it again: a run may have been started from the form of the UI.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from kftrain import launch
from kftrain.config import Config
from kftrain.core import credentials, storage
from kftrain.core.plugins import is_plugin
from kftrain.errors import LaunchError
from kftrain.launch.kubernetes.reachable import require_remote_storage, require_tracking_server
from kftrain.sharding.sources.resolve_source import BUILT_IN

STEPS = "the pipeline's steps"


def require_from_here(config: Config) -> None:
    """Raise LaunchError for settings that the steps after this one could not use, and if no job can be created.

    In a pod of Kubeflow it refuses what `kftrain submit` refuses, but for folders on a volume that the pod mounts: who
    builds a pipeline of their own may mount one in every step.
    """
    if launch.is_pipeline_pod():
        require_remote(config, _is_mounted)
    launch.build_launcher(config).check()


def require_remote(config: Config, is_shared: Callable[[str], bool] = lambda uri: False) -> None:
    """Raise LaunchError for the first setting that works on this machine only.

    The steps mount no volumes, not even those of the worker pods, so a folder is one of this machine, unless
    `is_shared` knows better.
    """
    launch.require_remote_jobs(config, STEPS)
    if not is_shared(config.run.storage_root):
        require_remote_storage(config, STEPS)
    require_tracking_server(config, STEPS)
    for key, source in config.data.sources.items():
        if not is_shared(source):
            _require_remote_source(key, source)
    _require_no_password(config)


def _require_remote_source(key: str, source: str) -> None:
    if source not in BUILT_IN and not is_plugin(source) and storage.is_local(source):
        raise LaunchError(
            f"{STEPS} cannot reach a file or folder of this machine",
            where=key,
            value=source,
            fix=f"use an object store (s3://…), module:attr, or one of: {', '.join(BUILT_IN)}",
        )


def _require_no_password(config: Config) -> None:
    """Raise LaunchError for a URI with a password: Kubeflow shows every parameter, and the configuration is one."""
    for key in credentials.keys_with_credentials(config.to_dict()):
        raise LaunchError(
            "Kubeflow would show the password or token in this URI to everybody",
            where=key,
            fix="leave it out and put it into the secret kftrain-mlflow, or kftrain-storage",
        )


def _is_mounted(uri: str) -> bool:
    """Return True if a path lies on a volume of this pod, and not in its own container."""
    if not storage.is_local(uri):
        return False
    path = Path(storage.local_path(uri)).absolute()
    return any(os.path.ismount(folder) for folder in (path, *path.parents) if folder != Path(folder.anchor))
