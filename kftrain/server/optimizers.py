"""Optimizers of rows: each updates a block of gathered rows with one gradient a row.

They do torch's own operations in torch's order, so that a table gives the bits of `nn.EmbeddingBag(sparse=True)` with
torch's optimizer: `add_` with `alpha` is fused there, and numpy has no such operation.

A block is float32 (rows, dim + state): the weights, then `count_state(dim)` numbers of the optimizer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class RowOptimizer(Protocol):
    """An optimizer as a table calls it."""

    def count_state(self, dim: int) -> int:
        """Return how many numbers it keeps for a row of `dim` weights."""

    def begin(self, state: Tensor, rows: NDArray[np.int64]) -> None:
        """Set the state of new rows, which are zeros, in a view (all rows, state)."""

    def update(self, block: Tensor, gradients: Tensor, step: int, num_missed: Tensor) -> None:
        """Change a block in place.

        `gradients`: (rows, dim). `step`: the number of this update of the table, from 1. `num_missed`: (rows,) updates
        of the table since the last one for the row.
        """


@dataclass(frozen=True)
class RowSgd:
    """Descend as torch.optim.SGD does without momentum."""

    learning_rate: float

    def count_state(self, dim: int) -> int:  # noqa: D102
        return 0

    def begin(self, state: Tensor, rows: NDArray[np.int64]) -> None:  # noqa: D102
        pass

    def update(self, block: Tensor, gradients: Tensor, step: int, num_missed: Tensor) -> None:  # noqa: D102
        block.add_(gradients, alpha=-self.learning_rate)


@dataclass(frozen=True)
class RowAdagrad:
    """Divide by the root of the sum of squares: of each weight as torch.optim.Adagrad, or one of their means a row.

    `is_row_wise` keeps one number a row instead of `dim` (as FBGEMM's row-wise Adagrad, Naumov et al. 2019).
    """

    learning_rate: float
    epsilon: float = 1e-10
    initial_sum: float = 0.0
    is_row_wise: bool = True

    def count_state(self, dim: int) -> int:  # noqa: D102
        return 1 if self.is_row_wise else dim

    def begin(self, state: Tensor, rows: NDArray[np.int64]) -> None:  # noqa: D102
        if self.initial_sum:
            state[rows] = self.initial_sum

    def update(self, block: Tensor, gradients: Tensor, step: int, num_missed: Tensor) -> None:  # noqa: D102
        dim = gradients.shape[1]
        squares = gradients.pow(2)
        sums = block[:, dim:].add_(squares.mean(1, keepdim=True) if self.is_row_wise else squares)
        block[:, :dim].add_(gradients / sums.sqrt().add_(self.epsilon), alpha=-self.learning_rate)


@dataclass(frozen=True)
class RowAdam:
    """Do what torch.optim.SparseAdam does; with `decays_lazily`, moments have decayed at the updates a row missed.

    Dense Adam decays the moments of a row at every update; here that is made up for when the row is next touched. The
    weights do not move meanwhile, as they would under dense Adam.
    """

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    decays_lazily: bool = False

    def count_state(self, dim: int) -> int:  # noqa: D102
        return 2 * dim

    def begin(self, state: Tensor, rows: NDArray[np.int64]) -> None:  # noqa: D102
        pass

    def update(self, block: Tensor, gradients: Tensor, step: int, num_missed: Tensor) -> None:  # noqa: D102
        dim = gradients.shape[1]
        means, squares = block[:, dim : 2 * dim], block[:, 2 * dim :]
        if self.decays_lazily:
            means.mul_((self.beta1 ** num_missed.double()).float()[:, None])
            squares.mul_((self.beta2 ** num_missed.double()).float()[:, None])
        # old + (1 - b) * (new - old), as torch writes it: b * old + (1 - b) * new rounds otherwise.
        means.add_(gradients.sub(means).mul_(1 - self.beta1))
        squares.add_(gradients.pow(2).sub_(squares).mul_(1 - self.beta2))
        step_size = self.learning_rate * math.sqrt(1 - self.beta2**step) / (1 - self.beta1**step)
        block[:, :dim].add_(-step_size * means.div(squares.sqrt().add_(self.epsilon)))


OPTIMIZERS: dict[str, type[Any]] = {"sgd": RowSgd, "adagrad": RowAdagrad, "adam": RowAdam}
"""Name -> class; its fields are its options."""
