"""The network: a plain torch module. How it is spread over processes is not its business."""

import torch
from torch import Tensor, nn


class Perceptron(nn.Module):
    """Features `[B, num_features]` to one number each, `[B]`, through residual blocks of one hidden layer."""

    def __init__(self, *, num_features: int, dim: int = 32, num_layers: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.enter = nn.Linear(num_features, dim)
        self.layers = nn.ModuleList(Block(dim, dropout) for _ in range(num_layers))
        self.leave = nn.Linear(dim, 1)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.enter(features)
        for block in self.layers:
            hidden = block(hidden)
        return self.leave(hidden).squeeze(-1)

    def blocks(self) -> list[nn.Module]:
        """What is sharded, and recomputed, one at a time."""
        return list(self.layers)

    def export_config(self) -> dict[str, int]:
        """What `config.json` says beside the exported weights."""
        return {"num_features": self.enter.in_features, "dim": self.enter.out_features, "num_layers": len(self.layers)}


class Block(nn.Module):
    """`x + dropout(tanh(W x + b))`."""

    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.dropout(torch.tanh(self.linear(hidden)))
