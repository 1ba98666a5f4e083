"""A dry run of the loss before the model is sharded: what it calls, what it changes, and whether it can be computed.

It works on copies of the model's tensors and on random generators of its own; after it everything is as before, numbers
that modules keep as attributes, too. The rows are those of each process, so that what depends on the data differs.

A model that was built without memory borrows its weights: a block of those that `blocks()` names while it is called,
and the rest of the model all the time, which is what sharding makes of it later. Without that method it is all of it.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from kftrain.data.loader import MicroBatch
from kftrain.errors import ConfigError, UserCodeError
from kftrain.evaluate.score import statistics_of
from kftrain.models.modes import evaluating
from kftrain.parallel import blocks
from kftrain.parallel.formats import cast_inputs
from kftrain.parallel.initialize import isolated, parameter_like, put
from kftrain.tasks.base import Task
from kftrain.tasks.prepare import prepare, require_sequence_dims
from kftrain.train.lender import Lender
from kftrain.train.step import after_step, loss_of, seed_step, terms_of

ROWS = 2
"""Of one process's first micro batch; more would only take longer."""

Slots = list[tuple[nn.Module, str, torch.Tensor]]
"""Modules, and the names and values of parameters or buffers of theirs."""


@dataclass(frozen=True)
class Seen:
    """What one process has seen; plain data."""

    calls: blocks.Calls
    """Of the model and the candidates for its blocks, while the loss was computed."""
    changed: dict[str, str]
    """Names of the buffers that the loss has changed -> digests of what they became."""
    draws: bool = False
    """Whether `task.batch` draws torch's random numbers: they are seeded for each step, so it must be called there."""


def look(
    model: nn.Module,
    task: Task,
    micro: MicroBatch,
    names: Iterable[str],
    device: torch.device,
    seed: tuple[int, int],
    lender: Lender | None = None,
) -> Seen:
    """Computes a loss and statistics in fp32. `seed`: of the run, and the rank.

    `lender`: of weights that the model has no memory for.

    Raises UserCodeError where the task or the model raises, or returns another shape than it must.
    """
    micro = first_rows(micro)
    terms_of(task, micro)
    before = torch.default_generator.get_state()
    require_sequence_dims(task, prepare(task, micro.arrays, device)[0])
    draws = not torch.equal(before, torch.default_generator.get_state())
    log = blocks.CallLog(model, names)
    try:
        with _isolated(seed, device), _copied(model, device, torch.float32, lender) as buffers:
            loss_of(model, task, micro, device)
            calls = log.take()
            changed = _changed(model, buffers)
            after_step(model)  # after that: what it changes is the same everywhere, once what it reads is combined
            with evaluating(model), torch.no_grad():
                statistics_of(model, task, micro.arrays, device)
    finally:
        log.close()
    return Seen(calls, changed, draws)


def rehearse(
    model: nn.Module,
    task: Task,
    micro: MicroBatch,
    names: Sequence[str],
    device: torch.device,
    seed: tuple[int, int],
    dtype: torch.dtype,
    lender: Lender | None = None,
) -> None:
    """Computes a loss as it will be in mixed precision: weights in `dtype`, and what enters the model or a block.

    Raises ConfigError where the model cannot be computed so.
    """
    handles = cast_inputs(model, names, dtype)
    try:
        with _isolated(seed, device), _copied(model, device, dtype, lender):
            loss_of(model, task, first_rows(micro), device)
    except UserCodeError as error:
        raise ConfigError(
            f"the model cannot be computed in bf16: {error.what}",
            where="precision.compute",
            fix="cast in its forward what is not cast for it (buffers stay in fp32), or set it to fp32",
        ) from error
    finally:
        for handle in handles:
            handle.remove()


def require_equal_buffers(seen: list[Seen], combined: Collection[str] = ()) -> None:
    """Raises ConfigError where a loss leaves other buffers on one process than on another: each would go its own way.

    What becomes the same on all of them, such as a count of steps, may change, and so may what is combined after each
    step: `combined`, names.
    """
    for name in sorted({name for each in seen for name in each.changed} - set(combined)):
        if len({each.changed.get(name) for each in seen}) > 1:
            raise ConfigError(
                "a buffer that the forward pass changes differs from process to process",
                where=f"model {name}",
                fix="name it in the model's buffer_reductions, train a parameter instead, or use one process",
            )


def first_rows(micro: MicroBatch) -> MicroBatch:
    """What is looked at of a micro batch."""
    return MicroBatch({name: rows[:ROWS] for name, rows in micro.arrays.items()}, micro.weight[:ROWS])


@contextlib.contextmanager
def _isolated(seed: tuple[int, int], device: torch.device) -> Iterator[None]:
    """Random numbers of its own for the block; all generators go on as if it had not been."""
    with isolated(device):
        seed_step(seed[0], -1, seed[1], device)
        yield


@contextlib.contextmanager
def _copied(
    model: nn.Module, device: torch.device, dtype: torch.dtype, lender: Lender | None = None
) -> Iterator[Slots]:
    """The model with copies of its tensors, parameters in `dtype`, on the device. Yields its own buffers."""
    parameters = [(m, k, p) for m in model.modules() for k, p in m._parameters.items() if p is not None]
    buffers = [(m, k, b) for m in model.modules() for k, b in m._buffers.items() if b is not None]
    numbers = [(m, k, v) for m in model.modules() for k, v in vars(m).items() if isinstance(v, int | float)]
    copies: dict[int, torch.Tensor] = {}
    try:
        for module, key, parameter in [] if lender else parameters:
            if id(parameter) not in copies:
                copy = parameter.detach().to(device, dtype, copy=True)
                copies[id(parameter)] = parameter_like(parameter, copy)
            put(module, "_parameters", key, copies[id(parameter)])
        for module, key, buffer in buffers:
            if id(buffer) not in copies:
                copies[id(buffer)] = buffer.detach().to(device, copy=True)
            put(module, "_buffers", key, copies[id(buffer)])
        with lender.lending(model, device, dtype) if lender else contextlib.nullcontext():
            yield buffers
    finally:
        for kind, slots in (("_parameters", parameters), ("_buffers", buffers)):
            for module, key, tensor in slots:
                put(module, kind, key, tensor)
        for module, key, number in numbers:
            vars(module)[key] = number


def _changed(model: nn.Module, buffers: Slots) -> dict[str, str]:
    name_of = {id(module): name for name, module in model.named_modules()}
    pairs = [(f"{name_of[id(m)]}.{key}".lstrip("."), m._buffers[key], before) for m, key, before in buffers]
    return {name: _digest(now) for name, now, before in pairs if _digest(now) != _digest(before)}


def _digest(tensor: torch.Tensor | None) -> str:
    if tensor is None or tensor.layout is not torch.strided:
        return repr(tensor)
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode() + content.tobytes()).hexdigest()
