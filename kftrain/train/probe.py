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
from kftrain.data.schema import Arrays
from kftrain.errors import ConfigError, UserCodeError
from kftrain.evaluate.score import statistics_of
from kftrain.models.base import run_pieces
from kftrain.models.modes import evaluating
from kftrain.parallel import blocks
from kftrain.parallel.buffers import read_reductions
from kftrain.parallel.formats import NAMES, cast_inputs
from kftrain.parallel.initialize import Weights, isolate_generators, parameter_like, put_all, seed_all, stored_parameter
from kftrain.tasks.base import TrainingTask
from kftrain.tasks.prepare import prepare_batch, require_sequence_dims
from kftrain.train.stage_modules import list_pieces
from kftrain.train.step import (
    call_after_step,
    compute_loss_sum,
    count_loss_terms,
    give_row_weights,
    receive_tensors,
)

ROWS = 2
"""Number of rows that are tried from the front of a process's first micro batch, and as many from its end."""

MAX_PLACES = 512
"""Number of places of a sequence that are tried where several processes share it, rounded up to what they divide."""

NUM_CHANCES = 8
"""Number of passes in which calls are observed that may depend on chance. Of six blocks that are each left out once in
ten times, all are called in one pass of two, and in eight passes of eight once in two hundred cases."""

Slots = list[tuple[nn.Module, str, torch.Tensor]]
"""Modules with the names and values of their buffers."""


@dataclass(frozen=True)
class LossObservation:
    """The findings of one process about the loss of some rows; plain data, which is gathered from all."""

    calls: list[blocks.Calls]
    """Calls of the model and of the candidates for its blocks, in each computation of the loss."""
    changed: dict[str, str]
    """Name of a buffer that the loss has changed -> digest of its new content."""
    batch_draws: bool = False
    """True where `task.batch` draws torch's random numbers: a step seeds those, so it is called within the step."""
    draws: bool = False
    """True where the loss draws random numbers."""
    steps_use_parameters: bool = False
    """True where `after_step` reads or changes parameters."""


def observe_loss(
    model: nn.Module,
    task: TrainingTask,
    micro: MicroBatch,
    names: Iterable[str],
    device: torch.device,
    seed: tuple[int, int],
    lender: Lender | None = None,
    num_chances: int = 1,
) -> LossObservation:
    """Compute a loss and statistics in fp32, and see what that calls, changes and keeps.

    `names`: candidates for blocks. `seed`: of the run, and the rank. `lender`: lends weights that the model has no
    memory for. `num_chances`: number of losses where random numbers are drawn.

    Raises UserCodeError where the task or the model raises, or returns another shape than it must; ConfigError where
    the model keeps a state that a resume would lose.
    """
    micro, others = take_rows(micro, slice(ROWS)), take_rows(micro, slice(-ROWS, None))
    count_loss_terms(task, micro)
    # The batch alone, before the model is called: what that draws must not be taken for the task's.
    before = torch.default_generator.get_state()
    require_sequence_dims(task, prepare_batch(task, micro.arrays, device)[0])
    draws = not torch.equal(before, torch.default_generator.get_state())
    log = blocks.CallLog(model, names)

    def loss_again(rows: MicroBatch, turn: int = 0) -> float:
        with isolate(seed, device, turn):
            return compute_loss_sum(model, task, receive_tensors(task, rows, device)).item()

    with contextlib.closing(log):
        with lend_copies(model, device, torch.float32, lender) as buffers, isolate(seed, device):
            at_first, chance, saved = read_attributes(model), _read_generators(device), set(model.state_dict())
            loss = compute_loss_sum(model, task, receive_tensors(task, micro, device)).item()
            is_random, calls = _read_generators(device) != chance, [log.take()]
            _require_no_new_tensors(model, saved)
            changed = _hash_changed_buffers(model, buffers)
            # After that: what it changes is the same everywhere, once what it reads is combined.
            uses = call_after_step(model)
            attributes = read_attributes(model)
            with evaluating(model), torch.no_grad():
                statistics_of(model, task, micro.arrays, device)
        # An attribute has changed. It is harmless where the same rows leave the same in it after other rows as they did
        # at first: so compute others, then the first again, each with the buffers and weights of the beginning.
        if find_first_difference(at_first, attributes) is not None:
            own = model.state_dict()
            with lend_copies(model, device, torch.float32, lender):
                loss_again(others)
                call_after_step(model)
                _restore(model, own)  # tensors that checkpoints hold are no state that is lost
                again = loss_again(micro)
                call_after_step(model)
                require_no_state(model, attributes, read_attributes(model), (loss, again))
        # A block that chance leaves out in one pass is called in another: look at several, with other numbers in each.
        for turn in range(1, num_chances if is_random else 1):
            log.take()
            with lend_copies(model, device, torch.float32, lender):
                loss_again(micro, turn)
            calls.append(log.take())
    return LossObservation(calls, changed, draws, is_random, uses)


