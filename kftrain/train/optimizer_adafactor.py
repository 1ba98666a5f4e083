"""Adafactor (Shazeer and Stern 2018, arXiv:1804.04235): second moments as a row and a column for each matrix.

The numbers are those of `torch.optim.Adafactor`, which fails on distributed tensors and reads numbers on the host. Rows
and columns are kept whole on each process, they are short; the sums behind them go over the parts of a matrix: two
all-reduces in a step for each parameter group, and for each axis of the mesh that cuts its parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kftrain.parallel.sharded import index_of, local, sum_over_parts
from kftrain.train.optimizer_base import Group, SkippingOptimizer, zero, zeros

BETA2_DECAY = -0.8
MIN_SCALE = 1e-3
"""A parameter counts as at least so large, so that one that begins at 0 moves."""

MIN_MOMENT = torch.finfo(torch.float32).eps
LARGEST_UPDATE = 1.0
"""Root mean square."""


@dataclass
class _Part:
    """A parameter in a step: this process's part of it."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    weights: torch.Tensor
    state: dict[str, torch.Tensor]
    index: tuple[slice, ...]

    @property
    def is_matrix(self) -> bool:
        return self.parameter.dim() > 1


class Adafactor(SkippingOptimizer):
    """Adafactor with decoupled weight decay; the learning rate is the largest step relative to a parameter's size."""

    def __init__(self, groups: list[Group], learning_rate: float) -> None:
        super().__init__(groups, {"lr": learning_rate, "weight_decay": 0.0})
        self._indices = {member: index_of(member) for group in self.param_groups for member in group["params"]}

    def begin(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Start with a count of 0 and second moments of 0: for a matrix one for each row and one for each column."""
        if parameter.dim() < 2:
            return {"step": zero(parameter), "variance": zeros(parameter)}
        *stack, rows, columns = parameter.shape
        moments = {"row_var": (*stack, rows, 1), "col_var": (*stack, 1, columns)}
        return {
            "step": zero(parameter),
            **{name: torch.zeros(shape, device=parameter.device) for name, shape in moments.items()},
        }

    def update(self, group: Group, parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        """Sum over each parameter, then make its update, then measure the update, then change the weights."""
        # Each of the two sums is one exchange for all parameters. The second cannot join the first: the size of an
        # update is known only when the moments, which come of the first, are whole.
        counts = self.counts(gradients[0].device)
        parts = [
            _Part(owner, gradient.masked_fill_(counts == 0, 0.0), local(owner), self.state[owner], self._indices[owner])
            for owner, gradient in zip(parameters, gradients, strict=True)
        ]
        sums = sum_over_parts([_sum_squares(part) for part in parts], parameters)
        rates = [_make_update(part, own, group["lr"], counts) for part, own in zip(parts, sums, strict=True)]
        squares = sum_over_parts([part.gradient.square().sum() for part in parts], parameters)
        for part, rate, square in zip(parts, rates, squares, strict=True):
            size = (square / part.parameter.numel()).sqrt()
            part.weights.mul_(1 - group["lr"] * group["weight_decay"] * counts)
            part.weights.sub_(part.gradient.mul_(counts * rate / (size / LARGEST_UPDATE).clamp(min=1.0)))
            part.state["step"].add_(counts)


def _sum_squares(part: _Part) -> torch.Tensor:
    """Sum this part's squares: of the weights, and for a matrix of the gradient along its rows and columns."""
    # Rows and columns of the whole matrix, with 0 where others have parts: so the sum over processes puts them
    # together, whichever way the matrix is cut.
    size = part.weights.square().sum().reshape(1)
    if not part.is_matrix:
        return size
    rows, columns = torch.zeros_like(part.state["row_var"]), torch.zeros_like(part.state["col_var"])
    squares = part.gradient.square()
    rows[_rows(part)] = squares.sum(-1, keepdim=True)
    columns[_columns(part)] = squares.sum(-2, keepdim=True)
    return torch.cat([size, rows.reshape(-1), columns.reshape(-1)])


def _make_update(part: _Part, sums: torch.Tensor, largest_rate: float, counts: torch.Tensor) -> torch.Tensor:
    """Move the second moments, make the gradient the update of rate 1, and return its rate."""
    step, state, gradient = part.state["step"] + 1, part.state, part.gradient
    moved = step**BETA2_DECAY * counts
    if part.is_matrix:
        rows, columns = state["row_var"], state["col_var"]
        size, by_row, by_column = torch.split(sums, [1, rows.numel(), columns.numel()])
        rows.lerp_(by_row.view_as(rows) / part.parameter.size(-1), moved)
        columns.lerp_(by_column.view_as(columns) / part.parameter.size(-2), moved)
        matrices = (*part.index[:-2], slice(None), slice(None))
        mean = rows.mean(dim=-2, keepdim=True).clamp(min=MIN_MOMENT)[matrices]
        moments = rows[_rows(part)] @ columns[_columns(part)] / mean
    else:
        size, variance = sums, local(state["variance"])
        moments = variance.lerp_(gradient.square(), moved)
    gradient.mul_(moments.clamp(min=MIN_MOMENT**2).rsqrt())
    scale = (size[0] / part.parameter.numel()).sqrt().clamp(min=MIN_SCALE)
    rate: torch.Tensor = scale * step.rsqrt().clamp(max=largest_rate)
    return rate


def _rows(part: _Part) -> tuple[slice, ...]:
    return (*part.index[:-1], slice(None))


def _columns(part: _Part) -> tuple[slice, ...]:
    return (*part.index[:-2], slice(None), part.index[-1])
