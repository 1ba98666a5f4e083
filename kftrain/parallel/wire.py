"""Bytes that one process sends in a step, axis by axis: closed formulas, without torch.

Of W processes each sends (W - 1) / W of a vector to gather its parts or to sum them in parts, and twice that to have
the whole sum everywhere. What is sharded over S processes and copied over R of them (fsdp: Rajbhandari et al. 2020,
arXiv:1910.02054, section 7), with P bytes of parameters as they are computed with, G bytes of gradients as they are
summed and k micro batches:

    ddp                              2 (R - 1) / R G
    zero1                            (S - 1) / S (P + G)            + 2 (R - 1) / R G / S
    zero2                            (S - 1) / S (P + k G)          + 2 (R - 1) / R G / S
    fsdp                             (S - 1) / S (2 k P + G)        + 2 (R - 1) / R G / S
    fsdp, exchange: micro_batch      (S - 1) / S (2 k P + k G)      + 2 (R - 1) / R G / S

A process of T along `tensor` has 1 / T of P and G; each block sends activations there, four sums of A bytes for each
micro batch, two forward and two backward: 4 x 2 (T - 1) / T k A a block.
"""

from __future__ import annotations

from dataclasses import dataclass

from kftrain.parallel.shape import Shape
from kftrain.parallel.strategies import Exchange, Strategy, sharding_of

SUMS_OF_A_BLOCK = 4
"""Of its activations, along `tensor`: two in the forward pass, two in the backward pass."""


@dataclass(frozen=True)
class Step:
    """What a step moves."""

    parameter_bytes: float
    """Of the whole model, in the format of the computation."""
    gradient_bytes: float
    """The same in the format of the reduction."""
    num_micro_batches: int = 1
    activation_bytes: float = 0.0
    """Of one process's micro batch, between two blocks."""
    num_blocks: int = 0


def bytes_sent(shape: Shape, strategy: Strategy, exchange: Exchange, step: Step) -> dict[str, float]:
    """Axis -> bytes that a process sends along it in a step; axes of one process are left out."""
    parts = shape.shard * shape.tensor
    found = {
        "shard": _part(shape.shard) * _gathered(strategy, exchange, step) / shape.tensor,
        "replicate": 2 * _part(shape.replicate) * step.gradient_bytes / parts,
        "tensor": 2 * _part(shape.tensor) * _activations(step),
    }
    return {axis: amount for axis, amount in found.items() if getattr(shape, axis) > 1}


def _gathered(strategy: Strategy, exchange: Exchange, step: Step) -> float:
    """Bytes of the whole vectors that are gathered, and summed in parts."""
    sharding = sharding_of(strategy, exchange)
    num_gathers = 1 if sharding.keep_gathered else 2 * step.num_micro_batches
    num_exchanges = step.num_micro_batches if sharding.exchange == "micro_batch" else 1
    return num_gathers * step.parameter_bytes + num_exchanges * step.gradient_bytes


def _activations(step: Step) -> float:
    return SUMS_OF_A_BLOCK * step.num_blocks * step.num_micro_batches * step.activation_bytes


def _part(size: int) -> float:
    """Of a vector that each of so many processes has a part of, what is not its own."""
    return (size - 1) / size
