"""The launch backends by name, `launch.backend`: where each stands. A new one is a file and its line here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple


class Backend(NamedTuple):
    """A launcher, or a kind of job for the launcher of Kubernetes."""

    module: str
    """Module that is imported on demand. With pods it has a `KIND`, without a `build_launcher(config)`."""
    has_pods: bool
    """True if jobs are pods, with the settings of `launch.kubernetes`; else they are processes below the launcher."""


BACKENDS = {
    "local": Backend("kftrain.launch.local", has_pods=False),
    "pytorchjob": Backend("kftrain.launch.kubernetes.kinds.pytorchjob", has_pods=True),
}

POD_BACKENDS = tuple(name for name, backend in BACKENDS.items() if backend.has_pods)
"""Backends whose jobs are pods. An action on jobs of any kind may go by the first one."""

if TYPE_CHECKING:
    BackendName = str
else:
    BackendName = Literal[tuple(BACKENDS)]
"""Type of `launch.backend`: the name of a backend."""
