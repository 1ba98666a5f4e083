"""A dry run of the loss before the model is sharded: what it calls, what it changes, and whether it can be computed.

It works on copies of the model's tensors, of what its modules keep, and on random generators of its own; after it
everything is as before. The rows are those of each process, so that what depends on the data differs.

A model that was built without memory borrows its weights: a block of those that `blocks()` names while it is called,
and the rest of the model all the time, which is what sharding makes of it later. Without that method it is all of it.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import keystr, tree_leaves_with_path

from kftrain.data.loader import MicroBatch
from kftrain.errors import ConfigError, UserCodeError
from kftrain.evaluate.score import statistics_of
from kftrain.models.modes import evaluating
from kftrain.parallel import blocks
from kftrain.parallel.formats import cast_inputs
from kftrain.parallel.initialize import Weights, isolated, parameter_like, put_all, seed_all, stored_parameter
from kftrain.tasks.base import TrainingTask
from kftrain.tasks.prepare import prepare, require_sequence_dims
from kftrain.train.step import after_step, loss_of, receive_tensors, terms_of

ROWS = 2
"""Of one process's first micro batch, and as many others; more would only take longer."""

NUM_CHANCES = 8
"""In how many passes calls are looked at that may depend on chance. Of six blocks that are each left out once in ten
times, all are called in one pass of two, and in eight passes of eight once in two hundred cases."""

Slots = list[tuple[nn.Module, str, torch.Tensor]]
"""Modules, and the names and values of parameters or buffers of theirs."""


@dataclass(frozen=True)
class Seen:
    """What one process has seen; plain data."""

    calls: list[blocks.Calls]
    """Of the model and the candidates for its blocks, in each computation of the loss."""
    changed: dict[str, str]
    """Names of the buffers that the loss has changed -> digests of what they became."""
    draws: bool = False
    """Whether `task.batch` draws torch's random numbers: they are seeded for each step, so it must be called there."""


def look(
    model: nn.Module,
    task: TrainingTask,
    micro: MicroBatch,
    names: Iterable[str],
    device: torch.device,
    seed: tuple[int, int],
    lender: Lender | None = None,
    num_chances: int = 1,
) -> Seen:
    """Computes a loss and statistics in fp32. `seed`: of the run, and the rank.

    `lender`: of weights that the model has no memory for. `num_chances`: losses where random numbers are drawn.

    Raises UserCodeError where the task or the model raises, or returns another shape than it must; ConfigError where
    the model keeps a state that a resume would lose.
    """
    micro, others = first_rows(micro, ROWS), _part(micro, slice(-ROWS, None))
    terms_of(task, micro)
    before = torch.default_generator.get_state()
    require_sequence_dims(task, prepare(task, micro.arrays, device)[0])
    draws = not torch.equal(before, torch.default_generator.get_state())
    log = blocks.CallLog(model, names)

    def loss_again(rows: MicroBatch, turn: int = 0) -> float:
        with isolate(seed, device, turn):
            return loss_of(model, task, receive_tensors(task, rows, device)).item()

    with contextlib.closing(log):
        with lend_copies(model, device, torch.float32, lender) as buffers, isolate(seed, device):
            at_first, chance, saved = read_attributes(model), _state_of_chance(device), set(model.state_dict())
            loss = loss_of(model, task, receive_tensors(task, micro, device)).item()
            is_random, calls = _state_of_chance(device) != chance, [log.take()]
            _require_known(model, saved)
            changed = _changed(model, buffers)
            after_step(model)  # after that: what it changes is the same everywhere, once what it reads is combined
            attributes = read_attributes(model)
            with evaluating(model), torch.no_grad():
                statistics_of(model, task, micro.arrays, device)
        if first_difference(at_first, attributes) is not None:
            own = model.state_dict()
            with lend_copies(model, device, torch.float32, lender):
                loss_again(others)
                after_step(model)
                _restore(model, own)  # what checkpoints have is no state that is lost
                again = loss_again(micro)
                after_step(model)
                require_no_state(model, attributes, read_attributes(model), (loss, again))
        for turn in range(1, num_chances if is_random else 1):
            log.take()
            with lend_copies(model, device, torch.float32, lender):
                loss_again(micro, turn)
            calls.append(log.take())
    return Seen(calls, changed, draws)


