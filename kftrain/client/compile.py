"""Compiles the pipelines with other images and requests of resources than the release's own."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator

from kftrain.errors import ConfigError

QUANTITY = r"\d+(\.\d+)?(m|k|Ki|[MGT]i?)?"
"""Pattern of the quantities of Kubernetes that a launcher may ask for."""


@contextlib.contextmanager
def compile_with(steps_image: str | None, launcher_cpu: str | None, launcher_memory: str | None) -> Iterator[None]:
    """Let `kftrain.pipelines`, imported in the block, compile with these; None stands for the default.

    Raises ConfigError for what is no quantity of Kubernetes.
    """
    for option, value in (("--launcher-cpu", launcher_cpu), ("--launcher-memory", launcher_memory)):
        if value is not None and not re.fullmatch(QUANTITY, value):
            raise ConfigError("not a quantity of Kubernetes", where=option, value=value, fix="e.g. 250m, 1 or 512Mi")
    values = {
        "KFTRAIN_STEPS_IMAGE": steps_image,
        "KFTRAIN_LAUNCHER_CPU": launcher_cpu,
        "KFTRAIN_LAUNCHER_MEMORY": launcher_memory,
    }
    given = {name: value for name, value in values.items() if value}
    if not given:
        yield
        return
    # Components take these from the environment when they are imported. So they are imported anew twice: in the block
    # to see the values, and after it, by whoever comes next, to see them no more.
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    _forget_pipelines()
    try:
        yield
    finally:
        _forget_pipelines()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _forget_pipelines() -> None:
    ours = ("kftrain.components", "kftrain.pipelines")
    for name in [name for name in sys.modules if name.startswith(ours)]:
        del sys.modules[name]
