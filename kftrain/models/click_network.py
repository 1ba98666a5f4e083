"""A network for tables of ids: the rows of a sample's ids side by side, then layers of neurons, to one logit."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from kftrain.models.sparse_embedding import SparseEmbedding

Size = Annotated[int, Field(ge=1)]


class ClickNetwork(nn.Module):
    """Gives the log-odds of a click, `[rows]`, from ids int64 `[rows, num_fields]`.

    Rows of ids lie in one table; an id of one field must differ from those of the others.

    Args:
        num_fields: Ids of a sample.
        dim: Weights of an id's row, as `server.tables` has it.
        hidden: Neurons of each layer.
        table: Name of the table.
    """

    def __init__(self, *, num_fields: Size, dim: Size = 16, hidden: list[Size] | None = None, table: str = "ids"):
        super().__init__()
        self.rows = SparseEmbedding(table, dim)
        # One weight an id beside its vector, as the wide part of Cheng et al. 2016: the last of a row's numbers.
        widths = [num_fields * dim, *(hidden or [64, 32])]
        layers: list[nn.Module] = []
        for width_in, width_out in pairwise(widths):
            layers += [nn.Linear(width_in, width_out), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], 1))

    def forward(self, ids: Tensor) -> Tensor:
        """Return the log-odds `[rows]`."""
        num_rows = len(ids)
        vectors = self.rows(ids.reshape(-1, 1)).reshape(num_rows, ids.shape[1], -1)
        wide = vectors[:, :, -1].sum(1)
        deep: Tensor = self.layers(vectors.flatten(1))
        return torch.add(deep[:, 0], wide)
