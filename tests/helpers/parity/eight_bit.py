"""AdamW with quantized moments by hand, with torchao's own codes, for the table of parity."""

import functools
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everybody uses
from helpers.parity.defects import patched
from helpers.parity.optimizers import BETAS, EPSILON, by_dims
from helpers.parity.oracle import Case, Llama
from torchao.optim import quant_utils

from kftrain.train.eight_bit import Blocks

LEAST, BLOCK = 4096, 256

CUT_ALONG_COLUMNS = ("o_proj.weight", "down_proj.weight")
"""Ends of the names of the matrices that tensor parallelism cuts along their columns."""


class Kept:
    """A moment in blocks of 256, each divided by its number that is largest in size."""

    def __init__(self, values, signed):
        self.levels = torch.tensor(quant_utils.create_dynamic_map(signed))
        self.shape = values.shape
        rows = F.pad(values.flatten(), (0, -values.numel() % BLOCK)).view(-1, BLOCK)
        self.scales = rows[range(len(rows)), rows.abs().argmax(1)]
        divided = rows / torch.where(self.scales == 0, 1.0, self.scales)[:, None]
        self.codes = quant_utils.quantize_8bit_with_qmap(divided, self.levels)

    def values(self):
        rows = quant_utils.dequant_with_qmap(self.codes, self.levels, self.scales)
        return rows.flatten()[: self.shape.numel()].view(self.shape)


class EightBit(torch.optim.Optimizer):
    """The formula of AdamW; the moments of parameters of 4,096 numbers are quantized after each step.

    `parts`: from which step on each parameter is cut, along its rows, into so many parts with blocks of their own.
    `tensor`: of these parts so many are along the columns of matrices that are cut so.
    """

    def __init__(self, network, parts=((0, 1),), tensor=1):
        super().__init__(by_dims(network, 0.3), {"lr": 1.0})
        self.parts = dict(parts)
        self.num_parts = 1
        self.num_steps = 0
        self.moments = {}
        self.columns = {each: tensor for name, each in network.named_parameters() if name.endswith(CUT_ALONG_COLUMNS)}

    @torch.no_grad()
    def step(self):
        if self.num_steps in self.parts:
            self.num_parts = self.parts[self.num_steps]
            self.moments = {each: self.keep(each, *self.moments_of(each)) for each in self.moments}
        self.num_steps += 1
        for group in self.param_groups:
            for each in group["params"]:
                first, second = self.moments_of(each)
                first = BETAS[0] * first + (1 - BETAS[0]) * each.grad
                second = BETAS[1] * second + (1 - BETAS[1]) * each.grad**2
                scale = (second / (1 - BETAS[1] ** self.num_steps)).sqrt() + EPSILON
                each *= 1 - group["lr"] * group["weight_decay"]
                each -= group["lr"] * first / (1 - BETAS[0] ** self.num_steps) / scale
                self.moments[each] = self.keep(each, first, second)

    def keep(self, parameter, *moments):
        """Each moment as strips of columns, and these as parts of rows."""
        if parameter.numel() < LEAST:
            return [[[Plain(values)]] for values in moments]
        columns = self.columns.get(parameter, 1)
        return [
            [
                [Kept(part, signed) for part in strip.chunk(self.num_parts // columns)]
                for strip in values.chunk(columns, -1)
            ]
            for values, signed in zip(moments, (True, False), strict=True)
        ]

    def moments_of(self, parameter):
        if parameter not in self.moments:
            return torch.zeros_like(parameter), torch.zeros_like(parameter)
        return [
            torch.cat([torch.cat([part.values() for part in strip]) for strip in strips], -1)
            for strips in self.moments[parameter]
        ]


class Plain:
    def __init__(self, values):
        self._values = values

    def values(self):
        return self._values


LARGER = ("model.dim=64", "model.ffn_dim=96")
LARGER_LLAMA = functools.partial(Llama, dim=64, ffn_dim=96)

CASE = Case("8 bit", ("optimizer.state=8bit", *LARGER), LARGER_LLAMA, optimizer=EightBit)


def in_parts(*parts, tensor=1):
    """The case with blocks that begin anew in each of so many parts, from a step on: see `EightBit`."""
    return replace(CASE, optimizer=functools.partial(EightBit, parts=parts, tensor=tensor))


IN_FP32 = Case("larger", LARGER, LARGER_LLAMA)


def quantized_by_size(values, signed, quantize=Blocks.quantize):
    return quantize(values, True)


def moments_of_other_levels():
    """Second moments are quantized with levels for numbers with signs, of which there are half as many."""
    return patched(Blocks, "quantize", staticmethod(quantized_by_size))
