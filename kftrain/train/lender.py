"""Weights for a model that has no memory for them: those of a block while it is called, of the rest all the time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kftrain.parallel.initialize import Weights, isolated, parameter_like, put_all, stored_parameter


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
