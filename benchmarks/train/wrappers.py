"""The wrappers of PyTorch in a bare loop, as one writes it by hand: what ours is held against."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from kftrain.parallel.fully_shard import ExchangedSums, reduce_by_exchange
from kftrain.parallel.sharded import all_gather

ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
CLIP_NORM = 1.0
NUM_MICRO_BATCHES = 4
"""Of a step of a pipeline."""

Step = Callable[[torch.Tensor, torch.Tensor], None]
"""Takes a step with inputs and targets `[rows, length]`."""


def alone(model: nn.Module) -> nn.Module:
    """No wrapper."""
    return model


def ddp(model: nn.Module) -> nn.Module:
    """DistributedDataParallel."""
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def fsdp(model: Any, reshard: bool = True) -> nn.Module:
    """FSDP2, with the exchange that gloo lacks: what is compared is the loop around it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in (*model.blocks(), model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
        unit.set_force_sum_reduction_for_comms(True)  # gloo knows no mean
    reduce_by_exchange(model)
    return model


def exchanges_alone(model: Any) -> Step:
    """What FSDP2 sends in a step and nothing else: a unit's parameters for both passes, and its gradients once."""
    size, blocks = dist.get_world_size(), list(model.blocks())
    counts = [sum(parameter.numel() for parameter in unit.parameters()) for unit in (*blocks, model)]
    counts[-1] -= sum(counts[:-1])
    units = [(torch.ones(count // size * size), torch.ones(count // size)) for count in counts]
    group, sum_parts = dist.group.WORLD, ExchangedSums()

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        for whole, part in (*units, *reversed(units)):
            all_gather(whole, part, group=group)
        for whole, part in units:
            sum_parts(part, whole, group, dist.ReduceOp.SUM)

    return step


def zero2(model: nn.Module) -> nn.Module:
    """FSDP2 that keeps parameters from forward to backward."""
    return fsdp(model, reshard=False)


def tensor(model: Any) -> nn.Module:
    """The recipe of PyTorch's documentation: tensor and sequence parallel, with `loss_parallel`."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    inside: Any = (Shard(1), None, None)
    whole: Any = (Replicate(), None, None)
    for block in model.blocks():
        plan = {
            "input_layernorm": SequenceParallel(),
            "self_attn": PrepareModuleInput(input_layouts=inside, desired_input_layouts=whole),
            "self_attn.q_proj": ColwiseParallel(),
            "self_attn.k_proj": ColwiseParallel(),
            "self_attn.v_proj": ColwiseParallel(),
            "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
            "post_attention_layernorm": SequenceParallel(),
            "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)
    ends = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    return parallelize_module(model, mesh, ends)


def context(model: Any) -> nn.Module:
    """DeepSpeed-Ulysses written by hand, around FSDP2: each process has consecutive places of all sequences."""
    size, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD

    def exchange(parts: torch.Tensor) -> torch.Tensor:
        flat = all_to_all_single_autograd(parts.flatten(0, 1), None, None, group)
        return flat.unflatten(0, (size, -1))

    def to_heads(places: torch.Tensor) -> torch.Tensor:
        return exchange(places.unflatten(1, (size, -1)).movedim(1, 0).contiguous()).movedim(0, 2).flatten(2, 3)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        heads = to_heads(torch.cat([query, key, value], 0)).chunk(3)
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return exchange(attended.unflatten(2, (size, -1)).movedim(2, 0).contiguous()).movedim(0, 1).flatten(1, 2)

    for block in model.blocks():
        block.self_attn.attention.forward = attend
    turn = model.rotary.forward
    model.rotary.forward = lambda positions, like: turn(positions + rank * len(positions), like)
    return fsdp(model)


WRAPPERS: dict[str, Callable[[Any], nn.Module]] = {
    "free": alone,
    "ddp": ddp,
    "zero2": zero2,
    "fsdp": fsdp,
    "tensor": tensor,
    "context": context,
}


class Half(nn.Module):
    """One of two stages of a transformer, cut where both have about as many numbers to multiply with."""

    def __init__(self, model: Any, rank: int) -> None:
        super().__init__()
        middle = (len(model.model.layers) + 2) // 2
        self.embed = None if rank else model.model.embed_tokens
        self.blocks = model.model.layers[middle:] if rank else model.model.layers[:middle]
        self.norm, self.head = (model.model.norm, model.lm_head) if rank else (None, None)
        self.rotary = model.rotary

    def forward(self, x: Any) -> Any:
        """Map tokens to what is sent, and that to logits."""
        hidden = self.embed(x) if self.embed else x
        tables = self.rotary(torch.arange(hidden.shape[1]), hidden)
        for block in self.blocks:
            hidden = block(hidden, tables)
        return self.head(self.norm(hidden)) if self.head and self.norm else hidden


def pipeline_step(model: nn.Module) -> Step:
    """A step of PyTorch's pipeline, 1F1B over two processes: schedule, the norm over both, clipping, update."""
    rank, size = dist.get_rank(), dist.get_world_size()
    half = Half(model, rank)
    parameters = list(half.parameters())
    optimizer = torch.optim.AdamW(parameters, **ADAMW)

    def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    stage = PipelineStage(half, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, NUM_MICRO_BATCHES, loss_fn=loss_of)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, return_outputs=False)
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).square()
        dist.all_reduce(norm)
        torch.nn.utils.clip_grads_with_norm_(parameters, CLIP_NORM, norm.sqrt())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def bare_step(kind: str, model: nn.Module) -> Step:
    """A step of the wrapped model: forward, loss, backward, clipping, update."""
    if kind == "pipeline":
        return pipeline_step(model)
    wrapped = WRAPPERS[kind](model)
    parameters = list(wrapped.parameters())
    optimizer = torch.optim.AdamW(parameters, **ADAMW)
    around: Callable[[], Any] = loss_parallel if kind == "tensor" else contextlib.nullcontext

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        if kind == "context":
            inputs, targets = (places.chunk(dist.get_world_size(), 1)[dist.get_rank()] for places in (inputs, targets))
        with around():
            logits = wrapped(inputs)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
