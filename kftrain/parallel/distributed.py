"""A model that is ready to train, and the work that its transforms have registered around the steps.

A transform (`transforms.py`) changes the model in place and registers here what it wants done, and when. So the engine
knows none of them, and a new one touches no other file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from kftrain.parallel.gradients import collect_local_gradients
from kftrain.parallel.mesh import Mesh
from kftrain.parallel.sharded import ALONE, Team


@dataclass(frozen=True)
class Part:
    """A part of the state of a training, as a checkpoint holds it."""

    version: int
    """Version of the form of what `save` returns; it goes up when that changes."""
    save: Callable[[], dict[str, Any]]
    """Returns tensors and plain data, as they are now; nothing is copied."""
    load: Callable[[dict[str, Any]], None]
    """Takes what `save` has returned, with the tensors of a checkpoint in place."""
    is_optional: bool = False
    """True where a training may go on with a checkpoint that does not have it: it begins anew then."""
    begin: Callable[[int], None] = lambda num_steps: None
    """Begins an optional part after so many steps, beside a checkpoint without it, when the other parts are loaded."""


class Agreement(NamedTuple):
    """Numbers that are summed over all processes once a step, together with those that the loop agrees on."""

    take: Callable[[], list[float]]
    """Returns this process's numbers, as many on each process."""
    settle: Callable[[list[float]], None]
    """Is given the sums, before the gradients of the step are collected."""


class Distributed:
    """A model with what its transforms want done around each computation.

    Transforms wrap one another: the last one stands nearest to the computation. So blocks are entered in the order of
    the lists, and gradients are handed outward, from the last registered to the first.
    """

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self.model = model
        self.mesh = mesh
        self.roots = nn.ModuleList([model])
        """Modules whose forward computes with all other parameters of the model: itself, or its stages here."""
        self.names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        """Names of the parameters that are trained on any process, in the same order on each of them."""
        self.copies: set[nn.Parameter] = set()
        """Parameters whose gradients another process counts in the norm, as they are the same there."""
        self.team: Team = ALONE
        """Processes that have the same of what is no distributed tensor."""
        self.units: dict[str, DeviceMesh] = {}
        """Modules that are sharded by themselves, along the axes of another mesh than the rest, by name."""
        self.needs_same_calls = False
        """True where processes exchange parameters when a block is called, so that all must call the same ones."""
        self.when_filled: list[Callable[[], None]] = []
        """Work to be done once, when the parameters have their values and before the first step."""
        self.around_step: list[Callable[[], contextlib.AbstractContextManager[None]]] = []
        """Blocks within which all forward and backward passes of a step run, or those of an evaluation."""
        self.before_micro_batch: list[Callable[[bool], None]] = []
        """Work before a micro batch, told whether it is the last of its step; called only where the answer changes."""
        self.after_backward: list[Callable[[], None]] = []
        """Work on the gradients of a step after its last backward pass, the last registered first. Collective."""
        self.note_gradients: list[Callable[[], None]] = []
        """Work between the backward passes of a step and the exchange of its gradients, where an engine knows when."""
        self.note_part: Callable[[list[torch.Tensor]], None] | None = None
        """Is given gradients of a part of the batch: a replica's before their exchange, or a first micro batch's."""
        self.list_gradients: Callable[[], list[torch.Tensor]] = lambda: collect_local_gradients(model.parameters())
        """Returns the gradients of the micro batches so far, where nothing is exchanged."""
        self.learning_rate = 0.0
        """Rate of the step that is computed."""
        self.metrics: dict[str, torch.Tensor] = {}
        """Further numbers of the last step, by name: scalars on the device, the same on all processes."""
        self.when_dropped: list[Callable[[nn.Parameter], None]] = []
        """Work on a parameter that no process has used, before its gradient is dropped."""
        self.when_decided: list[Callable[[torch.Tensor], None]] = []
        """Work after an update, given a scalar on the device that is 1 where the step was skipped, else 0."""
        self.agreements: list[Agreement] = []
        """Values that transforms must know of all processes in each step."""
        self.parts: dict[str, Part] = {}
        """Parts that a checkpoint must hold beside the model and the optimizer, by name."""
        self._is_last: bool | None = None

    def begin(self) -> None:
        """Do the work that waits for the parameters' values. Once, before the first step."""
        for work in self.when_filled:
            work()

    def computing(self) -> contextlib.AbstractContextManager[None]:
        """Prepare the parameters for all forward and backward passes of a step, or an evaluation, within the block."""
        if len(self.around_step) > 1:
            return self._enter_all()
        return self.around_step[0]() if self.around_step else contextlib.nullcontext()

    @contextlib.contextmanager
    def _enter_all(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for enter in self.around_step:
                stack.enter_context(enter())
            yield

    def accumulate(self, is_last: bool) -> None:
        """Say before each micro batch whether it is the last of its step: then gradients are exchanged."""
        if is_last != self._is_last:  # the wrappers keep what they are told, and telling them walks through all modules
            self._is_last = is_last
            for work in self.before_micro_batch:
                work(is_last)

    def hand_over(self) -> None:
        """Give the parameters the gradients of the step, after its last backward pass. Collective."""
        # From the inside out. Copies that stood in for the parameters come first, because all others read the gradients
        # of the masters; then sums over an axis; the model's own hooks last, since they see gradients of all samples.
        for work in reversed(self.after_backward):
            work()

    def settle(self, found_inf: torch.Tensor) -> None:
        """Tell whether the step was skipped: then `found_inf` is 1."""
        for work in self.when_decided:
            work(found_inf)

    def agree(self, sum_over_all: Callable[[list[float]], list[float]]) -> None:
        """Sum the numbers of all agreements at once, even if there are none, and settle them. Collective."""
        # One exchange for all, and that in any case: the loop sums its own numbers in it, whoever has agreements.
        numbers = [agreement.take() for agreement in self.agreements]
        sums = sum_over_all([number for own in numbers for number in own])
        for agreement, own in zip(self.agreements, numbers, strict=True):
            agreement.settle(sums[: len(own)])
            sums = sums[len(own) :]


class Transform(Protocol):
    """A change of a model, in its place in a strategy's list."""

    def apply(self, distributed: Distributed, blocks: Sequence[str]) -> None:
        """Change the model in place, and register what else is to be done. Collective.

        `blocks`: names of the modules that are units of their own.
        """
