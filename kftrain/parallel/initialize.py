"""Initial weights of a model that was built without memory for them, and then wrapped.

They come from one generator for each parameter's name (`Drawn`), and then no process ever holds more than its share and
one parameter; or from the first process, whose constructor has made all of them (`Scattered`). Either way they depend
neither on the number of processes nor on the layout.

Only parameters are without memory: what a constructor computes for buffers and attributes (rotary tables, masks) is
there, and after `share_tensors` it is the first process's on all of them.

The order is: build without memory, wrap, fill. Wrapping replaces parameters, so `Places` remembers where each stood, by
module and key; filled before wrapping, a process would need memory for the whole model.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from kftrain.core.plugins import user_code
from kftrain.core.progress import to_log
from kftrain.errors import ConfigError, UserCodeError
from kftrain.parallel.gradients import watch_units
from kftrain.parallel.sharded import Part, index_in, part_of
from kftrain.parallel.world import World

Init = Callable[[str, torch.Tensor, torch.Generator], None]
"""Type of a model's `init_weights`: name of a parameter, the parameter to fill in place, the generator to draw from."""

Slot = tuple[nn.Module, str]
"""A module, and its name of a parameter."""


class Places(dict[str, list[Slot]]):
    """Name of a parameter -> the modules that have it, and what each calls it: several for a tied one."""

    attributes: dict[str, dict[str, Any]]
    """Attributes that others have set on each parameter, by its name."""


HOST = torch.device("cpu")

ABSENT: Part = ((0,), (0,))
"""The part that a process has of a parameter of another stage: nothing."""

_DTensor: Any = DTensor
"""`DTensor`, whose constructor is not typed."""


class Weights(Protocol):
    """A source of a model's initial weights."""

    places: Places

    @property
    def is_here(self) -> bool:
        """True where this process can tell the whole of a parameter."""

    def whole(self, name: str, device: torch.device) -> torch.Tensor:
        """Return a copy of the whole of a parameter, fp32; before `fill`, and where `is_here`."""

    def fill(self, model: nn.Module, on_host: bool = False) -> None:
        """Give this process's parts memory and values; `model` is what became of the one that has the places.

        `on_host`: in the host's memory, whatever the device.
        """


class Drawn:
    """Weights that the model's `init_weights` draws, each parameter with a generator of its own."""

    is_here = True

    def __init__(self, places: Places, init: Init, seed: int, device: torch.device) -> None:
        self.places = places
        self._init = init
        self._seed = seed
        self._device = device

    def whole(self, name: str, device: torch.device) -> torch.Tensor:
        """Draw a parameter on the device. Raises UserCodeError where `init_weights` leaves a part of it without value.

        Devices draw different numbers: the weights of a training are always drawn on the CPU (`fill`).
        """
        shape = stored_parameter(self.places[name][0]).shape
        parameter = torch.full(shape, float("nan"), dtype=torch.float32, device=device)
        with torch.no_grad(), user_code("model.init_weights"):
            # Seeded by the name: what a parameter gets depends on no other one, so neither on order nor on layout.
            digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
            self._init(name, parameter, seed_all(int.from_bytes(digest[:8], "little") >> 1, device))
        if parameter.sum().isnan():  # a number that was not filled is NaN, and one makes the sum so
            raise UserCodeError(
                "gives no value to all of a parameter", where="model.init_weights", value=name, fix="fill it in place"
            )
        return parameter

    def fill(self, model: nn.Module, on_host: bool = False) -> None:
        """Draw one parameter at a time; the whole of it is there until this process's part is cut out."""

        def draw_part(name: str, part: Part) -> torch.Tensor:
            if part == ABSENT:
                return torch.empty(0)
            whole = self.whole(name, torch.device("cpu"))
            return whole if whole.shape == part[1] else whole[index_in(part)].clone()  # a view would keep the whole

        with isolate_generators():  # `whole` seeds all generators, and training must not go on from the last seed
            fill_parts(model, self.places, draw_part, HOST if on_host else self._device)


