"""The engines that a training can run on; a second one joins by its factory here."""

from __future__ import annotations

from kftrain.train.engine import EngineFactory
from kftrain.train.spmd_factory import build_engine

FACTORIES: dict[str, EngineFactory] = {"spmd": build_engine}
"""Kind of engine -> its factory."""

DEFAULT = "spmd"
"""Kind of engine that trains every configuration: there is one so far."""
