"""The model of a training before it is wrapped: built without memory for its weights, and what fills it later."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from kftrain.core.progress import to_log
from kftrain.errors import KftrainError, error_from_dict
from kftrain.models.base import has_init_weights
from kftrain.models.registry import build_model, find_target
from kftrain.models.settings import ModelConfig
from kftrain.parallel import initialize
from kftrain.parallel.initialize import Drawn, Scattered, Weights, built_empty
from kftrain.parallel.world import World


def build_empty(
    config: ModelConfig, arguments: Mapping[str, Any], world: World, seed: int
) -> tuple[nn.Module, Weights]:
    """The model, whose parameters have no memory, and their initial values; buffers are the same on all processes.

    A class with `init_weights` draws its weights later. Any other model is built by its constructor on the first
    process; the constructors of the others give its shape. Collective. Raises ConfigError and UserCodeError.
    """

    def construct() -> nn.Module:
        initialize.seed_all(seed)
        return build_model(config, arguments)

    drawn = has_init_weights(find_target(config))
    model = _agreed(
        world, construct if world.is_main and not drawn else lambda: built_empty(construct, drawn and world.is_main)
    )
    if drawn:
        initialize.require_buffers(model)
    if world.size > 1:
        initialize.require_same_parts(model, world)
        initialize.share_tensors(model, world)
    places = initialize.places_of(model)
    if drawn:
        init: Any = model.init_weights
        return model, Drawn(places, init, seed, world.device)
    if world.is_main and world.size > 1:
        to_log(
            "the model is built by its constructor on the first process, and its weights are scattered to the others"
        )
    return model, Scattered(places, world)


def _agreed(world: World, build_empty: Callable[[], nn.Module]) -> nn.Module:
    """The model; raises what building it has raised on any process. Collective: one may take longer than the others."""
    model, problem = None, None
    try:
        model = build_empty()
    except KftrainError as error:
        if world.size == 1:
            raise
        problem = error.to_dict()
    first = next(filter(None, world.gather_slowly(problem)), None) if world.size > 1 else None
    if first is not None:
        raise error_from_dict(first)
    assert model is not None
    return model