def rehearse(
    model: nn.Module,
    task: TrainingTask,
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
        with lend_copies(model, device, dtype, lender), isolate(seed, device):
            loss_of(model, task, receive_tensors(task, first_rows(micro, ROWS), device))
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


def first_rows(micro: MicroBatch, count: int = 2 * ROWS) -> MicroBatch:
    """What is looked at of a micro batch."""
    return _part(micro, slice(count))


def _part(micro: MicroBatch, rows: slice) -> MicroBatch:
    return MicroBatch({name: array[rows] for name, array in micro.arrays.items()}, micro.weight[rows])


@contextlib.contextmanager
def isolate(seed: tuple[int, int], device: torch.device, turn: int = 0) -> Iterator[None]:
    """Random numbers of its own for the block, others in each turn; all generators go on as if it had not been."""
    with isolated(device):
        seed_all(hash((*seed, turn)) % 2**63, device)
        yield


def _state_of_chance(device: torch.device) -> Any:
    """Of all generators that a forward pass may ask."""
    on_device = torch.cuda.get_rng_state(device).tolist() if device.type == "cuda" else []
    return random.getstate(), repr(np.random.get_state()), torch.default_generator.get_state().tolist(), on_device


@contextlib.contextmanager
def lend_copies(
    model: nn.Module, device: torch.device, dtype: torch.dtype, lender: Lender | None = None
) -> Iterator[Slots]:
    """The model with copies of its tensors, parameters in `dtype`, on the device, and of what else its modules keep.

    Yields its own buffers.
    """
    buffers = [(m, k, b) for m in model.modules() for k, b in m._buffers.items() if b is not None]
    copies = {id(each): each.detach().to(device, copy=True) for each in model.buffers()}
    for each in [] if lender else model.parameters():
        copies[id(each)] = parameter_like(each, each.detach().to(device, dtype, copy=True))
    lending = lender.lending(model, device, dtype) if lender else contextlib.nullcontext()
    with lend_attributes(model, copies), lending:
        yield buffers


@torch.no_grad()
def _restore(model: nn.Module, state: Mapping[str, Any]) -> None:
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, torch.Tensor) and tensor.shape == state[name].shape and not state[name].is_meta:
            tensor.copy_(state[name])


def _require_known(model: nn.Module, saved: Collection[str]) -> None:
    """Raises ConfigError for a saved tensor that a forward pass has made: a model that resumes would not know it."""
    for name in model.state_dict().keys() - saved:
        what = "the forward pass makes a tensor that checkpoints hold, and that a model has not when it resumes"
        fix = "make it in the constructor, or register a buffer with persistent=False"
        raise ConfigError(what, where=f"model {name}", fix=fix)


def _changed(model: nn.Module, buffers: Slots) -> dict[str, str]:
    name_of = {id(module): name for name, module in model.named_modules()}
    pairs = [(f"{name_of[id(m)]}.{key}".lstrip("."), m._buffers[key], before) for m, key, before in buffers]
    return {name: _digest(now) for name, now, before in pairs if _digest(now) != _digest(before)}


def _digest(tensor: torch.Tensor | None) -> str:
    if tensor is None or tensor.layout is not torch.strided:
        return repr(tensor)
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode() + content.tobytes()).hexdigest()


@dataclass(frozen=True)
class Lender:
    """Lends `weights` to the model that they are of. `units`: names of the blocks that get theirs when called."""

    weights: Weights
    units: Sequence[str]
    tell: Callable[[str, nn.Parameter], object] = lambda *_: None
    """Callback for each parameter that is lent, each time, with its name."""

    @contextlib.contextmanager
    def lending(self, model: nn.Module, device: torch.device, dtype: torch.dtype) -> Iterator[None]:
        """Let the model be called within the block; parameters are in `dtype`, on the device."""
        loans = _Loans(self, device, dtype)
        handles = []
        with contextlib.ExitStack() as stack:
            left = set(self.weights.places)
            for unit in self.units:
                module = model.get_submodule(unit)
                own = [name for name in self.weights.places if name in left and self._is_within(name, module)]
                left -= set(own)
                # always_call: a block that raises gives its weights back, too.
                handles.append(module.register_forward_pre_hook(lambda *_, own=own: loans.lend(own)))
                handles.append(module.register_forward_hook(lambda *_, own=own: loans.take_back(own), always_call=True))
            for handle in handles:
                stack.callback(handle.remove)
            loans.lend([name for name in self.weights.places if name in left])
            stack.callback(loans.take_back, sorted(left))
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(loans.pack, loans.unpack))
            yield

    def _is_within(self, name: str, module: nn.Module) -> bool:
        owner = self.weights.places[name][0][0]
        return any(part is owner for part in module.modules())


