"""The stages of a pipeline that a process has, as modules, and what becomes of the rest of its model.

The model stays one object with the names of the plain model, so that checkpoints, exports, groups of the optimizer and
plans know nothing of stages. Of parameters that only other stages use the places are empty here. A stage is a module
beside the model that has the same submodules: torch's schedules call it, and sharding takes it for a root.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from kftrain.core.plugins import user_code
from kftrain.errors import ConfigError, UserCodeError
from kftrain.models.base import ModelPiece, run_pieces
from kftrain.parallel import initialize, stages
from kftrain.parallel.distributed import Distributed
from kftrain.parallel.initialize import Places
from kftrain.parallel.mesh import Mesh
from kftrain.parallel.sharded import local
from kftrain.train.draws import PlacedDraws
from kftrain.train.step import give_row_weights


@dataclass(frozen=True)
class StageWork:
    """The things that a stage needs for one micro batch, beside what the stage before it sends."""

    number: int
    """Number of the micro batch in its step."""
    inputs: Sequence[Any]
    """Arguments of the model."""
    finish: Callable[[Any], Any]
    """Makes of the model's output what the last stage returns."""
    row_weights: torch.Tensor | None = None
    """Weight of each row, `[rows]`, in training."""


class StageModule(nn.Module):
    """Pieces of a model that follow each other, as one module."""

    def __init__(self, model: nn.Module, pieces: range, is_last: bool, dtype: torch.dtype, num_blocks: int) -> None:
        """`pieces`: their numbers. `dtype`: of the computation. `num_blocks`: before this stage."""
        super().__init__()
        self.work: Sequence[StageWork] = ()
        """Works of all micro batches of the step, by number."""
        self.number = 0
        """Number of the micro batch that is computed next."""
        self.draws: PlacedDraws | None = None
        self.before_exchange: Sequence[Callable[[], None]] = ()
        """Work between the backward passes of a step and the exchange of its gradients."""
        self._range = pieces
        self._is_last = is_last
        self._dtype = dtype
        self._num_blocks = num_blocks
        self._model: Callable[[], nn.Module] = lambda: model  # no submodule: its names are not this module's
        self._pieces: list[ModelPiece] = []
        self._forms: list[tuple[list[int], torch.dtype]] = []
        inside = list_modules(model, pieces)
        kept = {id(parameter) for module in inside for parameter in list_parameters(model, module)}
        self.units = nn.ModuleList(module for module in dict.fromkeys(inside) if module is not model)
        # A parameter that stands elsewhere, too, is replaced there as well when it is sharded: by a module that shares
        # the places of the one that has it.
        known = set(self.units.modules())
        others = [m for m in model.modules() if m not in known and any(id(p) in kept for p in m._parameters.values())]
        self.others = nn.ModuleList(_share_places(module) for module in others)

    def forward(self, *received: torch.Tensor) -> Any:
        """Compute the pieces for a micro batch. `received`: what the stage before has returned."""
        work, model = self.work[self.number], self._model()
        # Asked for again here: recomputing has put other modules into the model meanwhile.
        self._pieces = self._pieces or list_pieces(model)[self._range.start : self._range.stop]
        inputs = tree_map_only(torch.Tensor, self._cast, list(work.inputs))
        if self.draws is not None:
            self.draws.begin(work.number, self._num_blocks)
        with user_code("model.stages"):
            if work.row_weights is not None:
                give_row_weights(model, work.row_weights)
            result = run_pieces(model, self._pieces, received[0] if len(received) == 1 else received, inputs)
        if self._is_last:
            return work.finish(result)
        if work.row_weights is not None:
            self._require_same_shapes(result)
        return tree_map_only(torch.Tensor, torch.Tensor.contiguous, result)

    def _require_same_shapes(self, sent: Any) -> None:
        """Raises UserCodeError where a micro batch has others than the first one."""
        # torch receives into memory that it reserves by the first one, and does not look at what comes.
        forms = [(list(tensor.shape), tensor.dtype) for tensor in tree_leaves(sent)]
        self._forms = self._forms or forms
        if forms != self._forms:
            what, fix = "a piece returns tensors of other shapes than before", "pad them to one shape for all rows"
            raise UserCodeError(what, where="model.stages", value=forms, fix=fix)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor


def _share_places(module: nn.Module) -> nn.Module:
    holder = nn.Module()
    holder._parameters = module._parameters
    return holder


