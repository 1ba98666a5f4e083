"""The parts of a training's state that a checkpoint holds: by name, each with the version of its form.

A release that does not know a part, or knows it in another form, must not go on without it: it refuses the checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from kftrain.checkpoint.staging import State
from kftrain.errors import CheckpointError
from kftrain.parallel import buffers
from kftrain.parallel.distributed import Part
from kftrain.parallel.world import World


class Parts:
    """The parts of one training, by name; the names are the first keys in the files of a checkpoint."""

    def __init__(self, parts: dict[str, Part]) -> None:
        self._parts = parts

    @property
    def versions(self) -> dict[str, int]:
        """Version of each part, by name."""
        return {name: part.version for name, part in self._parts.items()}

    def save(self) -> State:
        """Return the whole state, as it is now. Collective."""
        return {name: part.save() for name, part in self._parts.items()}

    def load(self, state: State) -> None:
        """Put a state back: the inverse of `save`."""
        for name, part in self._parts.items():
            part.load(state[name])

    def require_same(self, found: dict[str, int], where: str) -> None:
        """Raises CheckpointError where a checkpoint at `where` has other parts than these, or other versions."""
        own = self.versions
        odd = next((name for name in sorted({*found, *own}) if found.get(name) != own.get(name)), None)
        if odd is None:
            return
        if odd not in found:
            what = f"the checkpoint has no {odd!r}, which this training needs"
        elif odd not in own:
            what = f"the checkpoint holds {odd!r}, which this release or this training does not know"
        else:
            what = f"the checkpoint holds version {found[odd]} of {odd!r}, this release reads version {own[odd]}"
        fix = "resume with the release and the settings that wrote it, or start a new run"
        raise CheckpointError(what, where=where, fix=fix)


def model_part(model: nn.Module, world: World) -> Part:
    """Make the part with parameters and buffers, by the names that they have in the plain model."""

    def save() -> dict[str, Any]:
        # A checkpoint holds the buffers of one process, and a resume gives them to all.
        buffers.require_equal(model, world)
        return get_model_state_dict(model)

    def load(state: dict[str, Any]) -> None:
        set_model_state_dict(model, state, options=StateDictOptions(strict=True))

    return Part(1, save, load)


def optimizer_part(model: nn.Module, members: Sequence[torch.optim.Optimizer]) -> Part:
    """Make the part with what the optimizer's members keep of each parameter, by the parameter's name."""

    def load(state: dict[str, Any]) -> None:
        set_optimizer_state_dict(model, members, state, options=StateDictOptions(strict=True))

    return Part(1, lambda: get_optimizer_state_dict(model, members), load)
