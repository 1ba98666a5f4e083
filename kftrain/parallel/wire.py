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

Along `tensor` T processes have 1 / T of each matrix that is split, and copies of the rest: P and G are what one of them
has. For each micro batch of n places they exchange f numbers a place forward, and backward again (`tensor_traffic`),
in the format of the computation, and three sums in fp32 for a cross-entropy that is split; gradients of the c copied
parameters are summed once a step, in fp32:

    tensor                           2 (T - 1) / T (k n (f bytes + 4 x 3) + 4 c / S)
"""

from __future__ import annotations

from dataclasses import dataclass

from kftrain.parallel.shape import Shape
from kftrain.parallel.strategies import Exchange, Strategy, sharding_of

SUM_BYTES = 4
"""Bytes of a number that is summed over `tensor`: of a gradient, or of a cross-entropy."""


@dataclass(frozen=True)
class AlongTensor:
    """Counts of what the processes of `tensor` exchange for a model that is split over them."""

    num_features: float
    """Numbers of a place that are exchanged both ways; what is gathered or summed into parts one way only is half."""
    num_sums: int
    """Numbers of a place that are summed, in fp32, so that all have the sum; in one way."""
    num_copied: int
    """Parameters that are trained and that each process has a copy of."""
    num_moved: float = 0.0
    """Numbers of matrices that a process sends for a micro batch."""


@dataclass(frozen=True)
class Step:
    """Sizes of a step, from which the bytes that it moves follow."""

    parameter_bytes: float
    """Bytes of all that a process of `tensor` has of the model, in the format of the computation."""
    gradient_bytes: float
    """Bytes of what is trained of it, in the format of the reduction."""
    num_micro_batches: int = 1
    split: AlongTensor | None = None
    """None where nothing is split, or not known."""
    num_places: float = 0.0
    """Places of a micro batch: rows, times the length of a sequence."""
    compute_bytes: int = 4
    """Bytes of a number in the format of the computation."""


def bytes_sent(shape: Shape, strategy: Strategy, exchange: Exchange, step: Step) -> dict[str, float]:
    """Compute the bytes that a process sends along each axis in a step; axes of one process are left out."""
    amounts = {
        "shard": _share_sent(shape.shard) * _count_sharded(strategy, exchange, step),
        "replicate": 2 * _share_sent(shape.replicate) * step.gradient_bytes / shape.shard,
        "tensor": _count_along_tensor(shape, step, step.split) if step.split else 0.0,
    }
    return {axis: amount for axis, amount in amounts.items() if getattr(shape, axis) > 1}


def _count_sharded(strategy: Strategy, exchange: Exchange, step: Step) -> float:
    """Count the bytes of the whole vectors that are gathered, and summed in parts."""
    sharding = sharding_of(strategy, exchange)
    num_gathers = 1 if sharding.keep_gathered else 2 * step.num_micro_batches
    num_exchanges = step.num_micro_batches if sharding.exchange == "micro_batch" else 1
    return num_gathers * step.parameter_bytes + num_exchanges * step.gradient_bytes


def _count_along_tensor(shape: Shape, step: Step, split: AlongTensor) -> float:
    places = step.num_places * (step.compute_bytes * split.num_features + SUM_BYTES * split.num_sums)
    summed = step.num_micro_batches * places + SUM_BYTES * split.num_copied / shape.shard
    return 2 * _share_sent(shape.tensor) * summed + step.num_micro_batches * step.compute_bytes * split.num_moved


def _share_sent(size: int) -> float:
    """Return the share of a vector that is not a process's own part, where each of `size` has one."""
    return (size - 1) / size