def require_pieces(
    model: nn.Module, task: TrainingTask, micro: MicroBatch, device: torch.device, seed: tuple[int, int], lender: Lender
) -> None:
    """Raises ConfigError where the pieces of a model do not compute what its forward does, or count otherwise."""
    tensors, losses = receive_tensors(task, take_rows(micro, slice(ROWS)), device), []
    pieces, counts = list_pieces(model), list[dict[str, torch.Tensor]]()

    def run_one_by_one(*inputs: Any) -> Any:  # as if they were stages
        value = None
        for piece in pieces:
            give_row_weights(model, tensors.weight)
            value = run_pieces(model, [piece], value, inputs)
            sent = value if isinstance(value, tuple | list) else [value]
            if piece is not pieces[-1] and not all(isinstance(part, torch.Tensor) for part in sent):
                what, fix = "a piece returns what cannot travel to another stage", "return a tensor, or a tuple of them"
                raise ConfigError(what, where="model.stages", value=type(value).__name__, fix=fix)
        return value

    for compute in (model, run_one_by_one):
        with lend_copies(model, device, torch.float32, lender), isolate(seed, device):
            losses.append(compute_loss_sum(compute, task, tensors).item())
            counts.append({name: model.get_buffer(name).double() for name in read_reductions(model)})
    if abs(losses[0] - losses[1]) > TOLERANCE * abs(losses[0]):
        what, value = "the pieces of stages() do not compute what forward does", f"{losses[1]:.6g}, not {losses[0]:.6g}"
        raise ConfigError(what, where="model.stages", value=value, fix="let forward run the same pieces")
    for name, of_forward in counts[0].items():
        if not torch.allclose(of_forward, counts[1][name], rtol=TOLERANCE, atol=0.0, equal_nan=True):
            raise ConfigError(
                "the pieces of stages(), as stages of their own, do not add to a buffer what forward does",
                where=f"model {name}",
                fix="count within the pieces, each of them for itself",
            )


def rehearse(
    model: nn.Module,
    task: TrainingTask,
    micro: MicroBatch,
    names: Sequence[str],
    dtype: torch.dtype,
    device: torch.device,
    seed: tuple[int, int],
    lender: Lender | None = None,
) -> None:
    """Compute a loss in mixed precision: with weights in `dtype`, and inputs of the model and its blocks cast to it.

    Raises ConfigError where the model cannot be computed so.
    """
    # By hooks, as the formats of a step do it: so what fails here would fail there, and buffers stay as they are.
    handles = cast_inputs(model, names, dtype)
    try:
        with lend_copies(model, device, dtype, lender), isolate(seed, device):
            compute_loss_sum(model, task, receive_tensors(task, take_rows(micro, slice(ROWS)), device))
    except UserCodeError as error:
        raise ConfigError(
            f"the model cannot be computed in {NAMES[dtype]}: {error.what}",
            where="precision.compute",
            fix="cast in its forward what is not cast for it (buffers stay in fp32), or set it to fp32",
        ) from error
    finally:
        for handle in handles:
            handle.remove()


