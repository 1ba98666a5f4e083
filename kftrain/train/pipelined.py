"""The engine for a model that is cut into stages, on the schedules of `torch.distributed.pipelining`.

A step is that of the SPMD engine, but that one of torch's schedules makes all forward and backward passes: it sends
what stages return to the next one, and gradients back. The micro batches are the loader's, which all have as many rows.
The loss is computed by the last stage; every process of a pipeline is told it, so that the first one counts it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from kftrain.data.loader import MicroBatch
from kftrain.errors import KftrainError
from kftrain.evaluate.score import Tensors
from kftrain.parallel import stages
from kftrain.parallel.distributed import Distributed
from kftrain.parallel.initialize import HOST
from kftrain.tasks.prepare import arguments_of
from kftrain.train.spmd import SpmdEngine
from kftrain.train.stage_modules import CutIntoStages, StageModule, StageWork
from kftrain.train.step import finish_loss_sum, receive_tensors


class Stage(PipelineStage):
    """torch's stage, which tells its module the number of the micro batch, and us when all backward passes are done."""

    submod: StageModule
    model: nn.Module
    """Model of which this is a stage."""

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **keywords: Any) -> Any:
        """Compute a micro batch."""
        self.submod.number = fwd_chunk_id
        return super().forward_one_chunk(fwd_chunk_id, *arguments, **keywords)

    def _compute_outputs(self, *arguments: Any, **keywords: Any) -> Any:
        """Compute a micro batch for the sake of its shapes alone: buffers stay as they are."""
        # Copies stand in for them, since the backward pass that follows needs buffers as they were in this pass.
        slots = [(m, key, b) for m in self.model.modules() for key, b in m._buffers.items() if b is not None]
        for module, key, buffer in slots:
            module._buffers[key] = buffer.clone()
        outputs = super()._compute_outputs(*arguments, **keywords)
        for module, key, buffer in slots:
            module._buffers[key] = buffer
        return outputs

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operations that send the gradients of a micro batch."""
        if bwd_chunk_id in self.bwd_cache:  # what is sent must be contiguous
            gradients = self.bwd_cache[bwd_chunk_id]
            self.bwd_cache[bwd_chunk_id] = tuple(g if g is None else g.contiguous() for g in gradients)
        return super().get_bwd_send_ops(bwd_chunk_id)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Exchange the gradients of the stage."""
        for work in self.submod.before_exchange:
            work()
        super().perform_reduce_grad(grad_scale_factor)


class PipelinedEngine(SpmdEngine):
    """An engine for the stages that this process has of a distributed model."""

    def __init__(self, distributed: Distributed, cut: CutIntoStages, num_micro_batches: int, **others: Any) -> None:
        """Build torch's schedule over the stages of `cut`, which was applied. `others`: of `SpmdEngine`."""
        super().__init__(distributed, **others)
        self.num_parameters = cut.cut.num_parameters
        self.relay = self
        self._stages = cut.modules
        self._last = len(cut.cut.ranges) - 1
        self._schedule_name = cut.schedule
        self._group, device = self.mesh.group(["pipeline"]), self.mesh.world.device
        self._numbers = stages.list_stages(cut.schedule, dist.get_rank(self._group), self.mesh.shape.pipeline)
        numbered = zip(self._stages, self._numbers, strict=True)
        scheduled = [Stage(module, number, self._last + 1, device, group=self._group) for module, number in numbered]
        for stage in scheduled:
            stage.model = self.model
        facts = stages.SCHEDULES[cut.schedule]
        one_or_all: Any = scheduled[0] if facts.stages_per_process == 1 else scheduled
        schedule_class: Any = get_schedule_class(facts.torch_name)
        # Not scaled: a loss is divided by the terms of the whole step already, whatever the number of micro batches.
        options = {"loss_fn": lambda loss, _: self.scale_loss(loss), "scale_grads": False}
        self._schedule = schedule_class(one_or_all, num_micro_batches, **options)
        for module in self._stages:
            module.draws = self._draws
            module.before_exchange = distributed.note_gradients

    def _backward(self, micro_batches: list[MicroBatch], num_terms: int) -> torch.Tensor:
        """Leave the gradients of all micro batches; return the sum of their losses, float64 on the device."""
        if self._draws is not None:
            self._draws.begin_step()
        # In the order of the micro batches, whatever the schedule's: a task's batch may draw random numbers.
        works = [self._prepare_work(number, micro, num_terms) for number, micro in enumerate(micro_batches)]
        for module in self._stages:
            module.work = works
            module.number = 0
        losses: list[torch.Tensor] = []  # stays empty where the last stage is not
        try:
            with self._distributed.computing():
                # torch looks at the target only to see that there is one.
                self._schedule.step(target=torch.zeros(len(works)), losses=losses, return_outputs=False)
        except RuntimeError as error:
            if isinstance(error.__cause__, KftrainError):  # torch wraps what a stage raises
                raise error.__cause__ from None
            raise
        for module in self._stages:
            module.work = ()  # or the tensors of the step would stay to the next one
        self._require_as_built()
        self._distributed.hand_over()
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.world.device)
        total += sum(loss.detach().double() for loss in losses)
        dist.all_reduce(total, group=self._group)
        return total if self._loss_scale is None else self._loss_scale.unscale_sum(total)

    def _prepare_work(self, number: int, micro: MicroBatch, num_terms: int) -> StageWork:
        if self._draws is not None:
            self._draws.begin(number)
        tensors = receive_tensors(self.task, micro, self.mesh.world.device)

        def finish(returned: Any) -> torch.Tensor:
            return finish_loss_sum(returned, self.task, tensors) / max(num_terms, 1)

        return StageWork(number, arguments_of(self.task, tensors.batch), finish, tensors.weight)

    def compute(self, finish: Callable[[Any], Any], *inputs: Any) -> Any:
        """Compute one batch forward; see `Relay`. A process goes on as soon as the next one has taken its batch."""
        output: Any = ()
        for number, module in zip(self._numbers, self._stages, strict=True):
            if number > 0 and number - 1 not in self._numbers:
                objects: list[Any] = [None]
                dist.recv_object_list(objects, self._find_rank(number - 1), device=HOST)
                output = tuple(tensor.to(self.mesh.world.device) for tensor in objects[0])
            module.number = 0
            module.work = [StageWork(0, inputs, finish)]
            output = module(*(output if isinstance(output, tuple) else (output,)))
            if number < self._last and number + 1 not in self._numbers:
                # As objects, which say their shapes: the last batch of a dataset has fewer rows.
                sent = [tensor.cpu() for tensor in (output if isinstance(output, tuple) else (output,))]
                dist.send_object_list([sent], self._find_rank(number + 1), device=HOST)
        return output if self._last in self._numbers else None

    def share(self, measured: list[Tensors]) -> list[Tensors]:
        """Give all processes of the pipeline what the last stage has measured; see `Relay`."""
        # As objects, because the others know neither names nor numbers of rows.
        objects = [[{name: value.cpu() for name, value in values.items()} for values in measured]]
        dist.broadcast_object_list(objects, self._find_rank(self._last), self._group, HOST)
        return objects[0]

    def _find_rank(self, stage: int) -> int:
        """Return the rank, among all processes, of the one that has a stage of this pipeline."""
        place = stages.find_process(self._schedule_name, stage, self.mesh.shape.pipeline)
        return dist.get_global_rank(self._group, place)
