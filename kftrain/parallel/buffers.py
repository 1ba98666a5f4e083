"""Buffers that each process changes in its forward pass, and how the model says that they become one.

A model declares it: `buffer_reductions = {"*.running_mean": "mean", "num_seen": "sum"}`, patterns of names -> what the
buffers of that name are after each step:

    mean    the mean over processes, weighted by their samples
    sum     what it was before the step, and the changes of all processes
    places  as sum, of what each place of a sequence adds by itself: it is exact where processes share sequences, too
    max     the elementwise maximum over processes
    first   that of the first process

So they are what one process would have that takes as many micro batches in a step, each of the samples of all: with
`mean` where a forward takes a buffer to a mean over its samples (a moving average), with `sum` where it adds a sum over
them, with `max` where it takes a maximum. What a micro batch computes from them within a step is each process's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist
from torch import nn

from kftrain.errors import ConfigError, UserCodeError
from kftrain.parallel.world import World

ATTRIBUTE = "buffer_reductions"

Reduction = Literal["mean", "sum", "places", "max", "first"]
REDUCTIONS: tuple[str, ...] = get_args(Reduction)

SUMS = ("sum", "places")

MAX_DIFFERENCE = 1e-4
"""Relative: what processes compute alike on machines of different kinds is not the same to the last digit."""


def read_reductions(model: nn.Module) -> dict[str, Reduction]:
    """Map the names of the buffers that are combined to how; of two patterns that fit, the first counts.

    Raises ConfigError where the declaration is none, or names what the model does not have.
    """
    patterns: Any = getattr(model, ATTRIBUTE, {})
    if not isinstance(patterns, Mapping) or any(how not in REDUCTIONS for how in patterns.values()):
        fix = f"map patterns of buffers' names to {', '.join(REDUCTIONS)}"
        raise _error("is no declaration", patterns, fix)
    buffers = dict(model.named_buffers())
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in buffers):
            raise _error("names no buffer of the model", pattern, "see model.named_buffers()")
    chosen = {name: next((how for p, how in patterns.items() if fnmatchcase(name, p)), None) for name in buffers}
    reductions = {name: cast(Reduction, how) for name, how in chosen.items() if how is not None}
    for name, how in reductions.items():
        if buffers[name].is_complex():
            raise _error("names a buffer of complex numbers", name, "keep its two parts in two buffers")
        if how == "mean" and not buffers[name].is_floating_point():
            raise _error("takes the mean of a buffer that holds no floating-point numbers", name, "use sum or max")
    return reductions


class CombinedBuffers:
    """The buffers that a model declares. Made before the model is distributed, which may change their names."""

    def __init__(self, model: nn.Module, world: World) -> None:
        """Read the declaration. Raises ConfigError as `read_reductions` does."""
        self._world = world
        self._slots = {name: (*_find_owner(model, name), how) for name, how in read_reductions(model).items()}
        self._before: dict[str, torch.Tensor] = {}

    @property
    def is_needed(self) -> bool:
        """True where there is something to combine."""
        return self._world.size > 1 and bool(self._slots)

    @property
    def are_of_rows(self) -> bool:
        """True where a buffer is of whole rows, and would be another one where each process computes a part of them."""
        return self.is_needed and any(how != "places" for _, _, how in self._slots.values())

    @torch.no_grad()
    def begin(self) -> None:
        """Note before a step the values that sums start from."""
        if self.is_needed:
            sums = {name: slot for name, slot in self._slots.items() if slot[2] in SUMS}
            self._before = {name: _copy(module._buffers[key]) for name, (module, key, _) in sums.items()}

    @torch.no_grad()
    def combine(self, num_samples: float, counts: bool = True) -> None:
        """Make the buffers the same on all processes after the forward passes of a step, on the device. Collective.

        Args:
            num_samples: Samples of this process in this step.
            counts: Whether they count here; of processes that have seen the same ones, one counts them.
        """
        if not self.is_needed:
            return
        # Shares are computed on the device, so that the host does not wait for the forward passes. Where nobody has
        # samples all weigh the same.
        share = torch.full((), num_samples if counts else 0.0, dtype=torch.float64, device=self._world.device)
        total = share.clone()
        dist.all_reduce(total)
        weight = torch.where(total > 0, share / total, 1 / self._world.size)
        # In the order of the model's buffers, which all processes share: each of them is one exchange.
        for name, (module, key, how) in self._slots.items():
            buffer = module._buffers[key]
            assert buffer is not None, name
            if how == "first":
                content = buffer.contiguous().reshape(-1).view(torch.uint8)  # which every backend knows
                dist.broadcast(content, src=0)
                buffer.copy_(content.view(buffer.dtype).view_as(buffer))
            else:
                before = self._before.get(name)
                now = _copy(buffer) if counts or before is None else before  # who does not count brings no change
                buffer.copy_(_combine(how, now, before, weight))


def _combine(how: Reduction, own: torch.Tensor, before: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
    """Combine a buffer over all processes. Collective. `own`: is changed; `weight`: its share in a mean."""
    # Of a sum the changes are added, not the buffers: all start from the same value, which must count once.
    if how == "max":
        dist.all_reduce(own, dist.ReduceOp.MAX)
        return own
    part = own * weight if how == "mean" else own - cast(torch.Tensor, before)
    dist.all_reduce(part)
    return part if how == "mean" else cast(torch.Tensor, before) + part


def require_equal(model: nn.Module, world: World) -> None:
    """Raises UserCodeError where the buffers of checkpoints, which hold those of one process, differ. Collective."""
    saved = {
        f"{name}.{key}".lstrip("."): buffer.detach()
        for name, module in model.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None and key not in module._non_persistent_buffers_set and buffer.layout is torch.strided
    }
    if world.size == 1 or not saved:
        return
    # Checksums travel, not buffers, which may be large. Not-a-number counts as 0, since it does not even equal itself.
    everyones = world.gather([_checksum(buffer).nan_to_num().tolist() for buffer in saved.values()])
    for name, checksums in zip(saved, zip(*everyones, strict=True), strict=True):
        sums, sizes = zip(*checksums, strict=True)
        if max(sums) - min(sums) > MAX_DIFFERENCE * max(sizes):
            fix = "name it in the model's buffer_reductions, and start anew"
            raise UserCodeError("a buffer has become another one on each process", where=f"model {name}", fix=fix)


def _checksum(buffer: torch.Tensor) -> torch.Tensor:
    """Return a number that changes by about as much as the buffer does, wherever it does, and the size of the whole.

    A plain sum would not notice two numbers that have changed places.
    """
    wide = (torch.view_as_real(buffer) if buffer.is_complex() else buffer).flatten().double()
    return torch.stack((wide @ torch.arange(len(wide), device=wide.device).double().cos(), wide.norm()))


def _find_owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key


def _copy(buffer: torch.Tensor | None) -> torch.Tensor:
    """Convert to float64 or int64, in which nothing is lost on the way."""
    assert buffer is not None
    wide = torch.float64 if buffer.is_floating_point() else torch.int64
    return buffer.detach().to(wide, copy=True, memory_format=torch.contiguous_format)


def _error(what: str, value: Any, fix: str) -> ConfigError:
    return ConfigError(what, where=f"model.{ATTRIBUTE}", value=value, fix=fix)