def require_equal_buffers(seen: list[LossObservation], combined: Collection[str] = ()) -> None:
    """Raises ConfigError where a loss leaves other buffers on one process than on another: they would drift apart.

    A buffer that becomes the same on all of them, such as a count of steps, may change, and so may those that are
    combined after each step: `combined`, names.
    """
    for name in sorted({name for process in seen for name in process.changed} - set(combined)):
        if len({process.changed.get(name) for process in seen}) > 1:
            raise ConfigError(
                "a buffer that the forward pass changes differs from process to process",
                where=f"model {name}",
                fix="name it in the model's buffer_reductions, train a parameter instead, or use one process",
            )


def take_rows(micro: MicroBatch, rows: slice = slice(2 * ROWS)) -> MicroBatch:
    """Return a micro batch of some rows; by default of the first ones, all that a dry run needs."""
    return MicroBatch({name: array[rows] for name, array in micro.arrays.items()}, micro.weight[rows])


def shorten_sequences(task: TrainingTask, multiple: int) -> None:
    """Let a task make batches of the first places of its sequences, `multiple` or a few times that.

    A dry run needs no long ones, which may be too long for one process.
    """
    make, dims = task.batch, task.sequence_dims
    num_places = multiple * -(-MAX_PLACES // multiple)

    def make_short(arrays: Arrays) -> dict[str, torch.Tensor]:
        return {
            name: whole.narrow(dims[name], 0, min(num_places, whole.shape[dims[name]])) if name in dims else whole
            for name, whole in make(arrays).items()
        }

    setattr(task, "batch", make_short)  # noqa: B010 - mypy knows methods of classes only


@contextlib.contextmanager
def isolate(seed: tuple[int, int], device: torch.device, turn: int = 0) -> Iterator[None]:
    """Give the block random numbers of its own, others in each turn; then let all generators go on as before it."""
    with isolate_generators(device):
        seed_all(hash((*seed, turn)) % 2**63, device)  # a hash of whole numbers, which every process computes alike
        yield


def _read_generators(device: torch.device) -> Any:
    """Read the states of all generators that a forward pass may draw from, to compare them."""
    on_device = torch.cuda.get_rng_state(device).tolist() if device.type == "cuda" else []
    # As text and lists: states with arrays in them cannot be compared as they are.
    return random.getstate(), repr(np.random.get_state()), torch.default_generator.get_state().tolist(), on_device


@contextlib.contextmanager
def lend_copies(
    model: nn.Module, device: torch.device, dtype: torch.dtype, lender: Lender | None = None
) -> Iterator[Slots]:
    """Let the model work within the block on copies of all that it keeps; yield its own buffers, which do not change.

    Copies are on the device, parameters in `dtype`; with a lender it lends the parameters instead.
    """
    buffers = [(m, k, b) for m in model.modules() for k, b in m._buffers.items() if b is not None]
    # By identity: what several modules share is one copy, which they share again.
    copies = {id(buffer): buffer.detach().to(device, copy=True) for buffer in model.buffers()}
    for parameter in [] if lender else model.parameters():
        copies[id(parameter)] = parameter_like(parameter, parameter.detach().to(device, dtype, copy=True))
    loan = lender.lend(model, device, dtype) if lender else contextlib.nullcontext()
    with lend_attributes(model, copies), loan:
        yield buffers


@torch.no_grad()
def _restore(model: nn.Module, state: Mapping[str, Any]) -> None:
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, torch.Tensor) and tensor.shape == state[name].shape and not state[name].is_meta:
            tensor.copy_(state[name])


def _require_no_new_tensors(model: nn.Module, saved: Collection[str]) -> None:
    """Raises ConfigError for a tensor of `state_dict` that a forward pass has made: a resuming model would lack it."""
    for name in model.state_dict().keys() - saved:
        what = "the forward pass makes a tensor that checkpoints hold, and that a model has not when it resumes"
        fix = "make it in the constructor, or register a buffer with persistent=False"
        raise ConfigError(what, where=f"model {name}", fix=fix)


