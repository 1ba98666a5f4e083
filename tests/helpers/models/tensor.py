"""Models that say themselves how their matrices are split, some of them wrongly."""

import hashlib

import torch
from helpers.parity.oracle import BASE, VOCABULARY, Case, text_rows
from torch import nn

from kftrain.models import ModelOutput
from kftrain.models.transformer import Transformer


def seven_tokens():
    """Rows of `helpers.parity.oracle`, without the last token."""
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


class Dropping(nn.Module):
    """Drops within its split parts, and between them."""

    def __init__(self, vocab_size=VOCABULARY, sequence_length=8, document_token=0, dim=16):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(self.layer(dim) for _ in range(2))
        self.head = nn.Linear(dim, vocab_size)

    def layer(self, dim):
        return nn.ModuleDict({"up": nn.Linear(dim, 12), "down": nn.Linear(12, dim), "drop": nn.Dropout(0.25)})

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + layer["drop"](layer["down"](self.within(torch.tanh(layer["up"](hidden)))))
        return self.head(hidden)

    def within(self, part):
        return nn.functional.dropout(part, 0.5, self.training)

    def tensor_plan(self):
        kinds = {"*.up": "column", "*.down": "row", "*.drop": "random"}
        return {"embed": "vocabulary", **kinds, "head": "whole"}


class DroppingTwoParts(Dropping):
    """On one process: what two draw, each with a generator of its own for its half."""

    num_steps = 0

    def forward(self, tokens):
        torch.manual_seed(self.seed(f"3/{self.num_steps}/0".encode()))
        self.num_steps += 1
        return super().forward(tokens)

    def within(self, part):
        state, masks = torch.get_rng_state(), []
        for rank in range(2):
            torch.manual_seed(self.seed(bytes(state.numpy()) + str(rank).encode()))
            masks.append(nn.functional.dropout(torch.ones_like(part[..., :6]), 0.5))
        torch.set_rng_state(state)
        torch.rand(())
        assert not torch.equal(*masks)
        return part * torch.cat(masks, -1)

    def seed(self, text):
        return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1


def one_word_more(*, vocab_size, **options):
    """A transformer whose vocabulary has no equal parts."""
    return Transformer(vocab_size=vocab_size + 1, **options)


class Flawed(nn.Module):
    """A user's own of two blocks, right under its plan but for the flaw that it is asked for."""

    def __init__(self, vocab_size, sequence_length, document_token, flaw="", dim=16, num_experts=3):
        super().__init__()
        self.flaw = flaw
        self.embed = nn.Embedding(vocab_size, dim)
        self.place = nn.Parameter(torch.randn(sequence_length, dim) * 0.1)
        self.layers = nn.ModuleList(FlawedBlock(dim, flaw) for _ in range(2))
        self.drop = nn.Dropout(0.25 if flaw == "mask of a part" else 0.0)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size)
        self.router = nn.Linear(dim, num_experts)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        if self.flaw == "places of a part":
            hidden = hidden + self.place[: hidden.shape[1]]
        for layer in self.layers:
            hidden = layer(hidden)
        hidden = self.drop(hidden)
        if self.flaw == "mean over places":
            hidden = hidden - 0.1 * hidden.mean(1, keepdim=True)
        if self.flaw == "next place":
            hidden = hidden + 0.1 * hidden.roll(1, 1)
        auxiliary = None
        if self.flaw == "shares of a part":
            auxiliary = 0.01 * self.router(hidden).softmax(-1).mean(1).square().sum(-1)
        return ModelOutput(self.head(self.norm(hidden)), auxiliary)

    def tensor_plan(self):
        plan = {"embed": "vocabulary", "*.norms.*": "sequence", "norm": "sequence", "head": "logits"}
        if self.flaw == "norm behind zeros":
            plan = {"layers.*.norms.0": "sequence"} | {k: v for k, v in plan.items() if k != "*.norms.*"}
        routed = {"router": "sequence"} if self.flaw == "shares of a part" else {}
        return {**plan, **routed, "*.to_qkv": "column/3", "*.out": "row", "*.up": "column", "*.down": "row"}


class FlawedBlock(nn.Module):
    def __init__(self, dim, flaw, head_dim=4):
        super().__init__()
        self.head_dim = head_dim
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.to_qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)
        self.drop = nn.Dropout(0.25 if flaw == "masks of one tensor" else 0.0)
        self.query_norm = nn.RMSNorm(head_dim) if flaw == "norm within heads" else nn.Identity()
        self.gain = nn.Parameter(torch.ones(head_dim)) if flaw == "gain within heads" else 1.0
        for written in (self.out, self.down):
            nn.init.zeros_(written.weight)

    def forward(self, hidden):
        query, key, value = self.to_qkv(self.norms[0](hidden)).unflatten(-1, (3, -1, self.head_dim)).unbind(2)
        heads = (each.transpose(1, 2) for each in (self.query_norm(query), key, value * self.gain))
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        raised = nn.functional.gelu(self.up(self.norms[1](hidden)))
        hidden = self.drop(hidden)
        return hidden + self.down(nn.functional.dropout(raised, 0.25, self.training))


TRANSFORMER = "{kind: transformer, dim: 16, num_layers: 2, num_heads: 4, num_kv_heads: 2, ffn_dim: 24}"
DROPPING_TEXT = BASE.replace(TRANSFORMER, "{kind: 'helpers.models.tensor:Dropping'}")
DROPPING = Case("dropout in split parts", (), DroppingTwoParts, base=DROPPING_TEXT)
