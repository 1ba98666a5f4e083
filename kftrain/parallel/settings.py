"""The sections `parallel` and `precision`: layout of the model over processes, and its number formats."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from kftrain.core.plain import MAX_INTEGER
from kftrain.errors import ConfigError
from kftrain.parallel.shape import (
    AXES,
    SEQUENCE_LENGTH,
    Shape,
    require_chunks,
    require_equal_parts,
    require_equal_sizes,
)
from kftrain.parallel.stages import ScheduleName, count_stages, require_enough_pieces, require_micro_batches
from kftrain.parallel.strategies import Exchange, Strategy
from kftrain.settings.section import Amount, ChangesTraining, Count, Effect, KeepsTraining, Section, Value

ChangesSince03 = Annotated[Value, Effect(changes_training=True, added="0.3")]

CheckpointingMethod = Literal["blocks", "selective", "offload"]
"""Ways in which a block keeps less of its forward pass: see `activations.py`."""


CompressionKind = Literal["none", "fp16", "bf16", "int8", "topk", "powersgd", "sign"]


class CompressionConfig(Section):
    """Fewer bytes for what processes exchange in a step. It is lossy: another kind is another training."""

    kind: ChangesSince03[CompressionKind] = "none"
    """Form in which gradients travel, and parameters under a strategy that shards: `fp16` and `bf16` are half of the
    bytes; `int8` is a quarter, codes with a scale for each 256 numbers. The others are for `ddp`: `topk` sends the
    largest numbers of each process (Deep Gradient Compression, with `sgd`), `powersgd` two narrow factors of each
    matrix, `sign` the signs of momenta (with `sgd`), of which the majority is applied."""
    feedback: ChangesSince03[bool] = True
    """Add what a number has lost on its way to the one of the next step. Each process keeps that in fp32, as much as
    all gradients, under `fsdp` as well."""
    density: ChangesSince03[Annotated[float, Field(gt=0.0, le=0.25)]] = 0.001
    """Share of the numbers that a process sends with `topk`."""
    warmup_steps: ChangesSince03[Amount] = 0
    """Steps in which this share falls from a quarter to `density`."""
    rank: ChangesSince03[Count] = 16
    """Columns of the factors of `powersgd`."""

    @model_validator(mode="after")
    def _refuse_what_contradicts(self) -> CompressionConfig:
        if self.kind != "topk" and (self.density, self.warmup_steps) != (0.001, 0):
            raise ValueError(f"density and warmup_steps are of kind topk, not of {self.kind}")
        if self.kind != "powersgd" and self.rank != 16:
            raise ValueError(f"rank is of kind powersgd, not of {self.kind}")
        if self.kind in ("topk", "powersgd") and not self.feedback:
            raise ValueError(f"feedback must be true with {self.kind}: what is not sent at once would never be applied")
        return self

    def count_vectors(self, is_sharded: bool) -> int:
        """Count the vectors in fp32, as long as all trained parameters, that a process keeps beside its gradients."""
        if self.kind == "none" or is_sharded:
            return 2 if self.kind != "none" and self.feedback else 0  # what is kept before and after a step
        has_feedback = self.feedback and self.kind != "sign"
        return 2 + has_feedback + 2 * self.has_local_momenta  # what is sent and what comes; momenta

    @property
    def has_local_momenta(self) -> bool:
        """True where each process has momenta of its own gradients, in the place of the optimizer's."""
        return self.kind in ("topk", "sign")

    def require_optimizer(self, kind: str, nesterov: bool) -> None:
        """Raise ValueError where an optimizer has other momenta than those that each process has of its own."""
        if self.has_local_momenta and (kind != "sgd" or nesterov):
            raise ValueError(f"optimizer.kind must be sgd, without nesterov, with compression.kind {self.kind}")


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
    compression: CompressionConfig = CompressionConfig()
    """Form in which gradients travel."""
    bucket_bytes: ChangesSince03[Annotated[int, Field(ge=1024, le=MAX_INTEGER)] | None] = None
    """Gradients that travel together under `ddp`, in bytes of fp32. Left out, it is torch's 25 MiB; with `compression`
    2 MiB, for one bucket is packed while another travels."""
    hierarchical: KeepsTraining[bool] = False
    """Sum the gradients of `ddp` within each node first, which takes fewer bytes between nodes of several processes.
    For CPUs: NCCL chooses the order of its sums itself."""
    layout: KeepsTraining[Literal["given", "auto"]] = "given"
    """`auto` sizes `replicate`, `shard` and `tensor` and takes a strategy, whatever stands there, whenever a run is
    opened: of the layouts whose state fits, the one whose exchanges take the least time. It needs the built-in
    transformer and `launch.device_memory_gib`."""

    islands: ChangesSince03[Count] = 1
    """Groups of equally many processes that train alone, each in the layout above with samples of its own, and exchange
    outer gradients as `train.outer` says. 1: none."""

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
        is_alone = self.tensor * self.pipeline == 1 and self.compression.kind == "none" and self.layout == "given"
        if self.hierarchical and not (self.strategy == "ddp" and is_alone):
            raise ValueError("hierarchical is of ddp alone, without tensor, pipeline, compression and layout auto")
        return self

    @model_validator(mode="after")
    def _refuse_what_is_not_compressed(self) -> ParallelConfig:
        kind = self.compression.kind
        if kind == "none":
            return self
        for axis in ("tensor", "pipeline", "context", "expert"):
            if getattr(self, axis) > 1:
                raise ValueError(f"compression.kind must be none with {axis}, whose own exchanges are not compressed")
        if kind in ("topk", "powersgd", "sign") and self.strategy != "ddp":
            raise ValueError(f"strategy must be ddp with compression.kind {kind}, which is of whole gradients")
        if self.strategy != "ddp" and self.replicate > 1:
            raise ValueError("replicate must be 1 with compression: sums between copies are not compressed, use ddp")
        if self.offload:
            raise ValueError("offload must be false with compression: what numbers have lost stays on the device")
        return self

    @model_validator(mode="after")
    def _refuse_axes_beside_auto(self) -> ParallelConfig:
        others = [axis for axis in ("context", "pipeline", "expert") if getattr(self, axis) > 1]
        others += ["offload"] if self.offload else []
        others += ["compression"] if self.compression.kind != "none" else []
        if self.layout == "auto" and others:
            what = " and ".join(others)
            raise ValueError(f"layout must be given with {what}: auto sizes replicate, shard and tensor only")
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

    def require_equal_islands(self, batch_size: int, num_data_ranks: int) -> None:
        """Raise ConfigError where islands would have unequal shares of a batch: they count equally in a mean."""
        if self.islands > 1 and batch_size % num_data_ranks:
            what = f"has no {num_data_ranks} equal parts for the processes of {self.islands} islands"
            fix = f"use a multiple of {num_data_ranks}"
            raise ConfigError(what, where="train.global_batch_size", value=batch_size, fix=fix)

    def require_micro_batches(self, num_micro_batches: int) -> None:
        """Raise ConfigError if a step has too few micro batches for the schedule of a pipeline."""
        if self.pipeline > 1:
            require_micro_batches(self.schedule, num_micro_batches, self.pipeline)

    def require_fitting(self, sizes: Mapping[str, int]) -> None:
        """Raise ConfigError if an axis does not fit a built-in model. `sizes`: option -> size; none: not known."""
        if not sizes:
            return
        num_layers, num_experts = (sizes.get(name, 0) for name in ("num_layers", "num_experts"))
        if num_layers:  # one piece each, and one before and one behind them
            require_enough_pieces(num_layers + 2, count_stages(self.schedule, self.pipeline))
        if self.expert > 1 and not num_experts:
            fix = "use model.kind: mixture_of_experts, or set it to 1"
            raise ConfigError("the model has no experts", where="parallel.expert", value=self.expert, fix=fix)
        if self.tensor > 1 and num_experts:
            what = "no plan splits the matrices of experts"
            raise ConfigError(what, where="parallel.tensor", value=self.tensor, fix="use parallel.expert")
        require_equal_parts("num_experts", num_experts, self.expert, axis="expert")
        require_equal_sizes({n: s for n, s in sizes.items() if n != "num_layers"}, self.tensor, self.sequence_parallel)
        if self.context > 1 and SEQUENCE_LENGTH in sizes:
            self.require_chunks(sizes[SEQUENCE_LENGTH])

    def require_sequences(self, dims: Mapping[str, int]) -> None:
        """Raise ConfigError if batches have no sequence that `context` could cut. `dims`: a task's `sequence_dims`."""
        if self.context > 1 and not dims:
            what = "the batches of the task have no sequence that could be cut"
            fix = "name one in the task's sequence_dims, or set it to 1"
            raise ConfigError(what, where="parallel.context", value=self.context, fix=fix)

    def require_chunks(self, length: int) -> int:
        """Return what must divide the length of a sequence. Raise ConfigError if it does not."""
        return require_chunks(length, self.context, self.tensor if self.sequence_parallel else 1)


