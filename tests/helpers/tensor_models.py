"""Models that say themselves how their matrices are split, some of them wrongly."""

import torch
from helpers.parity_oracle import text_rows
from torch import nn

from kftrain.models.transformer import Transformer


def seven_tokens():
    """Rows of `parity_oracle`, without the last token."""
    return {"tokens": text_rows()["tokens"][:, :-1]}


class Forgetful(Transformer):
    """Its plan leaves the last norm out, which is given a part of the places."""

    def tensor_plan(self):
        return {name: kind for name, kind in super().tensor_plan().items() if name != "model.norm"}


class Sizeless(Transformer):
    """Nobody knows before its forward pass how long its sequences are."""

    def tensor_sizes(self):
        return {}


class Misspelt(Transformer):
    """Its plan names a module that there is not."""

    def tensor_plan(self):
        return {**super().tensor_plan(), "model.layers.*.self_attention.q_proj": "column"}


class Planless(Transformer):
    tensor_plan = None


class Counting(Transformer):
    """Counts the tokens that it has seen."""

    buffer_reductions = {"num_seen": "sum"}  # noqa: RUF012

    def __init__(self, **options):
        super().__init__(**options)
        self.register_buffer("num_seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens):
        if self.training:
            self.num_seen += tokens.numel()
        return super().forward(tokens)

    init_weights = Transformer.init_weights


class Mixed(nn.Module):
    """A user's own: attention over three matrices in one, biases everywhere, dropout, and logits that it scales."""

    def __init__(self, vocab_size, sequence_length, document_token, dim=16, head_dim=4, dropout=0.0):
        super().__init__()
        self.head_dim = head_dim
        self.embed = nn.Embedding(vocab_size, dim)
        self.norm = nn.LayerNorm(dim)
        self.to_qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(dim, vocab_size)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens):
        hidden = self.embed(tokens)
        qkv = self.to_qkv(self.norm(hidden)).unflatten(-1, (3, -1, self.head_dim)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)
        hidden = hidden + self.drop(self.out(attended.transpose(1, 2).flatten(2)))
        return self.head(hidden) * self.scale

    def tensor_plan(self):
        plan = {"embed": "vocabulary", "norm": "sequence", "to_qkv": "column/3", "out": "row", "drop": "random"}
        return {**plan, "head": "whole"}


def one_word_more(*, vocab_size, **options):
    """A transformer whose vocabulary has no equal parts."""
    return Transformer(vocab_size=vocab_size + 1, **options)
