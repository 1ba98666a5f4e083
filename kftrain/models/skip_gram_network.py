"""A network of two tables for skip-gram: a row for a name as it stands in the middle, and one as it stands near."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from kftrain.models.sparse_embedding import SparseEmbedding


class SkipGramNetwork(nn.Module):
    """Gives the log-odds of each candidate, `[rows, candidates]`: the product of two rows, plus one number for all.

    Args:
        dim: Weights of a row, as `server.tables` has it for both tables.
        centers: Name of the table of centers, the vectors of names that people use.
        candidates: Name of the table of candidates.
    """

    def __init__(
        self, *, dim: Annotated[int, Field(ge=1)] = 64, centers: str = "centers", candidates: str = "candidates"
    ) -> None:
        super().__init__()
        self.centers = SparseEmbedding(centers, dim)
        self.candidates = SparseEmbedding(candidates, dim)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, center: Tensor, candidates: Tensor) -> Tensor:
        """Return log-odds `[rows, candidates]` of ids `center` `[rows]` and `candidates` `[rows, candidates]`."""
        rows = self.candidates(candidates.reshape(-1, 1)).view(*candidates.shape, -1)
        products: Tensor = torch.einsum("rd,rcd->rc", self.centers(center.unsqueeze(1)), rows)
        return products + self.bias