def list_pieces(model: Any) -> list[ModelPiece]:
    """Return the pieces of a model. Raises ConfigError where it has none."""
    if not callable(getattr(model, "stages", None)):
        what, fix = "has no pieces that stages could be made of", "give the model a method stages(), or set it to 1"
        raise ConfigError(f"{type(model).__name__} {what}", where="parallel.pipeline", fix=fix)
    with user_code("model.stages"):
        pieces = list(model.stages())
    if not pieces or not all(_is_piece(piece) for piece in pieces):
        fix = "return ModelPiece(call, modules) for each part of forward"
        raise ConfigError("does not return pieces of the model", where="model.stages", fix=fix)
    return pieces


def _is_piece(piece: Any) -> bool:
    return isinstance(piece, ModelPiece) and all(isinstance(module, nn.Module) for module in piece.modules)


def list_modules(model: nn.Module, pieces: range) -> list[nn.Module]:
    """List the modules of some pieces of a model."""
    return [module for piece in list_pieces(model)[pieces.start : pieces.stop] for module in piece.modules]


def list_blocks(model: nn.Module, blocks: Sequence[str], pieces: range) -> list[str]:
    """List those of the blocks, by name, that some pieces compute."""
    parts = {part for module in list_modules(model, pieces) if module is not model for part in module.modules()}
    return [name for name in blocks if model.get_submodule(name) in parts]


def list_parameters(model: nn.Module, module: nn.Module) -> list[nn.Parameter]:
    """List the parameters of a module; the model itself stands for those that it has directly."""
    return list(module.parameters(recurse=module is not model))


@dataclass(frozen=True)
class Cut:
    """A model that is cut into stages, as all processes know it."""

    ranges: list[range]
    """Numbers of the pieces of each stage."""
    costs: list[float]
    """Cost of each stage: numbers that its matrices multiply a token with."""
    num_kept: list[int]
    """Numbers in the parameters of each stage."""
    stages_of: dict[str, list[int]]
    """Name of a parameter -> the stages that compute with it."""
    users: dict[str, list[int]]
    """Name of a parameter -> the places on the axis `pipeline` whose processes have it."""
    num_parameters: int
    """Numbers in all parameters."""
    trained: list[str]
    """Names of the parameters that are trained."""

    def shared_within(self, schedule: str, num_processes: int) -> list[str]:
        """List the parameters that two stages of one process have."""
        where = functools.partial(stages.find_process, schedule, num_processes=num_processes)
        return [name for name, of in self.stages_of.items() if len({where(stage=stage) for stage in of}) < len(of)]


def cut_model(model: nn.Module, schedule: str, num_processes: int) -> Cut:
    """Choose the stages of a model. Raises ConfigError where it cannot be cut into so many."""
    pieces, places = list_pieces(model), initialize.places_of(model)
    costs = [estimate_cost(model, piece, number == 0) for number, piece in enumerate(pieces)]
    ranges = stages.cut_pieces(costs, stages.count_stages(schedule, num_processes))
    # By identity: a parameter that stands in several places has several names, and must count once.
    ids = [{id(p) for number in of for m in pieces[number].modules for p in list_parameters(model, m)} for of in ranges]
    stored = {name: initialize.stored_parameter(slots[0]) for name, slots in places.items()}
    having = {name: [stage for stage, own in enumerate(ids) if id(p) in own] for name, p in stored.items()}
    lost = next((name for name, of in having.items() if not of), None)
    if lost is not None:
        what = "a parameter belongs to no piece of the model's stages()"
        raise ConfigError(what, where=f"model {lost}", fix="name its module among those of a piece")
    return Cut(
        ranges=ranges,
        costs=[sum(costs[number] for number in of) for of in ranges],
        num_kept=[sum(p.numel() for p in stored.values() if id(p) in own) for own in ids],
        stages_of=having,
        users={
            name: sorted({stages.find_process(schedule, one, num_processes) for one in of})
            for name, of in having.items()
        },
        num_parameters=sum(p.numel() for p in stored.values()),
        trained=[name for name, p in stored.items() if p.requires_grad],
    )