def _hash_changed_buffers(model: nn.Module, buffers: Slots) -> dict[str, str]:
    """Return name -> digest of each buffer of the model that differs from `buffers`, those of before."""
    name_of = {id(module): name for name, module in model.named_modules()}
    pairs = [(f"{name_of[id(m)]}.{key}".lstrip("."), m._buffers[key], before) for m, key, before in buffers]
    return {name: _hash_tensor(now) for name, now, before in pairs if _hash_tensor(now) != _hash_tensor(before)}


def _hash_tensor(tensor: torch.Tensor | None) -> str:
    if tensor is None or tensor.layout is not torch.strided:
        return repr(tensor)
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode() + content.tobytes()).hexdigest()


@dataclass(frozen=True)
class Lender:
    """Lends a model without memory its weights: a block's while that is called, all others all the time.

    `units`: names of the blocks that get theirs when called.
    """

    weights: Weights
    units: Sequence[str]
    tell: Callable[[str, nn.Parameter], object] = lambda *_: None
    """Callback for each parameter that is lent, each time, with its name."""

    @contextlib.contextmanager
    def lend(self, model: nn.Module, device: torch.device, dtype: torch.dtype) -> Iterator[None]:
        """Let the model be called within the block, with parameters in `dtype` on the device."""
        loans = _Loans(self, device, dtype)
        handles = []
        with contextlib.ExitStack() as stack:
            # A parameter belongs to the first unit that contains it; what none contains is lent all the time.
            left = set(self.weights.places)
            for unit in self.units:
                module = model.get_submodule(unit)
                parts = set(module.modules())
                own = [name for name, slots in self.weights.places.items() if name in left and slots[0][0] in parts]
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


class _Loans:
    """The weights that are lent at the moment, and where autograd needs them again.

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
                self._name_of[_address_of(parameter)] = name
            put_all(slots, parameter)
            self._tell(name, parameter)

    def take_back(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self._empty:
                continue
            slots = self._weights.places[name]
            lent = stored_parameter(slots[0])
            self._name_of.pop(_address_of(lent), None)  # the next tensor there would be taken for this weight
            put_all(slots, self._empty.pop(name))
            lent.data = lent.data.new_empty(0)  # the graph of the loss keeps the parameter, but not its memory

    def pack(self, tensor: torch.Tensor) -> Any:
        name = self._name_of.get(_address_of(tensor))
        return tensor if name is None else (name, tensor.shape, tensor.stride(), tensor.storage_offset())

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        name, shape, stride, offset = packed
        return self._value(name).as_strided(shape, stride, offset)

    def _value(self, name: str) -> torch.Tensor:
        with isolate_generators(self._device):  # what the forward pass draws does not depend on what is lent meanwhile
            return self._weights.whole(name, self._device).to(self._dtype)


def _address_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


DECLARATION = "unsaved_attributes"
"""Attribute of a model that keeps such a state on purpose: patterns of names, such as `layers.*.num_calls`."""

TOLERANCE = 1e-5
"""Relative difference that counts as none: a GPU's kernels do not sum in the same order each time."""

Leaves = dict[tuple[str, str], Any]
"""(Name of an attribute, path within its value) -> tensor, number or text."""

# Modules keep more than parameters and saved buffers: attributes, lists and dicts in them, buffers of no checkpoint. A
# table that is computed once or the last output does no harm: their next values do not depend on the last ones. Those
# of a count, an average or statistics of the first rows do: they begin anew on resume, and differ by process.

_OF_TORCH = frozenset(vars(nn.Module()))
_CONTAINERS = ("_modules", "_non_persistent_buffers_set", "_forward_hooks")


