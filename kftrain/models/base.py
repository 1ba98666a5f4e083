"""The protocol of a model: a plain `torch.nn.Module`, ignorant of processes, with three more methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class Model(Protocol):
    """What is asked of a module, built as `ModelClass(**task.model_arguments(), **options)`."""

    def init_weights(self) -> None:
        """Gives every parameter and buffer its initial value, in place, from torch's global generator.

        Called on a module whose memory is uninitialised, so nothing may rely on values that the constructor
        wrote.
        """
        ...

    def blocks(self) -> list[torch.nn.Module]:
        """The repeated submodules, in order: each is sharded, and may be recomputed, as one unit.

        In every forward all processes must call the same ones in the same order.
        """
        ...

    def export_config(self) -> dict[str, Any]:
        """JSON that describes the network, written as `config.json` beside the exported weights."""
        ...

    def after_step(self) -> None:
        """Called once after each optimizer step, without gradients, on every process. Optional.

        It may change buffers (the biases of a router), alike on every process: from buffers that `buffer_reductions`
        combines, which is done before. Parameters are not whole here. A step that the optimizer skipped has none.
        """
        ...