class Scattered:
    """Weights that the first process has on its CPU, because it has built or read them; it sends the others theirs."""

    def __init__(self, places: Places, world: World, values: dict[str, torch.Tensor] | None = None) -> None:
        """Take `values` of the first process, fp32, by the names of `places`; None takes those of its parameters."""
        self.places = places
        self._world = world
        self._values: dict[str, torch.Tensor] = {}
        if self.is_here:
            own = {name: stored_parameter(slots[0]).detach() for name, slots in places.items()}
            self._values = own if values is None else dict(values)
            empty_parameters(places)

    @property
    def is_here(self) -> bool:
        """True on the first process, which has the values."""
        return self._world.is_main

    def whole(self, name: str, device: torch.device) -> torch.Tensor:
        """Copy a parameter as the constructor has left it."""
        return self._values[name].to(device, copy=True)

    def fill(self, model: nn.Module, on_host: bool = False) -> None:
        """Send each process its part, one parameter after the other, from the first process. Collective."""
        own = {name: part_in(slots[0]) for name, slots in self.places.items()}
        everyones = self._world.gather(own) if self._world.size > 1 else [own]

        def receive(name: str, part: Part) -> torch.Tensor:
            # Popped: the first process frees each whole as soon as it is sent.
            return self._exchange(self._values.pop(name, None), [parts[name] for parts in everyones])

        fill_parts(model, self.places, receive, HOST if on_host else self._world.device)

    def _exchange(self, whole: torch.Tensor | None, parts: list[Part]) -> torch.Tensor:
        """Return this process's part. `whole`: the parameter on the first process, None on the others."""
        # Every process knows all parts, so sender and receiver agree on what is sent: an empty part is not, and what
        # all have in common is broadcast. Sends go by rank, and each other process waits for exactly one.
        rank, group = self._world.rank, self._world.control
        own = torch.empty(parts[rank][1], dtype=torch.float32) if whole is None else whole[index_in(parts[0])]
        if len(parts) > 1 and all(part == parts[0] for part in parts):  # all have all of it
            own = own.contiguous()
            dist.broadcast(own, src=0, group=group)
        elif whole is None:
            if own.numel():
                dist.recv(own, src=0, group=group)
        else:
            for other, part in enumerate(parts[1:], start=1):
                if 0 not in part[1]:
                    dist.send(whole[index_in(part)].contiguous(), dst=other, group=group)
        return own if whole is None or own.shape == whole.shape else own.clone()


