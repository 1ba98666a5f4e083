"""A language model of one's own with all that is hard for stages: tied ends, dropout, experts whose biases move."""

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everybody uses
from torch import nn

from kftrain.models.base import ModelPiece

EXPERTS = 4


class StagedExperts(nn.Module):
    """Blocks of unequal cost between two ends that share a matrix."""

    buffer_reductions = {"chosen": "sum"}  # noqa: RUF012 - as the protocol has it

    def __init__(self, vocab_size, sequence_length, document_token, dim=16, widths=(16, 64, 32)):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(Block(dim, width) for width in widths)
        self.norm = nn.LayerNorm(dim)
        self.register_buffer("chosen", torch.zeros(len(widths), EXPERTS, dtype=torch.int64), persistent=False)
        self.row_weights = None

    def blocks(self):
        return list(self.layers)

    def expert_plan(self):
        return ["layers.*.experts"]

    def take_row_weights(self, weights):
        self.row_weights = weights

    def stages(self):
        blocks = [
            ModelPiece(lambda hidden, _, number=number, block=block: self.run(number, block, hidden), [block])
            for number, block in enumerate(self.layers)
        ]
        first = ModelPiece(lambda _, inputs: F.dropout(self.embed(*inputs), 0.1, self.training), [self.embed])
        last = ModelPiece(lambda hidden, _: F.linear(self.norm(hidden), self.embed.weight), [self.norm, self.embed])
        return [first, *blocks, last]

    def run(self, number, block, hidden):
        hidden, chosen = block(hidden)
        if self.training:
            self.chosen[number] += (chosen * (self.row_weights > 0)[:, None]).sum(0)
        return hidden

    def forward(self, tokens):
        value = None
        for piece in self.stages():
            value = piece.call(value, (tokens,))
        self.row_weights = None
        return value

    def after_step(self):
        for block, chosen in zip(self.layers, self.chosen.double(), strict=True):
            block.bias += 0.01 * torch.sign(chosen.mean() - chosen)
        self.chosen.zero_()


class Block(nn.Module):
    """A mean of what came before, and one expert for each token."""

    def __init__(self, dim, width):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mix = nn.Linear(dim, dim)
        self.router = nn.Linear(dim, EXPERTS)
        self.experts = Experts(dim, width)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("bias", torch.zeros(EXPERTS))

    def forward(self, hidden):
        counts = torch.arange(1, hidden.shape[1] + 1, device=hidden.device).unsqueeze(-1)
        hidden = hidden + self.mix(self.norm(hidden).cumsum(1) / counts)
        scores = self.router(hidden).softmax(-1)
        choices = (scores + self.bias).argmax(-1)
        order, numbers = choices.flatten().argsort(stable=True), choices.flatten().bincount(minlength=EXPERTS)
        computed = self.experts(hidden.flatten(0, 1)[order], numbers)
        results = torch.zeros_like(computed).index_copy(0, order, computed).view_as(hidden)
        output = hidden + self.dropout(results * scores.gather(-1, choices.unsqueeze(-1)))
        return output, F.one_hot(choices, EXPERTS).sum(1)


class Experts(nn.Module):
    def __init__(self, dim, width):
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, width, dim) / dim**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, dim, width) / width**0.5)

    def forward(self, rows, counts):
        ends = counts.cumsum(0, dtype=torch.int32)
        inner = torch.tanh(F.grouped_mm(rows, self.up.transpose(1, 2), offs=ends))
        return F.grouped_mm(inner, self.down.transpose(1, 2), offs=ends)
