"""The launch backends by name, `launch.backend`: where each stands. A new one is a file and its line here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple


class Backend(NamedTuple):
    """A launcher, or a kind of job for the launcher of Kubernetes."""

    module: str
    """Module that is imported on demand. With pods it has a `KIND`, without a `build_launcher(config)`."""
    is_remote: bool
    """True if jobs run on other machines than their launcher: they do not inherit its environment, and outlive it."""
    has_pods: bool
    """True if jobs are pods, with the settings of `launch.kubernetes`; all such jobs are remote."""


BACKENDS = {
    "local": Backend("kftrain.launch.local", is_remote=False, has_pods=False),
    "pytorchjob": Backend("kftrain.launch.kubernetes.kinds.pytorchjob", is_remote=True, has_pods=True),
    "trainjob": Backend("kftrain.launch.kubernetes.kinds.trainjob", is_remote=True, has_pods=True),
    "jobset": Backend("kftrain.launch.kubernetes.kinds.jobset", is_remote=True, has_pods=True),
    "slurm": Backend("kftrain.launch.slurm", is_remote=True, has_pods=False),
    "ray": Backend("kftrain.launch.ray", is_remote=True, has_pods=False),
    "rayjob": Backend("kftrain.launch.kubernetes.kinds.rayjob", is_remote=True, has_pods=True),
}

SHARES_MODULE = "kftrain.launch.kubernetes.kinds.indexed_job"
"""Module with the kind of job of every backend with pods whose pods do not meet."""

POD_BACKENDS = tuple(name for name, backend in BACKENDS.items() if backend.has_pods)
"""Backends whose jobs are pods. An action on jobs of any kind may go by the first one."""

if TYPE_CHECKING:
    BackendName = str
else:
    BackendName = Literal[tuple(BACKENDS)]
"""Type of `launch.backend`: the name of a backend."""
