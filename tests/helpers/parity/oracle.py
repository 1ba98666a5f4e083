"""What a row of the table of parity must come to: a bare loop of torch on one process, without a line of kftrain.

A network of its own that is given copies of the first weights, an optimizer of `torch.optim`, a clip, a schedule, and
batches that are slices of a fixed array. A `Case` is what is computed, for both sides: the parts of the loop, and the
configuration that asks kftrain for the same.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name that everybody uses
from torch import nn

from kftrain.models.transformer import Transformer

STEPS = 20
NUM_ROWS, ROW_TOKENS, PADDING, VOCABULARY = 29, 9, 257, 320

BASE = """
run: {name: parity, seed: 3}
task: {kind: language_modeling, sequence_length: 8, tokenizer: bytes}
model: {kind: transformer, dim: 16, num_layers: 2, num_heads: 4, num_kv_heads: 2, ffn_dim: 24}
optimizer: {learning_rate: 0.02, warmup_steps: 4, weight_decay: 0.3, beta1: 0.8, beta2: 0.9, epsilon: 1.0e-3,
  final_learning_rate_fraction: 0.2}
train: {steps: 20, global_batch_size: 6, log_interval_steps: 1, gradient_clip_norm: 2.0}
evaluate: {interval_steps: 0}
checkpoint: {asynchronous: false}
"""
"""What kftrain is told in every row; a case and a layout say more."""


# -- data ------------------------------------------------------------------------------------------------------------


@functools.cache
def text_rows():
    """`tokens` `[29, 9]`: some rows end in padding, so that they count differently."""
    generator = np.random.default_rng(7)
    tokens = generator.integers(97, 123, (NUM_ROWS, ROW_TOKENS)).astype(np.uint16)
    for row in range(0, NUM_ROWS, 3):
        tokens[row, 3 + row % 5 :] = PADDING
    return {"tokens": tokens}


def text_loss(network, rows):
    """Sum of the losses of the targets that are not padding."""
    tokens = torch.from_numpy(rows["tokens"].astype(np.int64))
    logits, targets = network(tokens[:, :-1]).float(), tokens[:, 1:]
    terms = -torch.log_softmax(logits, -1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return (terms * (targets != PADDING)).sum()


def text_terms(rows):
    return int((rows["tokens"][:, 1:] != PADDING).sum())


# -- networks ----------------------------------------------------------------------------------------------------------


class Llama(nn.Module):
    """The network of `BASE`, written again; its parameters have the names of Llama's."""

    def __init__(self, dim=16, layers=2, heads=4, kv_heads=2, ffn_dim=24, vocabulary=VOCABULARY, tied=False):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(vocabulary, dim)
        self.model.layers = nn.ModuleList(LlamaLayer(dim, heads, kv_heads, ffn_dim) for _ in range(layers))
        self.model.norm = nn.RMSNorm(dim, eps=1e-5)
        if not tied:
            self.lm_head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x)
        head = self.lm_head if hasattr(self, "lm_head") else self.model.embed_tokens
        return self.model.norm(x) @ head.weight.T


