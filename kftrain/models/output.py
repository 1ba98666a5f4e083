"""Output of a model with auxiliary terms of the loss, row by row.

By rows, all processes together compute what one would, and padding rows count for nothing wherever they stand. A model
without auxiliary terms returns what it likes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from kftrain.errors import UserCodeError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


class ModelOutput(NamedTuple):
    """Output of a model, with what training adds to its loss.

    It is a tuple, so that whatever looks for tensors in an output (as FSDP does, to know when backward begins) finds
    them.
    """

    output: Any
    """Argument `output` of the task's `loss` and `statistics`."""
    auxiliary: torch.Tensor | None = None
    """`[rows]`, a balancing loss for example: added to *each* loss term of its row.

    The loss of a step is `sum of (loss terms of a row + count_terms of the row * auxiliary of the row)` over
    `sum of count_terms`, over all rows of all processes: the mean loss plus the mean of `auxiliary`, in which a row
    weighs as much as in the loss. Factors (0.01 …) are the model's. Evaluation leaves it out.
    """


def split_output(returned: Any, num_rows: int) -> ModelOutput:
    """Wrap what a forward pass returned as a ModelOutput. Raises UserCodeError for auxiliary terms of another shape."""
    result = returned if isinstance(returned, ModelOutput) else ModelOutput(returned)
    if result.auxiliary is not None and result.auxiliary.shape != (num_rows,):
        raise UserCodeError(
            f"must return one number for each of {num_rows} rows, got {list(result.auxiliary.shape)}",
            where="model.forward auxiliary",
        )
    return result


def output_of(model: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Run a model and return its output without auxiliary terms."""
    return without_auxiliary(model(*arguments))


def without_auxiliary(returned: Any) -> Any:
    """Return the output in what a forward pass returned."""
    return returned.output if isinstance(returned, ModelOutput) else returned
