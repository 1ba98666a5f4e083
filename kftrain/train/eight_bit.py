"""AdamW whose moments take a byte for each number: a code, and a scale for each block of numbers.

Dettmers et al. 2022, arXiv:2110.02861. A process quantizes its own part of each parameter, so blocks differ between
layouts; checkpoints hold moments in fp32, which fit any of them. Moments that have not changed keep their codes when
they are quantized again, so neither a skipped step nor a resume in the same layout changes one.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from kftrain.parallel.sharded import local, spread_like
from kftrain.train.optimizer_kinds import AdamW, Group

BLOCK_SIZE = 256
"""Numbers of a process's part that share a scale."""

MIN_SIZE = 4096
"""Least size of a parameter whose moments are quantized: those of norms and biases are few, and stay in fp32."""

SIGNED = {"exp_avg": True, "exp_avg_sq": False}
"""Name of a moment -> whether its numbers have signs."""

NUM_EXPONENTS = 7


@functools.cache
def make_levels(signed: bool, device: torch.device) -> torch.Tensor:
    """Return the 256 numbers that codes stand for, fp32, growing, up to 1: dynamic trees, section 1.3 of the paper.

    Each power of ten has twice as many levels as the one below. They are centres of equal parts of it.
    """
    levels = [0.0, 1.0]
    for exponent in range(NUM_EXPONENTS):
        borders = torch.linspace(0.1, 1.0, 2 ** (exponent + (0 if signed else 1)) + 1)
        centres = ((borders[:-1] + borders[1:]) / 2 * 10.0 ** (exponent + 1 - NUM_EXPONENTS)).tolist()
        levels += centres + [-centre for centre in centres if signed]
    return torch.tensor(sorted(levels), device=device)


@dataclass(frozen=True)
class Blocks:
    """Numbers of one tensor, quantized block by block; the last block may be filled up with zeros."""

    codes: torch.Tensor
    """Number of each one's level, `[blocks, BLOCK_SIZE]` uint8."""
    scales: torch.Tensor
    """The number of each block that is largest in size, `[blocks, 1]` fp32: with its sign, so that it is exact."""
    shape: torch.Size
    signed: bool

    @classmethod
    def quantize(cls, values: torch.Tensor, signed: bool) -> Blocks:
        """Take the nearest level of each number, after its block is divided by the largest one."""
        flat = torch.nn.functional.pad(values.reshape(-1), (0, -values.numel() % BLOCK_SIZE)).view(-1, BLOCK_SIZE)
        scales = flat.gather(1, flat.abs().argmax(1, keepdim=True))
        relative = torch.where(scales == 0, 0.0, flat / scales)
        levels = make_levels(signed, values.device)
        codes = torch.bucketize(relative, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8)
        return cls(codes, scales, values.shape, signed)

    def dequantize(self) -> torch.Tensor:
        """Return the numbers, fp32."""
        levels = make_levels(self.signed, self.codes.device)
        return (levels[self.codes.int()] * self.scales).view(-1)[: self.shape.numel()].view(self.shape)


class AdamW8bit(AdamW):
    """AdamW that keeps moments of large parameters as `Blocks`, and computes with them in fp32, one after the other."""

    def __init__(self, groups: list[Group], learning_rate: float, betas: tuple[float, float], epsilon: float) -> None:
        self._blocks: dict[torch.Tensor, dict[str, Blocks]] = {}
        """Moments of a parameter, by name, beside torch's own state, which holds what is not quantized."""
        super().__init__(groups, learning_rate, betas, epsilon)

    def make_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Start with a count of 0 and two moments of 0, which a large parameter has as blocks."""
        state = super().make_state(parameter)
        return self._quantize(parameter, state) if parameter.numel() >= MIN_SIZE else state

    def update(self, group: Group, parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        """Update the small parameters by one kernel, and each large one by one of its own."""
        small = [pair for pair in zip(parameters, gradients, strict=True) if pair[0] not in self._blocks]
        if small:
            super().update(group, [parameter for parameter, _ in small], [gradient for _, gradient in small])
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter in self._blocks:  # so only one has its moments in fp32 at a time
                self._dequantize(parameter)
                super().update(group, [parameter], [gradient])
                self.state[parameter] = self._quantize(parameter, self.state[parameter])

    def state_dict(self) -> dict[str, Any]:
        """Return the state with all moments in fp32, as checkpoints hold it; see `torch.optim.Optimizer`."""
        for parameter in self._blocks:
            self._dequantize(parameter)
        state: dict[str, Any] = super().state_dict()
        self._quantize_all()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of a `state_dict`."""
        super().load_state_dict(state_dict)
        self._quantize_all()

    def _quantize_all(self) -> None:
        for parameter in self._blocks:
            self.state[parameter] = self._quantize(parameter, self.state[parameter])

    # Both make a new dict: a checkpoint that is being made refers to the one with all moments.
    def _dequantize(self, parameter: torch.Tensor) -> None:
        blocks = self._blocks[parameter].items()
        moments = {name: spread_like(parameter, moment.dequantize()) for name, moment in blocks}
        self.state[parameter] = {**self.state[parameter], **moments}

    def _quantize(self, parameter: torch.Tensor, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Make blocks of the moments in a parameter's state; return the rest of the state."""
        self._blocks[parameter] = {name: Blocks.quantize(local(state[name]), signed) for name, signed in SIGNED.items()}
        return {name: value for name, value in state.items() if name not in SIGNED}
