"""The kinds of job, one file each."""

from __future__ import annotations

import importlib

from kftrain.launch.backends import BACKENDS, POD_BACKENDS
from kftrain.launch.kubernetes.kinds.kind import Kind


def kind_of(backend: str) -> Kind:
    """The kind of a backend whose jobs are pods."""
    kind = importlib.import_module(BACKENDS[backend].module).KIND
    assert isinstance(kind, Kind)
    return kind


def all_kinds() -> list[Kind]:
    """Every kind: who names a run by its id alone does not say which its job is."""
    return [kind_of(name) for name in POD_BACKENDS]
