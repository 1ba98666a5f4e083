"""The sections `parallel` and `precision`: layout of the model over processes, and its number formats."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from kftrain.core.plain import MAX_INTEGER
from kftrain.errors import ConfigError
from kftrain.parallel.shape import AXES, SEQUENCE_LENGTH, Shape, require_chunks, require_equal_sizes
from kftrain.parallel.stages import ScheduleName, require_micro_batches
from kftrain.parallel.strategies import Exchange, Strategy
from kftrain.settings.section import ChangesTraining, Count, KeepsTraining, Section


class ParallelConfig(Section):
    """Layout of the model and the batch over processes: a strategy, and the sizes of the mesh's axes."""

    strategy: KeepsTraining[Strategy] = "fsdp"
    """State to shard over the processes: `ddp` shards nothing, `zero1` the optimizer's state, `zero2` the gradients as
    well, `fsdp` the parameters as well (ZeRO-3). `auto` takes the first of zero1, zero2 and fsdp whose state fits into
    half of a device's memory. All compute the same."""
    exchange: KeepsTraining[Exchange] = "step"
    """Gradient exchange of `fsdp` in a step of several micro batches. `step`: once, until when each process keeps the
    sum of its own gradients; `micro_batch`: after each, which saves that memory and costs traffic. With the other
    strategies it follows from the strategy."""
    offload: KeepsTraining[bool] = False
    """Keep parameters, gradients and optimizer state in the host's pinned memory, and update them there. Needs GPUs
    and a strategy that shards."""
    shard: KeepsTraining[Annotated[int, Field(ge=-1, le=MAX_INTEGER)]] = -1
    """Processes that share one copy of the state; -1: all that `replicate` leaves."""
    replicate: KeepsTraining[Count] = 1
    """Copies of the sharded state (hybrid sharding). `ddp` ignores it and replicates over all processes."""
    context: KeepsTraining[Count] = 1
    """Processes that share each sequence (context parallelism): each computes a part of its places. They read the same
    samples. The model must provide a `context_plan`."""
    tensor: KeepsTraining[Count] = 1
    """Processes that split each matrix of the model (tensor parallelism); they read the same samples. The model must
    provide a `tensor_plan`."""
    sequence_parallel: KeepsTraining[bool] = True
    """With `tensor`: between the split matrices each process computes a part of the sequence, which saves memory."""
    pipeline: KeepsTraining[Count] = 1
    """Processes along which the model is cut into stages of consecutive blocks (pipeline parallelism); they read the
    same samples. The model must provide `stages()`."""
    schedule: KeepsTraining[ScheduleName] = "1f1b"
    """Order of forward and backward passes with `pipeline`; all compute the same. `gpipe`: all forward passes first.
    `1f1b`: the same waiting with fewer activations. The others give each process two stages: `interleaved` waits half
    as long; `interleaved_zero_bubble`, `zbv` and `dualpipev` fill the waiting with gradients of weights."""
    expert: KeepsTraining[Count] = 1
    """Processes that share the experts of each layer (expert parallelism); they read different samples, and what is no
    expert's is sharded over them as over `shard`. The model must provide an `expert_plan`."""
    reshard_after_forward: KeepsTraining[bool] = True
    """Older spelling of a strategy: `fsdp` with false is `zero1`."""

    @model_validator(mode="after")
    def _refuse_what_contradicts(self) -> ParallelConfig:
        if self.exchange == "micro_batch" and self.strategy not in ("fsdp", "zero2"):
            raise ValueError(f"exchange must be step: {self.strategy} sums the gradients of all micro batches first")
        if self.expert > 1 and self.tensor > 1:
            raise ValueError("expert must be 1 with tensor: no plan splits the matrices of experts")
        if self.expert > 1 and self.strategy == "ddp":
            raise ValueError("expert must be 1 under ddp, where each process keeps all parameters: zero1 is the same")
        if self.offload and self.strategy == "ddp":
            raise ValueError("offload must be false: ddp keeps the parameters of all blocks on the device all the time")
        if self.context > 1 and self.strategy == "ddp":
            raise ValueError("context must be 1: ddp sums gradients over replicas alone, use zero1")
        return self

    @model_validator(mode="after")
    def _refuse_what_a_pipeline_has_not(self) -> ParallelConfig:
        if self.pipeline == 1:
            return self
        if self.context > 1:
            raise ValueError("pipeline must be 1 with context: no stage cuts sequences yet")
        if self.stage == "zero2" or self.exchange == "micro_batch":
            raise ValueError("pipeline must be 1: its gradients travel once a step, not after each micro batch")
        if self.stage == "auto":
            raise ValueError("pipeline must be 1 with strategy auto, which weighs whole models: take zero1 or fsdp")
        if self.offload:
            raise ValueError("pipeline must be 1 with offload: no schedule waits for parameters from the host")
        return self

    @property
    def stage(self) -> Strategy:
        """The strategy; `fsdp` without `reshard_after_forward` is `zero1`."""
        return "zero1" if self.strategy == "fsdp" and not self.reshard_after_forward else self.strategy

    def shape(self, num_processes: int) -> Shape:
        """Return the mesh of this many processes. Raises ConfigError if the sizes do not multiply to it."""
        sizes = {axis: getattr(self, axis) for axis in AXES}
        others = math.prod(size for axis, size in sizes.items() if axis not in ("replicate", "shard"))
        if self.strategy == "ddp":
            sizes |= {"replicate": max(1, num_processes // others), "shard": 1}
        if sizes["shard"] == -1:
            sizes["shard"] = num_processes // (sizes["replicate"] * others)
        if math.prod(sizes.values()) != num_processes:
            axes = [axis for axis, size in sizes.items() if axis in ("replicate", "shard") or size > 1]
            changed = next((f"{axis} to what divides the processes" for axis in axes[2:] if num_processes % others), "")
            raise ConfigError(
                f"parallel.{' x parallel.'.join(axes)} must be the number of processes, {num_processes}",
                value=" x ".join(str(sizes[axis]) for axis in axes),
                fix=f"set parallel.{changed or 'shard to -1'}, or change launch.nodes and launch.processes_per_node",
            )
        return Shape(**sizes)

    def require_micro_batches(self, num_micro_batches: int) -> None:
        """Raise ConfigError if a step has too few micro batches for the schedule of a pipeline."""
        if self.pipeline > 1:
            require_micro_batches(self.schedule, num_micro_batches, self.pipeline)

    def require_fitting(self, sizes: Mapping[str, int]) -> None:
        """Raise ConfigError if `tensor` or `context` does not divide a size of the model: option -> size."""
        require_equal_sizes(sizes, self.tensor, self.sequence_parallel)
        if self.context > 1 and SEQUENCE_LENGTH in sizes:
            self.require_chunks(sizes[SEQUENCE_LENGTH])

    def require_chunks(self, length: int) -> int:
        """Return what must divide the length of a sequence. Raise ConfigError if it does not."""
        return require_chunks(length, self.context, self.tensor if self.sequence_parallel else 1)


class PrecisionConfig(Section):
    """Number formats of training. The master weights are always fp32."""

    compute: ChangesTraining[Literal["fp32", "bf16"]] = "fp32"
    """Format of the forward and backward pass; `bf16` casts the weights and the inputs of the model and of its
    blocks."""
    reduce: ChangesTraining[Literal["fp32", "bf16"]] = "fp32"
    """Format in which gradients are summed over micro batches and processes."""
