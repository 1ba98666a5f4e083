"""The weights that a training starts with where it goes on from a trained model: read from its export.

Each process reads and checks its part of them, in every layout. The optimizer is new.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import nn

from kftrain.checkpoint import export_tensors
from kftrain.checkpoint.export import read_recipe
from kftrain.checkpoint.filling import ModelSlots
from kftrain.config import Config
from kftrain.core.progress import to_log
from kftrain.errors import ConfigError
from kftrain.parallel.world import World
from kftrain.run.export import ExportManifest, read_export_manifest
from kftrain.train.settings import InitialWeights
from kftrain.trust import Trust


class Filling(Protocol):
    """What gives a model its weights."""

    def fill(self, model: nn.Module, on_host: bool = False) -> None:
        """Gives this process's parts memory and values; `model` is what became of the one that was built."""


@dataclass(frozen=True)
class ExportedWeights:
    """Those of an export."""

    slots: ModelSlots
    uri: str
    manifest: ExportManifest
    world: World

    def fill(self, model: nn.Module, on_host: bool = False) -> None:
        """See `Filling`. Collective. Raises CheckpointError where the export is damaged."""
        with export_tensors.opened(self.uri, self.manifest, self.world) as tensors:
            self.slots.fill(model, tensors, self.world, on_host)


def initial_weights(model: nn.Module, weights: Filling, config: Config, world: World) -> Filling:
    """What fills the model: the export that the run starts from, or else `weights`.

    Sets the model's buffers, too. Collective. Raises ConfigError where the model is another one than the exported one,
    or its export may not be read; CheckpointError where that is damaged.
    """
    start = config.train.initial_weights
    if not start.export_uri:
        return weights
    if world.is_main:
        to_log(f"starting with the weights of {start.origin}: {start.export_uri}")
    slots, found = ModelSlots(model), list[ExportedWeights]()
    world.agree(lambda: found.append(_checked(slots, start, Trust.of(config), world)))
    (exported,) = found
    if slots.has_buffers:
        with export_tensors.opened(exported.uri, exported.manifest, world) as tensors:
            slots.fill_buffers(tensors, world)
    return exported


def _checked(slots: ModelSlots, start: InitialWeights, trust: Trust, world: World) -> ExportedWeights:
    """Raises ConfigError for a tensor that is not in both models, or of another shape. No tensor is read."""
    uri = start.export_uri
    read_recipe(uri, start.export_digest, trust)
    manifest = read_export_manifest(uri, start.export_digest)
    with export_tensors.opened(uri, manifest) as tensors:
        misfit = slots.misfit(tensors.forms)
    if misfit:
        raise ConfigError(
            f"the model is not the one of {start.origin}: {misfit}",
            where="train.from",
            value=uri,
            fix="configure the same model, or train from scratch",
        )
    return ExportedWeights(slots, uri, manifest, world)
