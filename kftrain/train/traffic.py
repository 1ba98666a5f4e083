"""What a step of a model will send, told before it is spread: see `parallel/wire.py`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from kftrain.data.order import BatchPlan
from kftrain.parallel.formats import DTYPES
from kftrain.parallel.settings import ParallelConfig, PrecisionConfig
from kftrain.parallel.shape import Shape
from kftrain.parallel.tensor_traffic import Traffic, traffic_of
from kftrain.parallel.wire import Step, bytes_sent


def bytes_of_step(
    shape: Shape,
    parallel: ParallelConfig,
    precision: PrecisionConfig,
    model: nn.Module,
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
    step = Step(
        compute * size,
        reduce * trained,
        plan.num_micro_batches,
        split.split if split and split.num_places else None,
        plan.micro_batch_rows * (split.num_places or 0) if split else 0,
        compute,
    )
    return bytes_sent(shape, parallel.stage, parallel.exchange, step)