@contextlib.contextmanager
def take_memory_of_parameters() -> Iterator[None]:
    """Take the memory of the parameters that this thread builds within the block; they stay the same objects."""
    thread = threading.get_ident()  # the hook is for the whole process: another thread's models keep theirs

    def empty(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> None:
        if parameter is None or parameter.is_meta or is_lazy(parameter):
            return
        if threading.get_ident() == thread:
            give_memory(parameter, torch.empty_like(parameter, device="meta"))

    handle = register_module_parameter_registration_hook(empty)
    try:
        yield
    finally:
        handle.remove()


def places_of(model: nn.Module) -> Places:
    """List where each parameter stands, in the order of `named_parameters`."""
    names: dict[int, str] = {}
    places = Places()
    for module_name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                name = names.setdefault(id(parameter), f"{module_name}.{key}".lstrip("."))
                places.setdefault(name, []).append((module, key))
    places.attributes = {name: dict(vars(stored_parameter(slots[0]))) for name, slots in places.items()}
    return places


def empty_parameters(places: Places) -> None:
    """Take the memory of all parameters that have some."""
    for slots in places.values():
        parameter = stored_parameter(slots[0])
        if not parameter.is_meta:
            give_memory(parameter, torch.empty_like(parameter, device="meta"))


def give_memory(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Give a parameter other memory; it stays the same object, with its hooks, its attributes and its type."""
    hooks = set_hooks(parameter, None, None)  # they would go with the old memory
    torch._C._swap_tensor_impl(parameter, parameter_like(parameter, value))
    set_hooks(parameter, *hooks)


def set_hooks(parameter: Any, of_gradient: Any, of_parameter: Any) -> tuple[Any, Any]:
    """Set a parameter's hooks of torch's two kinds, with the gradient and after its sum; return those of before."""
    before = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    parameter._backward_hooks = of_gradient
    parameter._post_accumulate_grad_hooks = of_parameter
    return before


def parameter_like(old: torch.Tensor, value: torch.Tensor) -> nn.Parameter:
    """Make a parameter with this value that is trained where `old` is, with its attributes and its own type, if any."""
    if type(old) in (nn.Parameter, DTensor):
        parameter = nn.Parameter(value, old.requires_grad)
    else:
        parameter = torch.Tensor._make_subclass(type(old), value, old.requires_grad)  # type: ignore[assignment]
    parameter.__dict__.update(old.__dict__)
    return parameter


def replace_parameters(
    slots: Sequence[Slot], value_of: Callable[[Any], torch.Tensor]
) -> contextlib.AbstractContextManager[None]:
    """Put `value_of` each parameter in its places within the block, with its attributes and its own type, if any."""
    # One value for each parameter, not for each place: a tied one stays tied, and its gradients meet in one tensor.
    values = {parameter: value_of(parameter) for parameter in map(stored_parameter, slots)}
    return stand_in([(*slot, stored_parameter(slot), values[stored_parameter(slot)]) for slot in slots])


@contextlib.contextmanager
def stand_in(places: Sequence[tuple[nn.Module, str, Any, Any]]) -> Iterator[None]:
    """Let values stand in for parameters within the block. `places`: module, key, parameter and value of each."""
    flags, plain_types = [value.requires_grad for *_, value in places], (nn.Parameter, DTensor)
    for module, key, parameter, value in places:
        if attributes := parameter.__dict__:
            value.__dict__.update(attributes)
        if type(parameter) not in plain_types:
            value.__class__ = type(parameter)
        module._parameters[key] = value
    try:
        yield
    finally:
        for (module, key, parameter, value), flag in zip(places, flags, strict=True):
            module._parameters[key] = parameter
            if value._backward_hooks:
                parameter._backward_hooks = parameter._backward_hooks or value._backward_hooks  # the engine refuses it
            if value.requires_grad is not flag:  # a model that freezes or thaws it means the parameter
                parameter.requires_grad_(not flag)


def put_all(slots: list[Slot], parameter: nn.Parameter) -> None:
    """Put a parameter in all its places."""
    for module, key in slots:
        module._parameters[key] = parameter


def require_same_parts(model: nn.Module, world: World) -> None:
    """Raises ConfigError where the processes have built models of other names, shapes or types. Collective."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    parts = [(name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad) for name, tensor in tensors]
    if len(set(world.gather(hashlib.sha256(repr(parts).encode()).hexdigest()))) > 1:
        raise ConfigError(
            "the model does not have the same parts on all processes",
            where="model",
            fix="names, shapes and types of its weights must not depend on rank or chance",
        )


def require_buffers(model: nn.Module) -> None:
    """Raises ConfigError for a buffer that a constructor has computed from weights, which had no values."""
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ConfigError(
                "a buffer is computed from weights, and those of init_weights come after the constructor",
                where=f"model {name}",
                fix="compute it in forward, or leave init_weights out",
            )


def share_tensors(model: nn.Module, world: World) -> None:
    """Give all processes the buffers of the first one, and the tensors that its modules keep as attributes.

    Collective. Raises ConfigError where the models do not keep the same ones.
    """
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:  # the first process has values, and this one has no weights
                module._buffers[key] = torch.empty_like(buffer, device="cpu")
    attributes = list_kept_tensors(model)
    shapes = world.gather([(tuple(tensor.shape), str(tensor.dtype), tensor.is_meta) for tensor in attributes])
    if any(others != shapes[0] for others in shapes):
        raise ConfigError(
            "the model does not keep the same tensors on all processes",
            where="model",
            fix="register what does not depend on the weights as a buffer",
        )
    for tensor in dict.fromkeys([*model.buffers(), *attributes]):  # each object once, in the order of the modules
        if tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized:
            world.copy_from_main(tensor)


def seed_all(seed: int, device: torch.device | None = None) -> torch.Generator:
    """Seed every generator that initial weights may be drawn from; return torch's own of the device (the CPU)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # Not by torch.manual_seed: without a GPU it formats the stack for each kind of device, which takes milliseconds.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    if device is not None and device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


@contextlib.contextmanager
def isolate_generators(device: torch.device | None = None) -> Iterator[None]:
    """Let all generators go on after the block as if it had not been."""
    before = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device is not None and device.type == "cuda" else []):
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


@torch.no_grad()
def fill_parts(
    model: nn.Module, places: Places, local: Callable[[str, Part], torch.Tensor], device: torch.device
) -> None:
    """Give each parameter its local part, in memory of its own. `local`: returns it, by name and part."""
    kept = {name: slots for name, slots in places.items() if has_parameter(slots[0])}
    for name, slots in places.items():
        value = local(name, part_in(slots[0])).to(device)  # of absent ones, too: others may wait for theirs
        if name not in kept:
            continue
        empty = stored_parameter(slots[0])
        value = value.to(empty.dtype)
        if isinstance(empty, DTensor):
            # Not by from_local, which would bring an offloaded part back to the mesh's device.
            put_all(slots, parameter_like(empty, _DTensor(value, empty._spec, requires_grad=False)))
        else:  # the same object: torch's replicas have it already
            give_memory(empty, value)
    model._apply(lambda tensor: tensor)  # type: ignore[no-untyped-call]  # FSDP looks for its parameters again
    for name, slots in kept.items():  # of distributed ones torch has made new ones meanwhile
        vars(stored_parameter(slots[0])).update(places.attributes[name])
    watch_units(model, lambda _, gathered: [vars(whole).update(vars(own)) for own, whole in gathered.items()])


def part_in(slot: Slot) -> Part:
    """Return the part that this process has of the parameter in a place; `ABSENT` where another stage has it."""
    return part_of(stored_parameter(slot)) if has_parameter(slot) else ABSENT


def has_parameter(slot: Slot) -> bool:
    """Tell whether this process has the parameter of a place, or a part of it."""
    return slot[0]._parameters[slot[1]] is not None


def stored_parameter(slot: Slot) -> nn.Parameter:
    """Return the parameter that stands in a place now."""
    parameter = slot[0]._parameters[slot[1]]
    assert parameter is not None
    return parameter


def list_kept_tensors(model: nn.Module) -> list[torch.Tensor]:
    """List the tensors that modules keep as attributes, or in containers, beside those that torch knows of."""
    known = ("_parameters", "_buffers", "_modules")
    others = [value for module in model.modules() for name, value in vars(module).items() if name not in known]
    leaves = tree_leaves(others)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not isinstance(leaf, nn.Parameter)]


def construct_empty(construct: Callable[[], nn.Module], says_so: bool = False) -> nn.Module:
    """Build a model without memory for its parameters; a constructor that reads their values has them meanwhile.

    `says_so`: log where that happens.
    """
    # What a first try writes to stderr is kept back: a second one would write it again.
    written = io.StringIO()
    try:
        with take_memory_of_parameters(), contextlib.redirect_stderr(written):
            model = construct()
    except UserCodeError:  # perhaps because it reads weights, which have no values; if not, it is raised again
        model = construct()
        if says_so:
            to_log("the model's constructor reads its weights: each process holds all of them while it builds it")
        empty_parameters(places_of(model))
        return model
    sys.stderr.write(written.getvalue())
    return model