@contextlib.contextmanager
def lend_attributes(model: nn.Module, tensors: Mapping[int, torch.Tensor] | None = None) -> Iterator[None]:
    """Let modules work within the block on copies of what they keep; then give them back what they had, and no more.

    Values that cannot be copied (a lock, torch's generator, an open file) stay the same. `tensors`: stand-ins for
    parameters and buffers, by their `id`, wherever they are.
    """
    # Not copied with the attributes that lead to them: modules and their tensors, which may have stand-ins, and the
    # global generators, for a copy of one would be drawn from instead of it.
    shared: list[Any] = [*model.modules(), *model.parameters(), *model.buffers()]
    shared += [random.uniform.__self__, np.random.mtrand._rand]  # type: ignore[attr-defined]
    memo = {**{id(item): item for item in shared}, **(tensors or {})}  # deepcopy takes these instead of copying
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    try:
        for attributes, own in before:
            attributes.update({key: copy.copy(own[key]) for key in _CONTAINERS})
            for kind in ("_parameters", "_buffers"):
                attributes[kind] = {key: memo.get(id(tensor), tensor) for key, tensor in own[kind].items()}
            attributes.update({key: _copy_value(own[key], memo) for key in own if key not in _OF_TORCH})
        yield
    finally:
        for attributes, own in before:  # in place: it is the module's own __dict__
            attributes.clear()
            attributes.update(own)


def _copy_value(value: Any, memo: dict[int, Any]) -> Any:
    num_copies = len(memo)
    try:
        return value if callable(value) else copy.deepcopy(value, memo)
    except (TypeError, RuntimeError, NotImplementedError):
        while len(memo) > num_copies:  # else another attribute would get the half of a copy that was made
            memo.popitem()
        return value


def read_attributes(model: nn.Module) -> Leaves:
    """Read the attributes and unsaved buffers of all modules, as they are now."""
    leaves: Leaves = {}
    for name, module in model.named_modules():
        own = {key: value for key, value in vars(module).items() if key not in _OF_TORCH}
        own |= {key: module._buffers.get(key) for key in module._non_persistent_buffers_set}
        for path, leaf in tree_leaves_with_path(own):
            leaves[f"{name}.{path[0].key}".lstrip("."), keystr(path[1:])] = _read_value(leaf)  # type: ignore[attr-defined]
    return leaves


def _read_value(leaf: Any) -> Any:
    """Copy a leaf that may be state; return None for anything else."""
    if isinstance(leaf, torch.Tensor):
        return None if isinstance(leaf, nn.Parameter) or leaf.is_meta else leaf.detach().clone()
    if isinstance(leaf, torch.Generator | np.ndarray):
        return leaf.get_state() if isinstance(leaf, torch.Generator) else leaf.tobytes()
    return copy.copy(leaf) if isinstance(leaf, int | float | complex | str | bytes | set | np.generic) else None


def find_first_difference(one: Leaves, other: Leaves) -> str | None:
    """Return the name of the first attribute that is not the same in both; None where there is none."""
    labels = dict.fromkeys([*one, *other])
    return next((name for name, at in labels if not _is_alike(one.get((name, at)), other.get((name, at)))), None)


def _is_alike(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and bool(one == other or one != one)  # not-a-number differs from itself only
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return (
        torch.allclose(one, other, TOLERANCE, TOLERANCE, True) if one.is_floating_point() else torch.equal(one, other)
    )


def require_no_state(model: nn.Module, once: Leaves, again: Leaves, losses: tuple[float, float]) -> None:
    """Raises ConfigError where some rows leave other attributes, or have another loss, after others than at first.

    `once`, `again`: attributes after the rows at first, and after others. `losses`: of both times.
    """
    patterns = getattr(model, DECLARATION, ())
    once, again = (
        {label: value for label, value in leaves.items() if not any(fnmatchcase(label[0], p) for p in patterns)}
        for leaves in (once, again)
    )
    name = find_first_difference(once, again)
    if name is None and (patterns or abs(losses[0] - losses[1]) <= TOLERANCE * abs(losses[0])):
        return
    raise ConfigError(
        "the forward pass keeps a state that no checkpoint has: it begins anew on resume and differs by process",
        where=f"model {name}" if name else "model",
        fix=f"register it as a persistent buffer, or name it in the model's {DECLARATION} where that does no harm",
    )