class _Loans:
    """The weights that are lent at the moment.

    Autograd keeps the name of a weight instead of the weight, which would hold its memory to the end of the backward
    pass. There it is made anew, with the same values. A weight is known by the address of its memory, since what
    autograd saves may be a view of it, such as the transpose.
    """

    def __init__(self, lender: Lender, device: torch.device, dtype: torch.dtype) -> None:
        self._weights = lender.weights
        self._device = device
        self._dtype = dtype
        self._tell = lender.tell
        self._empty: dict[str, nn.Parameter] = {}
        self._name_of: dict[int, str] = {}

    def lend(self, names: Sequence[str]) -> None:
        for name in names:
            slots = self._weights.places[name]
            empty = stored_parameter(slots[0])
            assert name not in self._empty
            parameter = parameter_like(empty, self._value(name))
            self._empty[name] = empty
            if parameter.numel():
                self._name_of[_address(parameter)] = name
            put_all(slots, parameter)
            self._tell(name, parameter)

    def take_back(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self._empty:
                continue
            slots = self._weights.places[name]
            lent = stored_parameter(slots[0])
            self._name_of.pop(_address(lent), None)  # the next tensor there would be taken for this weight
            put_all(slots, self._empty.pop(name))
            lent.data = lent.data.new_empty(0)  # the graph of the loss keeps the parameter, but not its memory

    def pack(self, tensor: torch.Tensor) -> Any:
        name = self._name_of.get(_address(tensor))
        return tensor if name is None else (name, tensor.shape, tensor.stride(), tensor.storage_offset())

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        name, shape, stride, offset = packed
        return self._value(name).as_strided(shape, stride, offset)

    def _value(self, name: str) -> torch.Tensor:
        with isolated(self._device):  # what the forward pass draws does not depend on what is lent meanwhile
            return self._weights.whole(name, self._device).to(self._dtype)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


DECLARATION = "unsaved_attributes"
"""Of a model that keeps such a state all the same: patterns of names, `layers.*.num_calls`."""

TOLERANCE = 1e-5
"""Relative: a GPU's kernels do not sum in the same order each time."""

Leaves = dict[tuple[str, str], Any]
"""Name of an attribute, and where it is in it -> tensor, number or text."""

_OF_TORCH = frozenset(vars(nn.Module()))
_CONTAINERS = ("_modules", "_non_persistent_buffers_set", "_forward_hooks")


@contextlib.contextmanager
def lend_attributes(model: nn.Module, tensors: Mapping[int, torch.Tensor] | None = None) -> Iterator[None]:
    """Within it modules work on copies of what they keep; after it they have what they had, and nothing more.

    What cannot be copied (a lock, torch's generator, an open file) stays the same. `tensors`: by the `id` of parameters
    and buffers, what stands in for them wherever they are.
    """
    shared: list[Any] = [*model.modules(), *model.parameters(), *model.buffers()]
    shared += [random.uniform.__self__, np.random.mtrand._rand]  # type: ignore[attr-defined]
    memo = {**{id(each): each for each in shared}, **(tensors or {})}
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    try:
        for attributes, own in before:
            attributes.update({key: copy.copy(own[key]) for key in _CONTAINERS})
            for kind in ("_parameters", "_buffers"):
                attributes[kind] = {key: memo.get(id(each), each) for key, each in own[kind].items()}
            attributes.update({key: _copy_of(own[key], memo) for key in own if key not in _OF_TORCH})
        yield
    finally:
        for attributes, own in before:
            attributes.clear()
            attributes.update(own)


def _copy_of(value: Any, memo: dict[int, Any]) -> Any:
    num_copies = len(memo)
    try:
        return value if callable(value) else copy.deepcopy(value, memo)
    except (TypeError, RuntimeError, NotImplementedError):
        while len(memo) > num_copies:  # what is half a copy is nobody else's
            memo.popitem()
        return value


def read_attributes(model: nn.Module) -> Leaves:
    """All of it, as it is now."""
    leaves: Leaves = {}
    for name, module in model.named_modules():
        own = {key: value for key, value in vars(module).items() if key not in _OF_TORCH}
        own |= {key: module._buffers.get(key) for key in module._non_persistent_buffers_set}
        for path, leaf in tree_leaves_with_path(own):
            leaves[f"{name}.{path[0].key}".lstrip("."), keystr(path[1:])] = _value_of(leaf)  # type: ignore[attr-defined]
    return leaves


def _value_of(leaf: Any) -> Any:
    """A copy of what may be state; None of anything else."""
    if isinstance(leaf, torch.Tensor):
        return None if isinstance(leaf, nn.Parameter) or leaf.is_meta else leaf.detach().clone()
    if isinstance(leaf, torch.Generator | np.ndarray):
        return leaf.get_state() if isinstance(leaf, torch.Generator) else leaf.tobytes()
    return copy.copy(leaf) if isinstance(leaf, int | float | complex | str | bytes | set | np.generic) else None


def first_difference(one: Leaves, other: Leaves) -> str | None:
    """The name of the first attribute that is not the same in both."""
    labels = dict.fromkeys([*one, *other])
    return next((name for name, at in labels if not _is_alike(one.get((name, at)), other.get((name, at)))), None)


def _is_alike(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and bool(one == other or one != one)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return (
        torch.allclose(one, other, TOLERANCE, TOLERANCE, True) if one.is_floating_point() else torch.equal(one, other)
    )


def require_no_state(model: nn.Module, once: Leaves, again: Leaves, losses: tuple[float, float]) -> None:
    """Raises ConfigError where what some rows leave (`once`), or their loss, is not the same after others (`again`)."""
    patterns = getattr(model, DECLARATION, ())
    once, again = (
        {label: value for label, value in each.items() if not any(fnmatchcase(label[0], p) for p in patterns)}
        for each in (once, again)
    )
    name = first_difference(once, again)
    if name is None and (patterns or abs(losses[0] - losses[1]) <= TOLERANCE * abs(losses[0])):
        return
    raise ConfigError(
        "the forward pass keeps a state that no checkpoint has: it begins anew on resume and differs by process",
        where=f"model {name}" if name else "model",
        fix=f"register it as a persistent buffer, or name it in the model's {DECLARATION} where that does no harm",
    )