def estimate_cost(model: nn.Module, piece: ModelPiece, is_first: bool) -> float:
    """Estimate what a piece costs a token: the numbers of its parameters that are not idle, nor only looked up."""
    looked_up = {id(m.weight) for m in piece.modules if is_first and isinstance(m, nn.Embedding)}
    parameters = {id(p): p.numel() for module in piece.modules for p in list_parameters(model, module)}
    return float(sum(count for key, count in parameters.items() if key not in looked_up) - piece.num_idle)


def empty_other_stages(places: Places, users: dict[str, list[int]], place: int) -> None:
    """Take the parameters that only other processes use out of the model."""
    for name, slots in places.items():
        if place not in users[name]:
            for module, key in slots:
                module._parameters[key] = None


@dataclass(frozen=True)
class CutIntoStages:
    """Makes the stages of this process the roots of the model; first in a strategy."""

    cut: Cut
    schedule: str
    dtype: torch.dtype
    block_names: Sequence[str]
    """Names of all blocks of the model."""
    modules: list[StageModule] = field(default_factory=list)
    """The stages of this process, in their order, once it is applied."""

    def apply(self, distributed: Distributed, blocks: Sequence[str]) -> None:
        """Make the stages, and let processes that have a parameter in common add its gradients. Collective."""
        model, mesh = distributed.model, distributed.mesh
        place, size = mesh.shape.coordinates(mesh.world.rank)["pipeline"], mesh.shape.pipeline
        for number in stages.list_stages(self.schedule, place, size):
            pieces, is_last = self.cut.ranges[number], number == len(self.cut.ranges) - 1
            num_blocks = len(list_blocks(model, self.block_names, range(pieces.start)))
            self.modules.append(StageModule(model, pieces, is_last, self.dtype, num_blocks))
        for module in model.modules():  # also those that are in no stage here: all processes combine all buffers
            kept = {key: buffer for key, buffer in module._buffers.items() if buffer is not None}
            module._buffers.update({key: buffer.to(mesh.world.device) for key, buffer in kept.items()})
        # The schedule calls stages and never the model, so what shards must hook itself to these.
        distributed.roots = nn.ModuleList(self.modules)
        distributed.names = self.cut.trained
        shared = SharedParameters(initialize.places_of(model), self.cut.users, mesh)
        distributed.after_backward.append(shared.sum_gradients)
        distributed.when_filled.append(lambda: distributed.copies.update(shared.list_copies()))


class SharedParameters:
    """The parameters that stages on several processes have: ends of a model that are tied.

    They begin with the same values, because these are drawn by name. Each process adds the gradients of all, in the
    same order, and so the updates are equal to the bit.
    """

    def __init__(self, places: Places, users: dict[str, list[int]], mesh: Mesh) -> None:
        """Make the groups of processes with a parameter in common. Collective."""
        self._place = mesh.shape.coordinates(mesh.world.rank)["pipeline"]
        self._users = {name: tuple(having) for name, having in users.items() if len(having) > 1}
        self._slots = {name: places[name][0] for name in self._users if name in places}
        groups = {having: self._make_group(having, mesh) for having in dict.fromkeys(self._users.values())}
        self._groups = {name: groups[having] for name, having in self._users.items()}

    def _make_group(self, users: tuple[int, ...], mesh: Mesh) -> dist.ProcessGroup:
        """Make the group of the processes at some places of this pipeline; of this one alone where it is at none."""
        if len(users) == mesh.shape.pipeline:
            return mesh.group(["pipeline"])
        # All make one, whether or not they need it: torch names a group by how many groups its processes have.
        ranks = next(ranks for ranks in mesh.shape.groups(["pipeline"]) if mesh.world.rank in ranks)
        members = [ranks[place] for place in users] if self._place in users else [mesh.world.rank]
        group: Any = dist.new_group(members, timeout=mesh.world.timeout, use_local_synchronization=True)
        return cast(dist.ProcessGroup, group)

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Make the gradients of shared parameters sums over their processes, in place. Collective."""
        for name, slot in self._slots.items():
            parameter = initialize.stored_parameter(slot)
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:  # this stage has not used it in this step
                parameter.grad = torch.zeros_like(parameter)
            # By the same group in the same order, so that the updates of all of them stay equal to the bit.
            dist.all_reduce(local(parameter.grad), group=self._groups[name])

    def list_copies(self) -> list[nn.Parameter]:
        """List the shared parameters that a process before this one counts in the norm."""
        later = [name for name in self._slots if self._users[name][0] != self._place]
        return [initialize.stored_parameter(self._slots[name]) for name in later]