class LlamaLayer(nn.Module):
    def __init__(self, dim, heads, kv_heads, ffn_dim):
        super().__init__()
        self.heads = heads
        self.kv_heads = kv_heads
        self.input_layernorm = nn.RMSNorm(dim, eps=1e-5)
        self.post_attention_layernorm = nn.RMSNorm(dim, eps=1e-5)
        self.self_attn = nn.Module()
        self.mlp = nn.Module()
        for name, width in (("q", dim), ("k", dim // heads * kv_heads), ("v", dim // heads * kv_heads), ("o", dim)):
            self.self_attn.add_module(f"{name}_proj", nn.Linear(dim, width, bias=False))
        for name, sizes in (("gate", (dim, ffn_dim)), ("up", (dim, ffn_dim)), ("down", (ffn_dim, dim))):
            self.mlp.add_module(f"{name}_proj", nn.Linear(*sizes, bias=False))

    def forward(self, x):
        x = x + self.attend(self.input_layernorm(x))
        inner = self.post_attention_layernorm(x)
        return x + self.mlp.down_proj(F.silu(self.mlp.gate_proj(inner)) * self.mlp.up_proj(inner))

    def attend(self, x):
        rows, length, dim = x.shape
        each = dim // self.heads
        part = self.self_attn
        query = rotated(part.q_proj(x).view(rows, length, self.heads, each))
        key, value = (
            projected.view(rows, length, self.kv_heads, each).repeat_interleave(self.heads // self.kv_heads, 2)
            for projected in (part.k_proj(x), part.v_proj(x))
        )
        scores = torch.einsum("bihe,bjhe->bhij", query, rotated(key)) / math.sqrt(each)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        shares = torch.softmax(scores.masked_fill(later, -math.inf).float(), -1).to(x.dtype)
        return part.o_proj(torch.einsum("bhij,bjhe->bihe", shares, value).reshape(rows, length, dim))


def rotated(x):
    """Element i of a head and element i + E/2 are a complex number, which is turned by the position."""
    length, each = x.shape[1], x.shape[3]
    angles = torch.outer(torch.arange(length), 10_000.0 ** (-torch.arange(0, each, 2) / each)).float()
    turn = torch.polar(torch.ones_like(angles), angles)[:, None, :]
    turned = torch.complex(*x.float().chunk(2, -1)) * turn
    return torch.cat([turned.real, turned.imag], -1).to(x.dtype)


def tied_llama():
    return Llama(tied=True)


def odd_llama():
    """Its feed-forward part has no four equal parts."""
    return Llama(ffn_dim=30)


def one_word_more(tied=False):
    """Its vocabulary has no equal parts: that of `helpers.models.tensor:one_word_more`."""
    return Llama(vocabulary=VOCABULARY + 1, tied=tied)


def tied_one_word_more():
    return one_word_more(tied=True)


def same_llama():
    """kftrain's own: in bf16 every rounding counts, and another order of operations is another curve."""
    return Transformer(vocab_size=VOCABULARY, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=24)


# -- optimizers and schedules ------------------------------------------------------------------------------------------


def adamw(network):
    """As `BASE` sets it; biases and norms do not decay."""
    parameters = [each for each in network.parameters() if each.requires_grad]
    groups = [
        {"params": [each for each in parameters if each.dim() > 1], "weight_decay": 0.3},
        {"params": [each for each in parameters if each.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1.0, betas=(0.8, 0.9), eps=1e-3, foreach=False)


def warmup_cosine(step):
    """Linear over four steps to 0.02, then a half cosine to a fifth of it at the last step."""
    if step < 4:
        return 0.02 * (step + 1) / 4
    return 0.02 * (0.2 + 0.8 * (1 + math.cos(math.pi * (step - 4) / (STEPS - 5))) / 2)


# -- the loop ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """What is computed, whatever the layout. All functions stand at the top of a module."""

    name: str = "llama"
    overrides: tuple[str, ...] = ()
    """Of the configuration, beside `base`: they must ask for what the rest says."""
    network: Callable[[], nn.Module] = Llama
    """Its state dict has the names of kftrain's model."""
    data: Callable[[], dict[str, np.ndarray]] = text_rows
    """Field -> all rows; step s takes `batch` rows from s * batch on, from the first again after the last."""
    loss: Callable[[nn.Module, dict[str, np.ndarray]], torch.Tensor] = text_loss
    """Sum of the loss terms of some rows."""
    terms: Callable[[dict[str, np.ndarray]], int] = text_terms
    """Their number."""
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    rate: Callable[[int], float] = warmup_cosine
    batch: int = 6
    batches: tuple[int, ...] = ()
    """Rows of each step, where they are not `batch`."""
    clip: float = 2.0
    base: str = BASE
    """What kftrain is told."""
    bf16: bool = False
    """Weights are rounded for forward and backward pass; each part's gradients are summed in fp32."""
    sums_in_bf16: bool = False
    """Their sums are rounded, too."""
    loop: Callable[..., "Curve"] | None = None
    """Stands in for `run` where the loop is another one; it takes the same."""
    loop_follows: bool = False
    """The loop takes a `path`, too."""

    @property
    def is_followed(self):
        """Whether each step is computed from the weights that the other side has come to.

        With numbers of 16 bits a weight that is off by 1e-8 is rounded to another one sooner or later, on some
        processors sooner, and the curves part; with deep networks of experts in fp32 they part by 1e-5, too.
        """
        return self.loop_follows or (self.bf16 and self.loop is None)


@dataclass(frozen=True)
class Path:
    """The weights before each step of the other side. A loop goes on from them, if they are near to its own."""

    weights: list[dict[str, np.ndarray]] = field(default_factory=list)
    tolerance: float = 0.0
    """Absolute."""

    def enter(self, network, step):
        """Gives a network the weights of before a step; where nothing is followed it keeps those that it has."""
        for name, value in network.state_dict().items() if self.weights else ():
            theirs = self.weights[step][name]
            np.testing.assert_allclose(
                theirs, value.numpy(), rtol=0, atol=self.tolerance, err_msg=f"{name} before step {step}"
            )
            value.copy_(torch.from_numpy(theirs))


@dataclass(frozen=True)
class Curve:
    """What came of it."""

    losses: list[float]
    norms: list[float]
    rates: list[float]
    weights: dict[str, torch.Tensor]
    """Parameters and buffers at the end."""


def run(case, first_weights, parts=None, parts_of_stacks=None, path=None):
    """The curve of a case. `parts`: places in each batch that are computed at a time; None: all at once.

    `parts_of_stacks`: the same for the gradients of three-dimensional parameters, where those are others.
    `path`: weights from which each step is computed.
    """
    path = path or Path()
    if case.loop:
        return case.loop(case, first_weights, parts, *([path] if case.loop_follows else []))
    network = case.network()
    network.load_state_dict({name: torch.tensor(value) for name, value in first_weights.items()})
    network.train()
    optimizer, data = case.optimizer(network), case.data()
    num_rows, losses, norms, rates = len(next(iter(data.values()))), [], [], []
    for step in range(STEPS):
        size = case.batches[step] if case.batches else case.batch
        places = (np.arange(size) + (sum(case.batches[:step]) if case.batches else step * size)) % num_rows
        batch = {name: rows[places] for name, rows in data.items()}
        total, num_terms = 0.0, case.terms(batch)
        path.enter(network, step)
        for part in parts or [list(range(size))]:
            rows = {name: rows[list(part)] for name, rows in batch.items()}
            total += backward(case, network, rows, num_terms, (1, 2) if parts_of_stacks else (1, 2, 3, 4))
        for part in parts_of_stacks or []:
            backward(case, network, {name: rows[list(part)] for name, rows in batch.items()}, num_terms, (3,))
        found = [each.grad for each in network.parameters() if each.grad is not None]
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in found))
        if case.clip:
            for gradient in found:
                gradient *= min(1.0, case.clip / (norm + 1e-6))
        for group in optimizer.param_groups:
            group["lr"] = case.rate(step) * group.get("factor", 1.0)
        optimizer.step()
        if hasattr(network, "after_step"):
            network.after_step()
        optimizer.zero_grad()
        losses.append(total)
        norms.append(norm)
        rates.append(case.rate(step))
    return Curve(losses, norms, rates, {name: value.detach() for name, value in network.state_dict().items()})


def backward(case, network, rows, num_terms, dims=(1, 2, 3, 4)):
    """Adds the gradients of some rows, of parameters with so many dims in bf16; their part of the mean loss."""
    if not case.bf16:
        loss = case.loss(network, rows) / num_terms
        loss.backward()
        return float(loss.detach())
    rounded = {name: each.detach().bfloat16().requires_grad_() for name, each in network.named_parameters()}
    loss = case.loss(lambda *inputs: torch.func.functional_call(network, rounded, inputs), rows) / num_terms
    for parameter, found in zip(network.parameters(), torch.autograd.grad(loss, list(rounded.values())), strict=True):
        if found.dim() not in dims:
            continue
        total = found.float() if parameter.grad is None else parameter.grad + found.float()
        parameter.grad = total.bfloat16().float() if case.sums_in_bf16 else total
    return float(loss.detach())
