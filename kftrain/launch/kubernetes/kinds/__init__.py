"""The kinds of job, one file each."""

from __future__ import annotations

import importlib

from kftrain.launch.backends import BACKENDS, POD_BACKENDS, SHARES_MODULE
from kftrain.launch.kubernetes.kinds.kind import Kind
from kftrain.run.job_tasks import TRAINING, JobTask


def load_kind(backend: str, task: JobTask = TRAINING) -> Kind:
    """Return the kind of a task's jobs with a backend whose jobs are pods."""
    return _import_kind(BACKENDS[backend].module if task.meets else SHARES_MODULE)


def load_kinds() -> list[Kind]:
    """Return every kind of job: neither a run's id nor its configuration of now tells the kinds of its jobs."""
    return [*(load_kind(name) for name in POD_BACKENDS), _import_kind(SHARES_MODULE)]


def _import_kind(module: str) -> Kind:
    kind = importlib.import_module(module).KIND
    assert isinstance(kind, Kind)
    return kind
