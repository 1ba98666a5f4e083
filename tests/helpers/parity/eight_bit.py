"""AdamW with quantized moments by hand, with torchao's own codes, for the table of parity."""

import functools

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everybody uses
from helpers.parity.defects import patched
from helpers.parity.optimizers import BETAS, EPSILON, by_dims
from helpers.parity.oracle import Case, Llama
from torchao.optim import quant_utils

from kftrain.train.eight_bit import Blocks

LEAST, BLOCK = 4096, 256


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
    """The formula of AdamW; the moments of parameters of 4,096 numbers are quantized after each step."""

    def __init__(self, network):
        super().__init__(by_dims(network, 0.3), {"lr": 1.0})
        self.num_steps = 0
        self.moments = {}

    @torch.no_grad()
    def step(self):
        self.num_steps += 1
        for group in self.param_groups:
            for each in group["params"]:
                first, second = (kept.values() for kept in self.moments.get(each, (Zero(each), Zero(each))))
                first = BETAS[0] * first + (1 - BETAS[0]) * each.grad
                second = BETAS[1] * second + (1 - BETAS[1]) * each.grad**2
                scale = (second / (1 - BETAS[1] ** self.num_steps)).sqrt() + EPSILON
                each *= 1 - group["lr"] * group["weight_decay"]
                each -= group["lr"] * first / (1 - BETAS[0] ** self.num_steps) / scale
                is_large = each.numel() >= LEAST
                self.moments[each] = (
                    (Kept(first, True), Kept(second, False)) if is_large else (Plain(first), Plain(second))
                )


class Plain:
    def __init__(self, values):
        self._values = values

    def values(self):
        return self._values


class Zero(Plain):
    def __init__(self, like):
        super().__init__(torch.zeros_like(like))


LARGER = ("model.dim=64", "model.ffn_dim=96")
LARGER_LLAMA = functools.partial(Llama, dim=64, ffn_dim=96)

CASE = Case("8 bit", ("optimizer.state=8bit", *LARGER), LARGER_LLAMA, optimizer=EightBit)
IN_FP32 = Case("larger", LARGER, LARGER_LLAMA)


def quantized_by_size(values, signed, quantize=Blocks.quantize):
    return quantize(values, True)


def moments_of_other_levels():
    """Second moments are quantized with levels for numbers with signs, of which there are half as many."""
    return patched(Blocks, "quantize", staticmethod(quantized_by_size))
