"""The wrappers of PyTorch in a bare loop, as one writes it by hand: what ours is held against."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
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

from kftrain.parallel.fully_shard import reduce_by_exchange

ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
CLIP_NORM = 1.0

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
    reduce_by_exchange(model)
    return model


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


WRAPPERS: dict[str, Callable[[Any], nn.Module]] = {
    "free": alone,
    "ddp": ddp,
    "zero2": zero2,
    "fsdp": fsdp,
    "tensor": tensor,
}


def bare_step(kind: str, model: nn.Module) -> Step:
    """A step of the wrapped model: forward, loss, backward, clipping, update."""
    wrapped = WRAPPERS[kind](model)
    parameters = list(wrapped.parameters())
    optimizer = torch.optim.AdamW(parameters, **ADAMW)
    around: Callable[[], Any] = loss_parallel if kind == "tensor" else contextlib.nullcontext

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        with around():
            logits = wrapped(inputs)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
