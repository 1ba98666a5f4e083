"""Number formats where nothing is sharded: what FSDP2 does to parameters and gradients, without its wrapper.

That is one process, or tensor parallelism alone, which distributes parameters but knows no formats. The masters are
fp32 and belong to the optimizer and to checkpoints. While something is computed, copies in the format of the
computation stand in their place; their gradients are summed over micro batches in the format of the reduction and
become fp32 again at the end of the step. So one process computes what many compute.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from kftrain.parallel.initialize import Slot, parameter_like, stand_in, stored_parameter
from kftrain.parallel.sharded import local, spread_like

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
DTYPES = {**{name: dtype for dtype, name in NAMES.items()}, "float8": torch.bfloat16}
"""Configured format -> the one that tensors are kept in; only products of matrices are in float8."""


def cast_inputs(model: nn.Module, names: Sequence[str], dtype: torch.dtype, until_fit: bool = False) -> list[Any]:
    """Cast floating-point tensors that enter the model or one of these modules; return the handles of the hooks.

    `until_fit`: take a module's hook off after the first call in which all inputs are tensors and none had to be cast:
    later calls are expected to give it the same types. Hooks cost a small model a tenth of its step.
    """

    def fits(value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            return value.dtype == dtype or not value.is_floating_point()
        return isinstance(value, tuple) and all(map(fits, value))

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def cast_inputs_of(unit: nn.Module) -> Any:
        def hook(_module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
            # Within lists and the like, too, before the hook goes for good. Otherwise a look at tensors and tuples is
            # enough: what is neither does not fit, and the whole tree is mapped.
            values = tree_leaves((inputs, keywords)) if until_fit else (*inputs, *keywords.values())
            if not all(map(fits, values)):
                return tree_map_only(torch.Tensor, cast, (inputs, keywords))
            if until_fit:
                handle.remove()
            return None

        handle = unit.register_forward_pre_hook(hook, with_kwargs=True)
        return handle

    return [cast_inputs_of(unit) for unit in (model, *(model.get_submodule(name) for name in names))]


def list_slots(model: nn.Module) -> list[Slot]:
    """List the places of the model's parameters; a shared one has several."""
    return [(module, name) for module in model.modules() for name, _ in module.named_parameters(recurse=False)]


class WorkingCopies:
    """Copies of a model's parameters in the format of the computation.

    The copy of a distributed parameter (tensor parallelism) is a plain tensor, of this process's part. The copies stay
    the same objects from step to step, because their hooks take the gradients.
    """

    def __init__(self, model: nn.Module, compute: torch.dtype, reduce: torch.dtype, several: bool = False) -> None:
        """`several`: steps have several micro batches, and nobody calls `expect`."""
        self._reduce = reduce
        self._masters = list(model.parameters())
        self._copies: list[torch.Tensor] = [
            parameter_like(master, local(master).detach().to(compute, copy=True)) for master in self._masters
        ]
        copy_of = dict(zip(self._masters, self._copies, strict=True))
        slots = [(*slot, stored_parameter(slot)) for slot in list_slots(model)]
        self._places = [(*slot, copy_of[slot[2]]) for slot in slots]
        self.sums: dict[int, torch.Tensor] = {}
        """Gradients of this step so far, by the number of the parameter."""
        self._are_watched = False
        if several:
            self.expect(is_last=False)

    def expect(self, is_last: bool) -> None:
        """Take gradients after each micro batch once one was not the last of its step; of an only one they wait."""
        if is_last or self._are_watched:
            return
        self._are_watched = True
        for number, copy in enumerate(self._copies):
            is_trained = copy.requires_grad
            copy.requires_grad_().register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda changed, number=number: self._take_gradient(number, changed)  # bound now, not by the loop
            )
            copy.requires_grad_(is_trained)  # the model may thaw it

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the model the copies, with the values that the masters have now, within the block."""
        with torch.no_grad():  # the optimizer has changed the masters since the last time
            torch._foreach_copy_(self._copies, list(map(local, self._masters)))
        for master, copy in zip(self._masters, self._copies, strict=True):
            if copy.requires_grad is not master.requires_grad:  # the model may have frozen or thawed one
                copy.requires_grad_(master.requires_grad)
        with stand_in(self._places):
            yield

    def hand_over(self) -> None:
        """Give the masters the gradients of this step, in their own format; a parameter that was not used gets none."""
        if not self._are_watched:
            for number, copy in enumerate(self._copies):
                if (gradient := copy.grad) is not None:
                    self.sums[number] = gradient.to(self._reduce)
                    copy.grad = None
        for number, total in self.sums.items():
            master = self._masters[number]  # even a cast that changes nothing takes time
            master.grad = spread_like(master, total if total.dtype == master.dtype else total.to(master.dtype))
        self.sums.clear()

    def _take_gradient(self, number: int, copy: torch.Tensor) -> None:
        # After each micro batch: left in place, autograd would add the next one to it in the format of the computation,
        # and small gradients would be lost in bf16.
        assert copy.grad is not None
        if number in self.sums:
            self.sums[number] += copy.grad
        else:  # `to` may return the gradient itself; it is the sum's alone once the copy has let go of it below
            self.sums[number] = copy.grad.to(self._reduce)
        copy.grad = None
