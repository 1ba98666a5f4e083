"""The weights that a training starts with where it goes on from a trained model: read from its export, once.

The first process reads and checks them, and each gets its part of them, in every layout. The optimizer is new.
"""

from __future__ import annotations

import torch
from torch import nn

from kftrain.checkpoint import export
from kftrain.config import Config
from kftrain.errors import ConfigError
from kftrain.parallel.initialize import Places, Scattered, Weights
from kftrain.parallel.world import World
from kftrain.progress import to_log
from kftrain.train.settings import InitialWeights
from kftrain.trust import Trust


def initial_weights(model: nn.Module, weights: Weights, config: Config, world: World) -> Weights:
    """What fills the model: the export that the run starts from, or else `weights`.

    Sets the model's buffers, too. Collective. Raises ConfigError where the model is another one than the exported one,
    or its export may not be read; CheckpointError where that is damaged.
    """
    start = config.train.initial_weights
    if not start.export_uri:
        return weights
    values: dict[str, torch.Tensor] = {}

    def read() -> None:
        if world.is_main:
            to_log(f"starting with the weights of {start.origin}: {start.export_uri}")
            values.update(_read(model, weights.places, start, Trust.of(config)))

    world.agree(read)
    persistent = set(model.state_dict())
    for name, buffer in model.named_buffers():
        if name in persistent:
            if world.is_main:
                buffer.copy_(values.pop(name))
            if world.size > 1:
                world.copy_from_main(buffer)
    return Scattered(weights.places, world, values)


def _read(model: nn.Module, places: Places, start: InitialWeights, trust: Trust) -> dict[str, torch.Tensor]:
    """Name of each parameter and of each buffer that is kept -> value, parameters in fp32."""
    found = export.load_state(start.export_uri, start.export_digest, trust).tensors
    names, values = _names_of(model), {}
    for first, (tensor, aliases) in names.items():
        name = next((alias for alias in aliases if alias in found), first)
        _require_equal(first, tensor, found.get(name), start)
        values[first] = found[name].float() if first in places else found[name]
    for name in sorted(found.keys() - {alias for _, aliases in names.values() for alias in aliases}):
        _require_equal(name, None, found[name], start)
    return values


def _names_of(model: nn.Module) -> dict[str, tuple[torch.Tensor, list[str]]]:
    """First name of each tensor that an export holds -> the tensor, and all its names: a tied one has several."""
    kept = set(model.state_dict())
    both = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    first_names: dict[int, str] = {}
    names: dict[str, tuple[torch.Tensor, list[str]]] = {}
    for name, tensor in both:
        if name in kept:
            first = first_names.setdefault(id(tensor), name)
            names.setdefault(first, (tensor, []))[1].append(name)
    return names


def _require_equal(name: str, ours: torch.Tensor | None, theirs: torch.Tensor | None, start: InitialWeights) -> None:
    """Raises ConfigError for a tensor that is not in both models, or of another shape."""
    shown = ["missing" if each is None else str(list(each.shape)) for each in (ours, theirs)]
    if shown[0] != shown[1]:
        raise ConfigError(
            f"the model is not the one of {start.origin}: {name} is {shown[0]}, and {shown[1]} there",
            where="train.from",
            value=start.export_uri,
            fix="configure the same model, or train from scratch",
        )