Scale = Annotated[float, Field(ge=2.0**-126, le=2.0**126)]
"""Scale of a loss: fp32 has it, and its inverse."""


class LossScaleConfig(Section):
    """Dynamic scale of the loss with `compute: fp16`. It is halved after a step whose gradients are not finite."""

    initial: ChangesSince03[Scale] = 65536.0
    """Scale of the first step."""
    growth_factor: ChangesSince03[Annotated[float, Field(gt=1.0, le=2.0**126)]] = 2.0
    """Factor on the scale after `growth_interval_steps`."""
    growth_interval_steps: ChangesSince03[Count] = 2000
    """Steps in a row with finite gradients after which the scale grows."""
    minimum: ChangesSince03[Scale] = 1.0
    """Least scale. A step that is skipped at this scale counts for `train.max_nonfinite_steps`; others do not."""

    @model_validator(mode="after")
    def _begins_above_the_minimum(self) -> LossScaleConfig:
        if self.initial < self.minimum:
            raise ValueError(f"initial must be at least minimum, {self.minimum:g}")
        return self


class PrecisionConfig(Section):
    """Number formats of training."""

    compute: ChangesTraining[Literal["fp32", "bf16", "fp16", "float8"]] = "fp32"
    """Format of the forward and backward pass; `bf16` and `fp16` cast the weights and the inputs of the model and of
    its blocks. With `fp16` the loss is scaled. `float8` is `bf16` whose blocks multiply matrices in float8; it needs
    the extra `float8`."""
    reduce: ChangesTraining[Literal["fp32", "bf16", "fp16"]] = "fp32"
    """Format in which gradients are summed over micro batches and processes."""
    master: ChangesSince03[Literal["fp32", "bf16"]] = "fp32"
    """Format in which weights are kept and updated. `bf16` halves the memory of weights, gradients and moments of
    `adamw`, and rounds updates by chance, so that small ones count in the mean. It needs `compute: bf16`."""
    loss_scale: LossScaleConfig = LossScaleConfig()
    """Scale of the loss with `compute: fp16`."""
    tf32: ChangesSince03[bool] = False
    """Let GPUs round the factors of fp32 matrix products and convolutions to TF32, which has the digits of fp16."""
    deterministic: KeepsTraining[bool] = False
    """Take torch's deterministic kernels only, so that the same GPUs compute the same bits again. An operation that has
    none is an error. On the CPU results are the same in any case."""
    cudnn_benchmark: KeepsTraining[bool] = False
    """Let cuDNN measure which convolution is the fastest. Each attempt may then choose, and round, another way."""

    @model_validator(mode="after")
    def _refuse_what_contradicts(self) -> PrecisionConfig:
        if self.reduce == "fp16" and self.compute != "fp16":
            raise ValueError(
                f"reduce must not be fp16 with compute {self.compute}, whose loss has no scale: sums would be lost"
            )
        if self.reduce == "bf16" and self.compute == "fp16":
            raise ValueError("reduce must be fp32 or fp16 with compute fp16, of which bf16 would keep fewer digits")
        if self.master == "bf16" and (self.compute, self.reduce) != ("bf16", "fp32"):
            raise ValueError("master must be fp32 unless compute is bf16, and reduce fp32")
        if self.deterministic and self.cudnn_benchmark:
            raise ValueError("cudnn_benchmark must be false with deterministic: what it measures decides the bits")
        if self.loss_scale != LossScaleConfig() and self.compute != "fp16":
            raise ValueError(f"loss_scale is of compute fp16, not of {self.compute}")
        return self

    def require_fp32_sums(self, compression: str) -> None:
        """Raise ValueError where gradients that travel compressed are not summed in fp32, or have the loss's scale."""
        if self.compute == "fp16":
            what = "what numbers have lost would have the scale of another step"
            raise ValueError(f"precision.compute must not be fp16 with parallel.compression {compression}: {what}")
        if (self.reduce, self.master) != ("fp32", "fp32"):
            what = f"gradients that travel as {compression} are summed in fp32"
            raise ValueError(f"precision.reduce and precision.master must be fp32 with parallel.compression: {what}")
