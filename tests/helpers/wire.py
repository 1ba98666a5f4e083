"""Bytes that one process sends in a step, axis by axis, as closed formulas.

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

Along `context` C processes share each sequence, and the state is sharded over them, too: S counts both. In each
attention of H query and K key-value heads of E numbers a process sends for each of its n / C places, forward and
backward, what others attend with (`context`): where C divides K it exchanges heads, else it sends keys and values.

    heads                            2 k n / C (C - 1) / C (2 H + 2 K) E bytes
    keys and values                  2 k n / C (C - 1) 2 K E bytes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from helpers.tensor_traffic import AlongTensor, Traffic, traffic_of

from kftrain.data.order import BatchPlan
from kftrain.parallel.formats import DTYPES
from kftrain.parallel.settings import ParallelConfig, PrecisionConfig
from kftrain.parallel.shape import Shape
from kftrain.parallel.strategies import Exchange, Strategy, resolve_sharding

SUM_BYTES = 4
"""Bytes of a number that is summed over `tensor`: of a gradient, or of a cross-entropy."""


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
    num_exchanged: float = 0.0
    """Numbers that a process exchanges along `context` for each of its own places, forward and backward."""
    compute_bytes: int = 4
    """Bytes of a number in the format of the computation."""


def bytes_sent(shape: Shape, strategy: Strategy, exchange: Exchange, step: Step) -> dict[str, float]:
    """Compute the bytes that a process sends along each axis in a step; axes of one process are left out."""
    amounts = {
        "shard": _share_sent(shape.num_shards) * _count_sharded(strategy, exchange, step),
        "replicate": 2 * _share_sent(shape.replicate) * step.gradient_bytes / shape.num_shards,
        "context": _count_along_context(shape, step),
        "tensor": _count_along_tensor(shape, step, step.split) if step.split else 0.0,
    }
    sizes = {**shape.__dict__, "shard": shape.num_shards}
    return {axis: amount for axis, amount in amounts.items() if sizes[axis] > 1}


def _count_sharded(strategy: Strategy, exchange: Exchange, step: Step) -> float:
    """Count the bytes of the whole vectors that are gathered, and summed in parts."""
    sharding = resolve_sharding(strategy, exchange)
    num_gathers = 1 if sharding.keep_gathered else 2 * step.num_micro_batches
    num_exchanges = step.num_micro_batches if sharding.exchange == "micro_batch" else 1
    return num_gathers * step.parameter_bytes + num_exchanges * step.gradient_bytes


def _count_along_tensor(shape: Shape, step: Step, split: AlongTensor) -> float:
    places = step.num_places * (step.compute_bytes * split.num_features + SUM_BYTES * split.num_sums)
    summed = step.num_micro_batches * places + SUM_BYTES * split.num_copied / shape.shard
    return 2 * _share_sent(shape.tensor) * summed + step.num_micro_batches * step.compute_bytes * split.num_moved


def _count_along_context(shape: Shape, step: Step) -> float:
    return step.num_micro_batches * step.num_places / shape.context * step.num_exchanged * step.compute_bytes


def count_exchanged(model: Any, num_processes: int, is_recomputed: bool) -> float:
    """Count the numbers that a process sends along `context` for a place of its own, by the model's sizes."""
    heads, kv_heads = model.num_heads, model.num_kv_heads
    by_heads = (num_processes - 1) / num_processes * (2 * heads + 2 * kv_heads)
    in_a_pass = by_heads if kv_heads % num_processes == 0 else (num_processes - 1) * 2 * kv_heads
    return (3 if is_recomputed else 2) * in_a_pass * model.head_dim * len(model.blocks())


def _share_sent(size: int) -> float:
    """Return the share of a vector that is not a process's own part, where each of `size` has one."""
    return (size - 1) / size


def bytes_of_step(
    shape: Shape,
    parallel: ParallelConfig,
    precision: PrecisionConfig,
    model: Any,
    plan: BatchPlan,
    split_logits: bool,
    recomputed: Sequence[str] = (),
) -> dict[str, float]:
    """Axis -> bytes that a process sends along it in a step; 0 where a model does not tell how long its sequences are.

    `model`: before it is spread. `split_logits`: whether the task takes them. `recomputed`: names of blocks. Raises
    ConfigError where the model cannot be split.
    """
    compute, reduce = DTYPES[precision.compute].itemsize, DTYPES[precision.reduce].itemsize
    parameters = list(model.parameters())
    size, trained = (sum(p.numel() for p in parameters if p.requires_grad or not only) for only in (False, True))
    split: Traffic | None = None
    if shape.tensor > 1:
        split = traffic_of(model, shape.tensor, parallel.sequence_parallel, split_logits, recomputed)
        size, trained = split.num_parameters, split.num_trained
    num_places = split.num_places if split else model.sequence_length if shape.context > 1 else 0
    step = Step(
        compute * size,
        reduce * trained,
        plan.num_micro_batches,
        split.split if split and split.num_places else None,
        plan.micro_batch_rows * (num_places or 0),
        count_exchanged(model, shape.context, bool(recomputed)) if shape.context > 1 else 0.0,
        compute,
    )
    return bytes_sent(shape, parallel.stage, parallel.exchange, step)


def share_of_outer_exchange(encoding: str, num_served: int = 0) -> float:
    """Compute what an exchange of outer gradients sends as a share of the gradients of a step of `ddp` over islands.

    Of W islands of one process each sends 2 (W - 1) / W of the parameters, as `ddp` does of the gradients in fp32; in
    int8 with a scale in fp32 for each 256 numbers. `num_served`: W with servers, to which each sends all of them once,
    with a byte for each 64 numbers.
    """
    if num_served:
        ring = 2 * (num_served - 1) / num_served
        return {"fp32": 4.0, "bf16": 2.0, "int8": 1.0 + 1 / 64}[encoding] / 4 / ring
    return {"fp32": 4.0, "bf16": 2.0, "int8": 1.0 + 4 / 256}[encoding] / 4
