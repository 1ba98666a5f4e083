"""The kinds of job, one file each."""

from __future__ import annotations

import importlib

from kftrain.launch.backends import BACKENDS, POD_BACKENDS
from kftrain.launch.kubernetes.kinds.kind import Kind


def load_kind(backend: str) -> Kind:
    """Return the kind of job of a backend whose jobs are pods."""
    kind = importlib.import_module(BACKENDS[backend].module).KIND
    assert isinstance(kind, Kind)
    return kind


def load_kinds() -> list[Kind]:
    """Return every kind of job, for a run that is known by its id alone, which does not tell the kind of its job."""
    return [load_kind(name) for name in POD_BACKENDS]
