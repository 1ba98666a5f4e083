"""What one process does for a row of the table of parity: trains as a worker does, on rows that are in memory."""

import contextlib
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from kftrain import config
from kftrain.data.loader import TrainLoader
from kftrain.data.order import BatchPlan
from kftrain.data.tuning import Tuning
from kftrain.parallel.mesh import Mesh
from kftrain.process.liveness import Liveness
from kftrain.process.stop_request import StopRequest
from kftrain.tasks import build_task
from kftrain.train import session
from kftrain.train.loop import Loop
from kftrain.train.recorder import Recorder
from kftrain.train.step import Carrier, count_loss_terms

COLLECTIVE_SECONDS = 600.0


@dataclass(frozen=True)
class Job:
    """What to train."""

    text: str
    overrides: tuple[str, ...]
    data: object
    """A function: field -> all rows."""
    defect: object = contextlib.nullcontext
    """Of `helpers.parity.defects`: what is broken meanwhile."""


@dataclass(frozen=True)
class Trained:
    """What the first process tells."""

    first_weights: dict[str, np.ndarray]
    history: list[dict[str, float]]
    weights: dict[str, np.ndarray]


class Rows:
    """Rows in memory, in their order."""

    def __init__(self, arrays):
        self.arrays = arrays
        self.num_samples = len(next(iter(arrays.values())))

    def read(self, samples):
        return {name: array[samples] for name, array in self.arrays.items()}

    def locate(self, positions):
        return positions % self.num_samples

    def place_of(self, sample):
        return str(sample)


class NoWriter:
    """Keeps nothing."""

    busy = False
    overdue = False
    step = None
    committed_step = 0

    def save(self, state, history, step, samples):
        self.step = step

    def wait(self):
        self.committed_step, self.step = self.step, None


def train(world, job):
    """Trains to the last step; what came of it, on the first process."""
    with job.defect():
        return _train(world, job)


def _train(world, job):
    resolved = config.parse(job.text, list(job.overrides))
    mesh, task = Mesh(resolved.parallel.shape(world.size), world), build_task(resolved.task)
    with contextlib.closing(new_loader(resolved, task, mesh, job.data())) as loader:
        engine, _ = session.build(resolved, task, loader, mesh)
        is_cut = mesh.shape.pipeline > 1
        first = whole(engine.model, is_cut)
        recorder = Recorder([], None, resolved.train.steps)
        liveness = Liveness(lambda: None, COLLECTIVE_SECONDS)
        Loop(resolved, world, engine, loader, None, NoWriter(), recorder, StopRequest(), liveness).run(0)
        last = whole(engine.model, is_cut)
    return Trained(first, recorder.history, last) if world.is_main else None


def new_loader(resolved, task, mesh, arrays):
    """Feeds this process its share of each step."""
    rows, settings = Rows(arrays), resolved.train
    plan = BatchPlan(settings.global_batch_size, mesh.num_data_ranks, settings.micro_batch_size)
    send = Carrier.to(mesh.world.device, task).send
    return TrainLoader(
        rows, rows, plan, mesh.data_rank, Tuning(0), lambda micro: count_loss_terms(task, micro), send=send
    )


def whole(model, shared_is_equal=False):
    """Name -> value of each parameter and buffer that is kept, gathered. Collective.

    `shared_is_equal`: what several processes have (tied ends of a pipeline) must be equal to the bit.
    """
    own = {}
    for name, value in get_model_state_dict(model).items():
        tensor = value.full_tensor() if isinstance(value, DTensor) else value
        own[name] = tensor.detach().cpu().numpy().copy()
    everyones = [{}] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    found = {}
    for name, value in (pair for theirs in everyones for pair in theirs.items()):
        first = found.setdefault(name, value)
        assert not shared_is_equal or first.tobytes() == value.tobytes(), f"{name} differs from process to process"
    return dict(sorted(found.items()))
