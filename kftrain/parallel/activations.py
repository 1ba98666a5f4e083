"""Lets chosen blocks keep less of their forward pass until the backward pass.

Three ways, which compute the same numbers as keeping everything: what is computed again draws its random numbers from
the generators' state of the first time.

    blocks     keeps a block's input, and computes the block again
    selective  keeps, besides, what attention and two of three matrix products return, and computes the rest again:
               on average the products are two thirds of the memory and nearly all of the time
    offload    keeps everything, on the host

Numbers of a block that count (a batch norm's, a router's) must not be counted again: batch norms refuse it, models of
ours count outside of their blocks.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper, checkpoint_wrapper
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, create_selective_checkpoint_contexts

from kftrain.errors import ConfigError
from kftrain.parallel.distributed import Distributed
from kftrain.parallel.settings import CheckpointingMethod
from kftrain.parallel.sharded import local

# torch counts the operations of a block in both passes. Labels for profilers are no numbers, and sharding within a
# block (experts) sets others when it finds what it has gathered.
_profiler: Any = torch.ops.profiler
SAC_IGNORED_OPS.update((_profiler._record_function_enter_new.default, _profiler._record_function_exit._RecordFunction))

PRODUCTS = ("mm", "addmm", "_grouped_mm", "convolution")
"""Operations whose results `selective` keeps. Not `bmm`: attention without a kernel of its own makes scores with it,
which take more memory than all else."""

ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)

PRODUCTS_TO_ONE_RECOMPUTED = 3
"""Number of products that follow one another of which the first is computed again: in a Llama block the projections to
queries, of attention's output, and down (to which torch never comes). 3 halves a block's memory for a twentieth of the
time."""


def choose_checkpointed_blocks(names: Sequence[str], choice: int | Sequence[int | str]) -> list[str]:
    """Return the blocks that `train.checkpointed_blocks` asks for, in their order. `names`: of all blocks of the model.

    `choice`: k for the first of every k, or numbers and patterns of names. Raises ConfigError for one that fits none.
    """
    if not names:
        what, fix = "the model has no blocks that could be recomputed", "name them in a method blocks() of the model"
        raise ConfigError(what, where="train.activation_checkpointing", fix=f"{fix}, or set it to none")
    if isinstance(choice, int):
        return list(names[::choice])
    chosen: set[str] = set()
    for entry in choice:
        if isinstance(entry, int):
            fitting = list(names[entry : entry + 1])
        else:
            fitting = [name for name in names if fnmatchcase(name, entry)]
        if not fitting:
            fix = f"use numbers from 0 to {len(names) - 1}, or patterns of names from {names[0]} to {names[-1]}"
            raise ConfigError("there is no such block", where="train.checkpointed_blocks", value=entry, fix=fix)
        chosen.update(fitting)
    return [name for name in names if name in chosen]


@dataclass(frozen=True)
class CheckpointActivations:
    """Wraps chosen blocks, so that they keep less."""

    method: CheckpointingMethod
    names: Collection[str]
    """Names of the chosen blocks of the whole model; a stage has some of them."""
    is_compiled: bool = False
    """True where blocks are compiled afterwards: torch's compiler takes its own contexts alone."""

    def apply(self, distributed: Distributed, blocks: Sequence[str]) -> None:
        """Wrap those of the blocks that are chosen. Raises ConfigError for one with recurrent layers."""
        modules = {name: distributed.model.get_submodule(name) for name in blocks if name in self.names}
        wrappers = {id(module): self._wrap(module) for module in modules.values()}
        # Lists, since wrapping changes what is walked; all places of a block, since a model may keep it in several.
        for parent in [*distributed.model.modules(), *distributed.roots.modules()]:
            for name, child in list(parent.named_children()):
                if id(child) in wrappers:
                    setattr(parent, name, wrappers[id(child)])

    def _wrap(self, block: nn.Module) -> nn.Module:
        if self.method == "offload":
            return OffloadedBlock(block)  # type: ignore[no-untyped-call]
        is_recurrent = any(isinstance(part, nn.RNNBase | nn.RNNCellBase) for part in block.modules())
        if self.method == "selective" and is_recurrent:
            # torch overwrites the results of their products, behind the back of what would notice it.
            what = "recurrent layers overwrite what would be kept of them"
            fix = "set it to blocks, or leave the block out of train.checkpointed_blocks"
            raise ConfigError(what, where="train.activation_checkpointing", value=self.method, fix=fix)
        make_contexts = make_selective_contexts if self.is_compiled else _make_watched_contexts
        contexts: dict[str, Any] = {"context_fn": make_contexts} if self.method == "selective" else {}
        return checkpoint_wrapper(block, **contexts)


def make_selective_contexts() -> tuple[Any, Any]:
    """Make the contexts of one forward pass of a block, and of its recomputation, that keep results of products."""
    numbers = itertools.count()

    def choose(_context: Any, operation: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
        kept = operation in _list_operations(ATTENTION) and not _draws(operation, arguments, keywords)
        if operation in _list_operations(PRODUCTS):
            kept = bool(next(numbers) % PRODUCTS_TO_ONE_RECOMPUTED)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(choose)  # type: ignore[no-untyped-call]
    return contexts


def _make_watched_contexts() -> tuple[Any, Any]:
    first, again = make_selective_contexts()
    return first, _refuse_mutation(again)


@contextlib.contextmanager
def _refuse_mutation(recomputing: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    try:
        with recomputing:
            yield
    except RuntimeError as error:
        if "has been mutated" not in str(error):
            raise
        what, fix = "a block changes in place what would be kept of it", "set it to blocks, or change nothing in place"
        raise ConfigError(what, where="train.activation_checkpointing", value="selective", fix=fix) from error


@functools.cache
def _list_operations(names: tuple[str, ...]) -> frozenset[Any]:
    packets = [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]
    return frozenset(getattr(packet, overload) for packet in packets for overload in packet.overloads())


def _draws(operation: Any, arguments: Sequence[Any], keywords: dict[str, Any]) -> bool:
    """Tell whether an attention drops: left out in the recomputation, what comes after it would draw other numbers."""
    by_name = dict(zip((argument.name for argument in operation._schema.arguments), arguments, strict=False))
    return bool({**by_name, **keywords}.get("dropout_p", 0.0))


class OffloadedBlock(ActivationWrapper):
    """A block whose activations wait on the host for the backward pass."""

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Run the block."""
        with saved_tensors_hooks(self._send, fetch_from_host):
            return self._checkpoint_wrapped_module(*arguments, **keywords)

    def _send(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.device]:
        # Parameters stay: sharding frees those that it has gathered, and finds them where they were.
        storage = tensor.untyped_storage().data_ptr()
        if any(local(parameter).untyped_storage().data_ptr() == storage for parameter in self.parameters()):
            return tensor, tensor.device
        return copy_to_host(tensor), tensor.device


def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the host; neither it nor the stream that computes waits for more than the copy's turn."""
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)


def fetch_from_host(kept: tuple[torch.Tensor, torch.device]) -> torch.Tensor:
    """Bring a tensor back to its device, behind the copy from it in the same stream."""
    tensor, device = kept
    return tensor.to(device, non_blocking=True)
