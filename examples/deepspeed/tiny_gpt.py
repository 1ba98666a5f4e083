"""A small language model of bare torch: what the scripts train or import and kftrain evaluates."""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

NUM_HEADS = 4


class Block(nn.Module):
    """Attention and two layers behind it, `[rows, sequence_length, dim]` -> the same."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.first_norm = nn.LayerNorm(dim)
        self.enter = nn.Linear(dim, 3 * dim)
        self.leave = nn.Linear(dim, dim)
        self.second_norm = nn.LayerNorm(dim)
        self.layers = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        heads = self.enter(self.first_norm(values)).unflatten(-1, (3, NUM_HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        values = values + self.leave(attended)
        return values + self.layers(self.second_norm(values))


class TinyGpt(nn.Module):
    """Tokens `[rows, sequence_length]` -> logits `[rows, sequence_length, vocab_size]`."""

    def __init__(self, vocab_size: int, sequence_length: int, document_token: int = 0, dim: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, dim)
        self.places = nn.Embedding(sequence_length, dim)
        self.stack = nn.Sequential(Block(dim), Block(dim))
        self.output = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        logits: torch.Tensor = self.output(self.stack(self.tokens(tokens) + self.places(places)))
        return logits
