"""The protocol of a model: any `torch.nn.Module`, ignorant of processes; a few methods more are optional."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kftrain.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class ModelPiece:
    """A part of a model's forward pass, which a stage of a pipeline computes as a whole."""

    call: Callable[[Any, Any], Any]
    """Computes from what the piece before returned (None for the first one), and from the model's inputs: a tensor or
    a tuple of tensors, which may travel to another process. The last piece returns what the model returns."""
    modules: Sequence[nn.Module]
    """Modules of the model whose parameters it uses; the model itself stands for the parameters that no module has."""
    num_idle: int = 0
    """Numbers in these that a token is not multiplied with, such as those of experts that it does not reach."""


class Model(Protocol):
    """Optional methods of a module that is built as `ModelClass(**task.model_arguments(), **options)`."""

    def init_weights(self, name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
        """Give one parameter its initial value, in place; called for each of them, in any order.

        A class that has it is built without memory for its weights, on each process: nothing that its constructor
        writes into a parameter counts. Then each process is given its share, and none holds the whole model. A class
        that derives from one that has it, and has a constructor of its own, must define it anew, for that constructor
        may have set weights.

        Args:
            name: As in `named_parameters()`; of a tied parameter the first one.
            parameter: The whole of it, in fp32 and uninitialised, whatever part of it this process keeps. Other
                parameters of the module have no values here, only shapes.
            generator: Seeded with the run's seed and the name, so that weights depend neither on the number of
                processes nor on the layout. What draws from torch's global generator draws from the same.
        """
        ...

    def blocks(self) -> list[torch.nn.Module]:
        """The repeated submodules, in order: each is sharded, and may be recomputed, as one unit.

        In every forward all processes must call the same ones in the same order.
        """
        ...

    def output_layer(self) -> torch.nn.Module:
        """Return the linear layer, or tied embedding, whose output the model returns as it is, its logits.

        It is asked for `train.loss_chunk_tokens`, with which the layer's input reaches the task instead.
        """
        ...

    def stages(self) -> list[ModelPiece]:
        """Return the pieces of the forward pass in order: computed one after the other they are the model's forward.

        Called again after the model was distributed: a piece must take its modules from where they stand then.
        """
        ...

    def stage_inputs(self, *inputs: Any) -> Any:
        """Make of the model's inputs what the pieces are called with; without it they get the tuple of the inputs.

        Every process has all inputs, and calls it once for each of its stages and micro batches.
        """
        ...

    def tensor_plan(self) -> Mapping[str, str]:
        """Map patterns of modules' names to how their matrices are split over processes: `parallel/tensor_plan.py`."""
        ...

    def tensor_sizes(self) -> Mapping[str, int]:
        """Map names of options to sizes that the number of these processes must divide, such as heads."""
        ...

    def context_plan(self) -> Mapping[str, str]:
        """Map patterns of modules' names to what cuts sequences there, or shares them: `parallel/context.py`."""
        ...

    def export_config(self) -> dict[str, Any]:
        """Return JSON that describes the network, written as `config.json` beside the exported weights."""
        ...

    def take_row_weights(self, weights: torch.Tensor) -> None:
        """Take the weight of each row of the next forward pass, `[rows]`, before each pass of a training.

        With stages it is called before each stage's part of a pass. Rows of weight 0 only fill a
        process's share up: what the model counts for itself must leave them out.
        """
        ...

    def expert_plan(self) -> Sequence[str]:
        """List patterns of the names of modules that hold experts, for `parallel.expert`: `parallel/expert.py`."""
        ...

    def step_metrics(self) -> dict[str, float]:
        """Return numbers of the last step for the tracker, by name; called on one process where a point is recorded."""
        ...

    def after_step(self) -> None:
        """Change buffers after an optimizer step; called once for each, without gradients, on every process.

        It may change buffers (the biases of a router), alike on every process: from buffers that `buffer_reductions`
        combines, which is done before. Parameters are not whole here: they may be changed number by number, such as by
        `clamp_`, which is not possible in forward. A step that the optimizer skipped has none.
        """
        ...


def has_init_weights(target: Callable[..., Any]) -> bool:
    """Return True if a class's weights come from its `init_weights` rather than from its constructor.

    A function may have set weights itself, and so may the constructor of a class that inherits the method. An
    `init_weights` that needs no arguments, as those of many libraries, is its constructor's business.

    Raises ConfigError for a method that needs others than the protocol's.
    """
    if not isinstance(target, type) or not callable(getattr(target, "init_weights", None)):
        return False
    method: Any = target.init_weights  # type: ignore[attr-defined]
    if _accepts(method, "self"):
        return False
    if not _accepts(method, "self", "name", "parameter", "generator"):
        raise ConfigError(
            "init_weights must take a name, a parameter and a generator",
            where=f"model {target.__name__}.init_weights",
            value=str(inspect.signature(method)),
            fix="fill that one parameter in place, or rename the method and call it in the constructor",
        )
    return _find_owner(target, "init_weights") <= _find_owner(target, "__init__")


def run_pieces(model: Any, pieces: Sequence[ModelPiece], value: Any, inputs: Sequence[Any]) -> Any:
    """Compute some pieces of a model that follow each other. `value`: what the one before them returned."""
    prepared = model.stage_inputs(*inputs) if hasattr(model, "stage_inputs") else tuple(inputs)
    for piece in pieces:
        value = piece.call(value, prepared)
    return value


def draw_weights(model: nn.Module) -> None:
    """Initialise each parameter by `init_weights` from torch's global generator; a constructor may end with it."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            model.init_weights(name, parameter, torch.default_generator)  # type: ignore[operator]


def _accepts(method: Callable[..., Any], *arguments: str) -> bool:
    try:
        inspect.signature(method).bind(*arguments)
    except TypeError:
        return False
    return True


def _find_owner(target: type, name: str) -> int:
    """Return how many classes up the attribute is defined; 0: by `target` itself."""
    return next(number for number, base in enumerate(target.__mro__) if name in vars(base))
