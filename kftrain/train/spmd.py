"""The engine for one program on many processes: accumulate, exchange, clip, update.

The loss of a step is the sum of its terms over the count of its terms, over all processes and micro batches. The count
is known before the first forward pass (`Task.count_terms`), so each micro batch contributes sum / count, and gradients
are summed over processes and need no rescaling. Uneven shares and padding are therefore exact, and one process gives
the same update as many.

A step whose gradient norm is not finite is skipped by the optimizer's kernel, so that the host need not know it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.utils._pytree import tree_map_only

from kftrain.data.expanded import ValidationRows
from kftrain.data.loader import MicroBatch, StepBatch
from kftrain.errors import UserCodeError
from kftrain.evaluate.score import Relay, Statistics, score
from kftrain.models import modes
from kftrain.parallel import blocks, buffers, gradients
from kftrain.parallel.batch_norm import GlobalBatchNorms
from kftrain.parallel.buffers import CombinedBuffers
from kftrain.parallel.distributed import Distributed, Part
from kftrain.parallel.world import World
from kftrain.tasks.base import Task
from kftrain.train.averages import Averages
from kftrain.train.draws import PlacedDraws
from kftrain.train.engine import Agree, Parts, StepResult
from kftrain.train.islands import Islands
from kftrain.train.loss_scale import LossScale
from kftrain.train.optimizer import Optimizer, list_parameter_names
from kftrain.train.optimizer_kinds import SkippingOptimizer
from kftrain.train.remote_rows import RemoteRows
from kftrain.train.step import call_after_step, compute_loss_sum, has_after_step, receive_tensors


class SpmdEngine:
    """An engine for the distributed model, its optimizer and the task: every process computes the same step."""

    num_norm_samples: int | None = None
    """Number of samples that share statistics of batch norms; the factory sets it."""
    rows: RemoteRows | None = None
    """The rows of the model that lie on servers; the factory sets them."""
    relay: Relay | None = None
    """Computes a batch of an evaluation where a process has a part of the model only."""

    def __init__(
        self,
        distributed: Distributed,
        optimizer: Optimizer,
        task: Task,
        calls: blocks.Calls,
        clip_norm: float,
        combined_buffers: CombinedBuffers,
        norms: GlobalBatchNorms | None = None,
        draws: PlacedDraws | None = None,
        averages: Averages | None = None,
        loss_scale: LossScale | None = None,
        islands: Islands | None = None,
    ) -> None:
        """Build the parts of a checkpoint, and the watches that a sharded model needs.

        `calls`: of the model and its blocks, in each computation of the loss; unless it is sharded it may vary.
        `norms`: the model's batch norms, which must be told which rows count. `draws`: of a model that draws.
        `averages`: of the weights, where there are any.
        `loss_scale`: a transform of the model. `islands`: where this process is on one of several.
        """
        distributed.begin()
        model = distributed.model
        self.model = model
        self.optimizer = optimizer
        self.task = task
        self.mesh = distributed.mesh
        self.norms = norms
        own_parts = {
            "model": make_model_part(model, self.mesh.world),
            "optimizer": make_optimizer_part(model, optimizer.members),
        }
        if averages is not None:
            own_parts["averages"] = averages.make_part()
        if islands is not None:
            own_parts = islands.make_parts(own_parts)
        self.state = Parts(own_parts | distributed.parts)
        self._averages = averages
        self.islands = islands
        self._distributed = distributed
        self._clip_norm = clip_norm
        self._calls = calls
        self._buffers = combined_buffers if combined_buffers.is_needed else None
        self._modes = modes.modes_of(model)
        self._draws = draws
        self._loss_scale = loss_scale
        self._parameters = list(model.parameters())
        self._counted = [parameter for parameter in self._parameters if parameter not in distributed.copies]
        self._names = {parameter: names[0] for parameter, names in list_parameter_names(model).items()}
        self._frozen = {parameter for parameter in self._names if not parameter.requires_grad}
        self._has_copies = gradients.has_copies(self._parameters) or bool(distributed.copies)
        self.num_parameters = sum(parameter.numel() for parameter in self._parameters)
        """Numbers in all parameters of the model, over all processes."""
        self._has_hook = has_after_step(model)
        self._takes_weights = hasattr(model, "take_row_weights")
        self._norm_group = self.mesh.norm_group()
        self._log = blocks.CallLog(model, set(calls) - {blocks.ROOT}) if distributed.needs_same_calls else None

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of the steps that follow."""
        self.optimizer.set_learning_rate(rate)
        self._distributed.learning_rate = rate

    def step(self, batch: StepBatch, num_terms: int, agree: Agree) -> StepResult:
        """Take one step; see `Engine.step`."""
        # The order: all forward and backward passes, buffers, `agree` (the host waits for the others while the device
        # still computes), then norm, clipping and update. From `agree` on nothing but a model's own after_step needs a
        # number on the host, so the device is asked for a whole step without a wait.
        modes.restore(self._modes)
        if self._buffers is not None:
            self._buffers.begin()
        loss_sum = self._backward(batch.micro_batches, num_terms)
        if self._buffers is not None:
            num_samples = sum(float(micro.weight.sum()) for micro in batch.micro_batches)
            self._buffers.combine(num_samples, self.mesh.counts_buffers)
        # Before gradients are collected: a parameter that nobody has used loses its zeros here, and does not decay.
        self._distributed.agree(agree)
        own = gradients.collect_local_gradients(self._parameters)
        counted = gradients.collect_counted_gradients(self._counted) if self._has_copies else own
        if self._loss_scale is not None:
            counted = [*counted, self._loss_scale.overflow]
        norm = gradients.compute_total_norm(counted, self._norm_group, self.mesh.world.device)
        if self._clip_norm > 0:
            gradients.clip_gradients(own, norm, self._clip_norm)
        found_inf = (norm - norm).ne_(0.0)  # 0 where it is finite; else not a number, which is no 0: 1
        self.optimizer.step(found_inf, batch.first_sample)
        self._distributed.settle(found_inf)
        metrics = dict(self._distributed.metrics)
        metrics |= {} if self._loss_scale is None else self._loss_scale.update(found_inf)
        if self._has_hook and bool(torch.isfinite(norm)):  # only where there is one the host waits for the number
            call_after_step(self.model)
        if self._averages is not None:  # after the hook, which may change weights
            self._averages.update(found_inf)
        if self.islands is not None:
            self.islands.finish_step(batch.first_sample)
        norm = norm.to(loss_sum.device)  # gradients that are offloaded are on the host
        return StepResult(loss_sum, norm, metrics)

    def evaluate(
        self, dataset: ValidationRows, batch_size: int, max_samples: int, on_batch: Callable[[], None]
    ) -> Statistics | None:
        """Return statistics of the first samples of a dataset; see `Engine.evaluate`."""
        with self.evaluating(), self._distributed.computing():
            scores = score(
                self.model, self.task, dataset, self.mesh, batch_size, max_samples, on_batch, relay=self.relay
            )
        return None if scores is None else scores.statistics

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """Let averages of the weights, or the outer parameters of islands, stand in for these within the block."""
        values = self._averages or self.islands
        return contextlib.nullcontext() if values is None else values.in_place(self.model)

    def _backward(self, micro_batches: list[MicroBatch], num_terms: int) -> torch.Tensor:
        """Leave the gradients of all micro batches; return the sum of their losses, float64 on the device."""
        total: torch.Tensor | None = None
        last = len(micro_batches) - 1
        with self._distributed.computing():
            if self._draws is not None:
                self._draws.begin_step()
            for index, micro in enumerate(micro_batches):
                if self._draws is not None:
                    self._draws.begin(index)
                self._distributed.accumulate(is_last=index == last)
                loss = self._compute_loss(micro) / max(num_terms, 1)
                if not self._distributed.around_step:  # or others stand in for the parameters, which know it later
                    self._require_as_built()
                self.scale_loss(loss).backward()  # type: ignore[no-untyped-call]
                if index == 0 and self._distributed.note_part is not None and self.mesh.world.size == 1:
                    self._distributed.note_part(self._distributed.list_gradients())
                value = loss.detach().double()
                total = value if total is None else total + value
        if self._distributed.around_step:
            self._require_as_built()
        self._distributed.hand_over()
        assert total is not None, "a step has micro batches"
        return total

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Return what the backward pass begins with: the loss, times its scale where it has one."""
        return loss if self._loss_scale is None else self._loss_scale.scale_loss(loss)

    def _require_as_built(self) -> None:
        """Raises UserCodeError for a parameter with a late hook, or a gradient that the optimizer does not know of."""
        for parameter in self._frozen:
            if parameter.requires_grad:
                raise UserCodeError(
                    "a parameter that was frozen when the training began is thawed: nothing would train it",
                    where=f"model {self._names[parameter]}",
                    fix="thaw it in the constructor and freeze it in forward, or start from this run with train.from",
                )
        for parameter, name in self._names.items():
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                raise UserCodeError(
                    "a hook comes after the training began: it would see parts of gradients, or nothing",
                    where=f"model {name}",
                    fix="register it in the constructor",
                )

    def _compute_loss(self, micro: MicroBatch) -> torch.Tensor:
        """Compute the loss sum of a micro batch, and see that all processes have called the same blocks."""
        tensors = receive_tensors(self.task, micro, self.mesh.world.device)
        if self.norms is not None:
            self.norms.begin(tensors.weight)
        if self._log is not None:
            self._log.take()  # forget the calls of a validation in between
        loss = compute_loss_sum(self.model, self.task, tensors, self.mesh.sequence_cut, self._takes_weights)
        if self._log is not None:  # before the backward pass, which would wait for the others' blocks
            blocks.require_same_calls(self._calls, self._log.take())
        return loss


def make_model_part(model: nn.Module, world: World) -> Part:
    """Make the part with parameters and buffers, by the names that they have in the plain model.

    Parameters are fp32 in it, also where they are bf16 here.
    """
    trained = list_parameter_names(model).items()
    narrow = {name for parameter, names in trained if parameter.dtype == torch.bfloat16 for name in names}

    def save() -> dict[str, Any]:
        # A checkpoint holds the buffers of one process, and a resume gives them to all.
        buffers.require_equal(model, world)
        state: dict[str, Any] = get_model_state_dict(model)
        return {name: value.float() if name in narrow else value for name, value in state.items()}

    def load(state: dict[str, Any]) -> None:
        set_model_state_dict(model, state, options=StateDictOptions(strict=True))

    return Part(1, save, load)


def make_optimizer_part(model: nn.Module, members: Sequence[SkippingOptimizer]) -> Part:
    """Make the part with what the optimizer's members keep of each parameter, by the parameter's name."""

    # Without torch's `param_groups`: a stage's groups are not another's, and the configuration says what is in them.
    def save() -> dict[str, Any]:
        if not members:
            return {}
        state = get_optimizer_state_dict(model, members)["state"]
        return {"state": tree_map_only(torch.Tensor, lambda v: v.float() if v.dtype == torch.bfloat16 else v, state)}

    def load(state: dict[str, Any]) -> None:
        if members:
            # In fp32 as it is: torch casts it to the format of the parameter.
            whole = {**get_optimizer_state_dict(model, members), **state}
            set_optimizer_state_dict(model, members, whole, options=StateDictOptions(strict=True))

    return Part(1, save, load)
