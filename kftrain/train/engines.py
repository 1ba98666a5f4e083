"""The engines that a training can run on; another one joins by its factory here."""

from __future__ import annotations

from kftrain.parallel.shape import Shape
from kftrain.train.engine import EngineFactory
from kftrain.train.pipelined_factory import build_pipelined_engine
from kftrain.train.spmd_factory import build_engine

FACTORIES: dict[str, EngineFactory] = {"spmd": build_engine, "pipelined": build_pipelined_engine}
"""Kind of engine -> its factory."""


def choose_factory(shape: Shape) -> EngineFactory:
    """Return the factory of the engine that computes on such a mesh."""
    return FACTORIES["pipelined" if shape.pipeline > 1 else "spmd"]
