"""A bag of embeddings whose table lies elsewhere: rows are pulled for a batch, their gradients are pushed after it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn


class TableSource(Protocol):
    """Tables that lie elsewhere, as a `SparseEmbedding` calls them."""

    def pull(self, table: str, keys: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the weights (keys, dim) of distinct keys."""

    def push(self, table: str, keys: NDArray[np.int64], gradients: NDArray[np.float32]) -> None:
        """Take gradients (keys, dim) of distinct keys."""


@dataclass
class _Pass:
    """Keys, rows and gradients of the forward passes of a module until the push."""

    pulled: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Keys and rows of each batch."""
    gradients: tuple[Tensor, Tensor] | None = None
    """Distinct keys, and the sums of their gradients."""


class SparseEmbedding(nn.Module):
    """Sums or averages the rows of bags of ids, as `nn.EmbeddingBag` does; any int64 is an id.

    It has no parameters: `attach` gives it its table, and `push_sparse_gradients` does what an optimizer does for the
    rest of a model.

    Args:
        table: The name of the table.
        dim: Weights of a row.
        combiner: How the rows of a bag become one.
    """

    def __init__(self, table: str, dim: int, combiner: Literal["sum", "mean"] = "sum") -> None:
        super().__init__()
        self.table = table
        self.dim = dim
        self.combiner = combiner
        self._source: TableSource | None = None
        # In an object of its own: what a dry run compares of a module is numbers and lists of them.
        self._pass = _Pass()

    def attach(self, source: TableSource) -> None:
        """Read rows from there from now on."""
        self._source = source

    def forward(self, ids: Tensor, offsets: Tensor | None = None) -> Tensor:
        """Return (bags, dim). `ids`: int64, (bags, length), or (ids,) with the `offsets` (bags,) where bags begin."""
        assert self._source is not None, "no table is attached"
        keys, places = torch.unique(ids, return_inverse=True)
        weights = torch.from_numpy(self._source.pull(self.table, keys.cpu().numpy())).to(ids.device)
        if self.training and torch.is_grad_enabled():
            weights.requires_grad_()
            self._pass.pulled.append((keys, weights))
        # Positions among the pulled rows in place of ids: the gradient is that of the rows, and as sparse as theirs.
        return nn.functional.embedding_bag(places, weights, offsets, mode=self.combiner, sparse=True)

    def sum_gradients(self) -> float:
        """Sum the gradients of all batches since the last push by key, in the order of the batches.

        Returns the sum of all numbers: it is finite where they are.
        """
        pulled = self._pass.pulled
        parts = [(keys, weights.grad.coalesce()) for keys, weights in pulled if weights.grad is not None]
        pulled.clear()
        if not parts:
            return 0.0
        keys, places = torch.unique(torch.cat([keys[part.indices()[0]] for keys, part in parts]), return_inverse=True)
        total = torch.zeros(len(keys), self.dim, device=keys.device)
        total.index_add_(0, places, torch.cat([part.values() for _, part in parts]))
        self._pass.gradients = keys, total
        return float(total.sum())

    def push_gradients(self, is_skipped: bool = False) -> None:
        """Push the summed gradients of all batches since the last time; drop them where the step `is_skipped`."""
        assert self._source is not None, "no table is attached"
        if self._pass.pulled:
            self.sum_gradients()
        if self._pass.gradients is not None and not is_skipped:
            keys, total = self._pass.gradients
            self._source.push(self.table, keys.cpu().numpy(), total.cpu().numpy())
        self._pass.gradients = None

    def extra_repr(self) -> str:
        """Describe it, for `print`."""
        return f"{self.table!r}, {self.dim}, combiner={self.combiner!r}"


def attach_tables(model: nn.Module, source: TableSource) -> None:
    """Give every `SparseEmbedding` of a model its table."""
    for module in find_embeddings(model):
        module.attach(source)


def push_sparse_gradients(model: nn.Module) -> None:
    """Push the gradients of every `SparseEmbedding` of a model, where its optimizer makes its step."""
    for module in find_embeddings(model):
        module.push_gradients()


def find_embeddings(model: nn.Module) -> list[SparseEmbedding]:
    """List the modules of a model that have a table."""
    return [module for module in model.modules() if isinstance(module, SparseEmbedding)]
