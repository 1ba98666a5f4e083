"""A language model of one matrix: what a script of somebody's own trains, and `model.kind` names for the evaluation."""

from torch import nn


class Bigram(nn.Module):
    def __init__(self, vocab_size, sequence_length=0, document_token=0, dim=16):
        super().__init__()
        self.table = nn.Embedding(vocab_size, dim)
        self.output = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, tokens):
        return self.output(self.table(tokens))
