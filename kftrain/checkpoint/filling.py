"""Filling a model with the tensors of an export: in any layout, each process reads its own parts.

The model may have been wrapped and spread over processes since it was built. The slots, taken before that, know which
tensors it keeps, and under which names: an export holds a tied parameter under one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from kftrain.checkpoint.export_tensors import ExportTensors, WantedPart
from kftrain.checkpoint.tensor_files import Part, TensorForm
from kftrain.parallel import initialize
from kftrain.parallel.initialize import Places
from kftrain.parallel.world import World


@dataclass(frozen=True)
class KeptTensor:
    """A parameter, or a buffer that is saved."""

    shape: tuple[int, ...]
    names: list[str]
    """Names in the model; a tied tensor has several."""


class ModelSlots:
    """The places of a model's tensors. Made before it is distributed, which may change their names."""

    def __init__(self, model: nn.Module) -> None:
        self.places: Places = initialize.places_of(model)
        self.tensors = _kept_tensors(model)
        """First name of each tensor that an export holds -> its shape and all its names."""
        self._buffers = {
            name: _owner(model, name)
            for name, _ in model.named_buffers()
            if name in self.tensors and name not in self.places
        }
        for module, key in self._buffers.values():
            buffer = module._buffers[key]
            if buffer is not None and buffer.is_meta:  # computed from weights, which have none; its values are read
                module._buffers[key] = torch.empty_like(buffer, device="cpu")

    @property
    def has_buffers(self) -> bool:
        """True where the model has buffers that are saved."""
        return bool(self._buffers)

    def misfit(self, forms: Mapping[str, TensorForm]) -> str:
        """Name the first tensor that is not the one of an export, with its shape here and there; empty if all fit."""
        # Both ways: a tensor that only one of the two has would be left without a value, or dropped without a word.
        unsaved = next((name for name in self.places if name not in self.tensors), None)
        if unsaved is not None:
            return f"{unsaved} is left out of the model's state, and missing there"
        for first, tensor in self.tensors.items():
            theirs = forms.get(self._name_in(forms, first))
            if theirs is None or theirs.shape != tensor.shape:
                return f"{first} is {list(tensor.shape)}, and {_format_shape(theirs)} there"
        known = {name for tensor in self.tensors.values() for name in tensor.names}
        strange = min(forms.keys() - known, default="")
        return f"{strange} is missing, and {_format_shape(forms[strange])} there" if strange else ""

    def fill_buffers(self, tensors: ExportTensors, world: World | None = None) -> None:
        """Give the buffers that are saved their values. Collective."""
        values = self._empty_buffers()
        tensors.load(self._list_wanted(tensors, values), world)
        self._set_buffers(values)

    def fill(self, model: nn.Module, tensors: ExportTensors, world: World | None = None, on_host: bool = False) -> None:
        """Give parameters memory and values, of each this process's part, and buffers their values. Collective.

        `model`: what became of the one that the slots are of. `on_host`: in the host's memory, whatever the device.
        """
        device = initialize.HOST if world is None or on_host else world.device
        # Where and how large a part is says the model as it is now; what it is called says the one that was built.
        kept = {name: slots for name, slots in self.places.items() if initialize.has_parameter(slots[0])}
        parts = {name: initialize.part_in(slots[0]) for name, slots in kept.items()}
        values = {name: torch.empty(part[1], dtype=torch.float32, device=device) for name, part in parts.items()}
        buffers = self._empty_buffers()
        # Into tensors of their own: nothing of the model is changed before `load` has returned, when all is verified.
        tensors.load(self._list_wanted(tensors, {**values, **buffers}, parts), world)
        self._set_buffers(buffers)
        initialize.fill_parts(model, self.places, lambda name, _: values.pop(name, torch.empty(0)), device)

    def _list_wanted(
        self,
        tensors: ExportTensors,
        values: Mapping[str, torch.Tensor],
        parts: Mapping[str, Part] = MappingProxyType({}),
    ) -> dict[str, WantedPart]:
        """List what goes into these values: parts of tensors, or else the whole of them."""
        wanted = {}
        for name, value in values.items():
            stored = self._name_in(tensors.forms, name)
            wanted[stored] = WantedPart(parts.get(name, tensors.forms[stored].whole), value)
        return wanted

    def _empty_buffers(self) -> dict[str, torch.Tensor]:
        return {name: torch.empty(self.tensors[name].shape, dtype=self._buffer(name).dtype) for name in self._buffers}

    @torch.no_grad()
    def _set_buffers(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, value in values.items():  # into the buffer itself: whoever else holds it sees the values
            self._buffer(name).copy_(value)

    def _name_in(self, forms: Mapping[str, TensorForm], first: str) -> str:
        return next((name for name in self.tensors[first].names if name in forms), first)

    def _buffer(self, name: str) -> torch.Tensor:
        module, key = self._buffers[name]
        buffer = module._buffers[key]
        assert buffer is not None, name
        return buffer


def is_fillable(model: nn.Module) -> bool:
    """Tell whether an export has all that a model without memory for its weights lacks.

    It has not where the constructor has computed from weights what is not saved.
    """
    kept = set(model.state_dict())
    if any(buffer.is_meta and name not in kept for name, buffer in model.named_buffers()):
        return False
    return not any(tensor.is_meta for tensor in initialize.list_kept_tensors(model))


def _kept_tensors(model: nn.Module) -> dict[str, KeptTensor]:
    # With duplicates: an export has a tied tensor under one of its names, and it need not be the first one here.
    saved = set(model.state_dict())
    both = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    first_names: dict[int, str] = {}
    tensors: dict[str, KeptTensor] = {}
    for name, tensor in both:
        if name in saved:
            first = first_names.setdefault(id(tensor), name)
            tensors.setdefault(first, KeptTensor(tuple(tensor.shape), [])).names.append(name)
    return tensors


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key


def _format_shape(form: TensorForm | None) -> str:
    return "missing" if form is None else str(list(form.shape))
