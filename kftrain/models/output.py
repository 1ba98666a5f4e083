"""What a model may return beside its output: auxiliary terms of the loss, row by row.

So all processes together compute what one would, and a padding row counts for nothing, wherever it stands. A model that
has none returns what it likes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from kftrain.errors import UserCodeError

if TYPE_CHECKING:
    import torch
    from torch import nn


class ModelOutput(NamedTuple):
    """An output, with what the training adds to its loss.

    A tuple, so that whatever looks for tensors in an output (FSDP does, to know when backward begins) finds them.
    """

    output: Any
    """What the task's `loss` and `statistics` are given."""
    auxiliary: torch.Tensor | None = None
    """`[rows]`, a balancing loss for example: added to *each* loss term of its row.

    The loss of a step is `sum of (loss terms of a row + count_terms of the row * auxiliary of the row)` over
    `sum of count_terms`, over all rows of all processes: the mean loss plus the mean of `auxiliary`, in which a row
    weighs as much as in the loss. Factors (0.01 …) are the model's. Evaluation leaves it out.
    """


def split_output(found: Any, num_rows: int) -> ModelOutput:
    """What a forward pass returned, as a ModelOutput. Raises UserCodeError for auxiliary terms of another shape."""
    result = found if isinstance(found, ModelOutput) else ModelOutput(found)
    if result.auxiliary is not None and result.auxiliary.shape != (num_rows,):
        raise UserCodeError(
            f"must return one number for each of {num_rows} rows, got {list(result.auxiliary.shape)}",
            where="model.forward auxiliary",
        )
    return result


def output_of(model: nn.Module, arguments: tuple[Any, ...]) -> Any:
    """What a model returns for these arguments, without what is for its training."""
    found = model(*arguments)
    return found.output if isinstance(found, ModelOutput) else found
