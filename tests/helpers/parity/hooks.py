# mypy: disable-error-code="attr-defined"
"""Networks whose constructors say something about their parameters, in plain torch: for both sides of the table."""

from dataclasses import replace

import torch
from helpers.parity.models import FEATURES, Plain, case_of
from helpers.parity.oracle import Case, Llama
from torch import nn

from kftrain.models.transformer import Transformer


def first_rows_only(gradient):
    mask = torch.zeros_like(gradient)
    mask[: len(gradient) // 2] = 1.0
    return gradient * mask


def centre(gradient):
    gradient.sub_(gradient.mean())


class Hooked(Plain):
    """Hooks from before and after a parameter gets its place: rows that are frozen, gradients that are limited."""

    def __init__(self):
        super().__init__()
        early = nn.Parameter(self.enter.weight.detach().clone())
        early.register_hook(first_rows_only)
        self.enter.weight = early
        self.layers[0].weight.register_hook(first_rows_only)
        self.layers[0].weight.register_hook(centre)
        self.layers[1].bias.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))


def limit(parameter):
    parameter.grad.clamp_(-0.1, 0.1)


class Clamped(Plain):
    """Limits a gradient once it is there."""

    def __init__(self):
        super().__init__()
        self.leave.weight.register_post_accumulate_grad_hook(limit)


class Gained(Plain):
    """Its forward reads attributes of its parameters."""

    def __init__(self):
        super().__init__()
        self.enter.weight.gain = 1.5
        self.layers[1].bias.gain = 3.0

    def forward(self, x):
        x = super().forward(x) * self.enter.weight.gain
        return x + self.layers[1].bias.gain


class Scaled(nn.Parameter):
    """A type of one's own, with a constructor of its own."""

    def __new__(cls, size):
        return super().__new__(cls, torch.full((size,), 0.5))

    def times(self, x):
        return self * x


class Typed(Plain):
    def __init__(self):
        super().__init__()
        self.scale = Scaled(FEATURES)

    def forward(self, x):
        return super().forward(self.scale.times(x))


class Freezes(Plain):
    """From the sixth to the twelfth step one block, and one matrix of the rest, do not train."""

    first = 6
    last = 12

    def __init__(self):
        super().__init__()
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.num_steps += self.training
        if int(self.num_steps) in (self.first, self.last):
            for part in (self.layers[0], self.enter):
                part.requires_grad_(int(self.num_steps) == self.last)
        return super().forward(x)


class FreezesAtOnce(Freezes):
    first = 1
    last = 0


class Thaws(Freezes):
    """A block, or another module, is frozen at first."""

    first = 0
    last = 0

    def __init__(self, part="layers.0"):
        super().__init__()
        self.part = part
        self.get_submodule(part).requires_grad_(False)

    def forward(self, x):
        if int(self.num_steps) == 4:
            self.get_submodule(self.part).requires_grad_(True)
        return super().forward(x)


class ThawsInStep(Freezes):
    """Between two steps."""

    first = 0
    last = 0

    def __init__(self):
        super().__init__()
        self.leave.bias.requires_grad_(False)

    def after_step(self):
        self.leave.bias.requires_grad_(True)


class ThawsTransformer(Transformer):
    def __init__(self, **options):
        super().__init__(**options)
        self.model.norm.requires_grad_(False)

    def forward(self, tokens):
        if self.training:
            self.model.norm.requires_grad_(True)
        return super().forward(tokens)


class Lonely(Plain):
    """With a parameter of a single number."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return super().forward(x) * self.scale


class Replaces(Plain):
    """A parameter by another one, from the third step on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.int64))

    def after_step(self):
        self.num_steps += 1
        if self.num_steps > 2:
            self.leave.bias = nn.Parameter(self.leave.bias + 1)


class HooksInForward(Plain):
    """A hook that comes once the training has begun."""

    def __init__(self, part="enter"):
        super().__init__()
        self.part = part

    def forward(self, x):
        if self.training:
            self.get_submodule(self.part).weight.register_hook(first_rows_only)
        return super().forward(x)


class HooksInStep(Plain):
    def after_step(self):
        self.leave.weight.register_hook(first_rows_only)


class LimitsInStep(Plain):
    def after_step(self):
        self.leave.weight.register_post_accumulate_grad_hook(limit)


class HooksInForwardTransformer(Transformer):
    def forward(self, tokens):
        self.model.norm.weight.register_hook(first_rows_only)
        return super().forward(tokens)


class Recurrent(Plain):
    """Keeps lists of its parameters, as torch's recurrent nets do."""

    def __init__(self):
        super().__init__()
        self.recurrent = nn.LSTM(FEATURES, FEATURES)

    def forward(self, x):
        x = x.to(self.enter.weight.dtype)
        return super().forward(x + self.recurrent(x.unsqueeze(0))[0].squeeze(0))


class Strided(Plain):
    """Parameters in another order of memory."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(2, FEATURES, (1, 3)).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.linspace(-1, 1, FEATURES * 4).view(4, FEATURES).T)

    def forward(self, x):
        seen = self.convolution(x.view(-1, 2, 1, 3)).flatten(1)
        return super().forward(x + seen + (x @ self.turned).sum(-1, keepdim=True))


class Sparse(Plain):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(2, 1, sparse=True)

    def forward(self, x):
        return super().forward(x) + self.table((x[:, 0] > 0).long()).squeeze(-1)


class HookedLlama(Llama):
    """The oracle of `HookedTransformer`."""

    def __init__(self):
        super().__init__()
        hook(self)


class HookedTransformer(Transformer):
    """With attributes, and hooks on matrices that are split by rows, by columns and not at all."""

    def __init__(self, **options):
        super().__init__(**options)
        hook(self)
        self.lm_head.weight.gain = 0.5

    def forward(self, tokens):
        assert self.lm_head.weight.gain == 0.5
        return super().forward(tokens)


def hook(model):
    layer = model.model.layers[0]
    parts = (model.model.embed_tokens, layer.self_attn.q_proj, layer.self_attn.o_proj, layer.input_layernorm)
    for part in parts:
        part.weight.register_hook(first_rows_only)
    layer.mlp.gate_proj.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


HOOKED, CLAMPED, GAINED, TYPED = (case_of(each) for each in (Hooked, Clamped, Gained, Typed))
FREEZES, AT_ONCE, THAWS, IN_STEP = (case_of(each) for each in (Freezes, FreezesAtOnce, Thaws, ThawsInStep))
LONELY, REPLACES, SPARSE = (case_of(each) for each in (Lonely, Replaces, Sparse))
IN_FORWARD, HOOKS_IN_STEP, LIMITS_IN_STEP = (case_of(each) for each in (HooksInForward, HooksInStep, LimitsInStep))
STRIDED, RECURRENT = case_of(Strided), case_of(Recurrent)
RECURRENT_BF16 = replace(RECURRENT, overrides=(*RECURRENT.overrides, "precision.compute=bf16"), bf16=True)
IN_FORWARD_TEXT = Case("late hooks", ("model.kind=helpers.parity.hooks:HooksInForwardTransformer",))
THAWS_TEXT = Case("thaws", ("model.kind=helpers.parity.hooks:ThawsTransformer",))
HOOKED_TEXT = Case("hooks", ("model.kind=helpers.parity.hooks:HookedTransformer", "run.seed=4"), HookedLlama)
