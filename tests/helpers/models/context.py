"""Models of one's own whose sequences are cut, some of them wrongly."""

import torch
from torch import nn

from kftrain.models import ModelOutput


class Attend(nn.Module):
    """Causal attention as a user writes it."""

    def forward(self, query, key, value):
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)


class Own(nn.Module):
    """Learned positions, one matrix for query, key and value, biases everywhere."""

    def __init__(self, vocab_size, sequence_length, document_token, dim=16, num_heads=4, flaw=""):
        super().__init__()
        self.num_heads = num_heads
        self.flaw = flaw
        self.embed = nn.Embedding(vocab_size, dim)
        self.places = nn.Embedding(sequence_length, dim)
        self.norm = nn.LayerNorm(dim)
        self.to_qkv = nn.Linear(dim, 3 * dim)
        self.attend = Attend()
        self.drop = nn.Dropout(0.1 if flaw == "dropout" else 0.0)
        self.out = nn.Linear(dim, dim)
        self.head = nn.Linear(dim, vocab_size)

    def context_plan(self):
        plan = {"embed": "cut", "places": "cut/0", "attend": "attention"}
        if self.flaw == "a list":
            return list(plan)
        if self.flaw == "positions of a part":
            del plan["places"]
        return {
            **plan,
            **{"unknown name": {"attention": "cut"}, "unknown kind": {"norm": "sequence"}}.get(self.flaw, {}),
        }

    def forward(self, tokens):
        hidden = self.embed(tokens)
        length = hidden.shape[1] if self.flaw == "positions of a part" else tokens.shape[1]
        hidden = hidden + self.places(torch.arange(length))
        if self.flaw == "mean over places":
            hidden = hidden + hidden.mean(1, keepdim=True)
        heads = self.to_qkv(self.norm(hidden)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = self.attend(*heads) if self.flaw != "attention elsewhere" else Attend()(*heads)
        logits = self.head(self.drop(hidden + self.out(attended.transpose(1, 2).flatten(2))))
        return ModelOutput(logits, logits.square().mean((1, 2))) if self.flaw == "auxiliary loss" else logits


class Planless(Own):
    context_plan = None
