"""What one process does for a row of the table of parity: trains as a worker does, on rows that are in memory."""

import contextlib
import tempfile
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from helpers.parity.defects import patched
from helpers.served_islands import connect_islands
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from kftrain import config
from kftrain.data.loader import TrainLoader
from kftrain.data.order import BatchPlan
from kftrain.data.tuning import Tuning
from kftrain.parallel.mesh import Mesh
from kftrain.process.liveness import Liveness
from kftrain.process.stop_request import StopRequest
from kftrain.run.paths import RunPaths
from kftrain.tasks import build_task
from kftrain.train import micro_batch, session
from kftrain.train.loop import Loop
from kftrain.train.reading import Training
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
    follows: bool = False
    """The weights before each step are told, too."""


@dataclass(frozen=True)
class Trained:
    """What the first process tells."""

    first_weights: dict[str, np.ndarray]
    history: list[dict[str, float]]
    weights: dict[str, np.ndarray]
    averages: dict[str, np.ndarray] = field(default_factory=dict)
    """What the model has while it is evaluated, where there are averages."""
    path: list[dict[str, np.ndarray]] = field(default_factory=list)
    """The weights before each step, where the job follows them."""


class Rows:
    """Rows in memory, in their order."""

    def __init__(self, arrays):
        self.arrays = arrays
        self.num_samples = len(next(iter(arrays.values())))

    def read(self, samples):
        return {name: array[samples] for name, array in self.arrays.items()}

    def read_range(self, start, stop):
        return self.read(np.arange(start, stop)), self.group_of(np.arange(start, stop))

    def group_of(self, samples):
        return samples

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
    resolved = with_found_rows(resolved, task, mesh, job.data())
    with contextlib.closing(new_loader(resolved, task, mesh, job.data())) as loader:
        engine, _ = session.build(resolved, task, loader, mesh)
        is_cut = mesh.shape.pipeline > 1
        first = whole(engine.model, is_cut)
        recorder = Recorder([], None, resolved.train.steps)
        liveness = Liveness(lambda: None, COLLECTIVE_SECONDS)
        rows, path = Rows(job.data()), []
        if job.follows:
            follow(engine, lambda: path.append(whole(engine.model, is_cut)))
        with connect_islands(engine, resolved, world):
            Loop(resolved, world, engine, loader, rows, NoWriter(), recorder, StopRequest(), liveness).run(0)
        last, averages = whole(engine.model, is_cut), averages_of(engine, resolved, is_cut)
        trained = Trained(first, recorder.history, last, averages, path)
    return trained if world.is_main else None


def follow(engine, note):
    """Lets an engine note something before each of its steps."""
    step = engine.step

    def note_and_step(*arguments):
        note()
        return step(*arguments)

    engine.step = note_and_step


def with_found_rows(resolved, task, mesh, arrays):
    """As an attempt puts a number in the place of `train.micro_batch_size: auto`; memory is free for two rows."""
    if resolved.train.micro_batch_size != "auto":
        return resolved

    def choose_rows(share, row_bytes, fixed_bytes, _free, before=micro_batch.choose_rows):
        return before(share, row_bytes, fixed_bytes, (fixed_bytes + 2 * row_bytes) / micro_batch.USED_SHARE + 1)

    def open_loader(training, *_others):
        return new_loader(training.config, task, mesh, arrays)

    with (
        tempfile.TemporaryDirectory() as folder,
        patched(micro_batch, "choose_rows", choose_rows),
        patched(micro_batch, "open_loader", open_loader),
    ):
        training = Training(RunPaths.of(folder, "r"), resolved, "", None, {}, task)
        found = micro_batch.resolve_micro_batch(training, mesh).config
    assert found.train.micro_batch_size == 2, found.train.micro_batch_size
    return found


def averages_of(engine, resolved, shared_is_equal=False):
    """What an evaluation computes with, where it is not the weights. Collective."""
    if not resolved.train.average_decay and resolved.parallel.islands == 1:
        return {}
    with engine.evaluating():
        return whole(engine.model, shared_is_equal)


def new_loader(resolved, task, mesh, arrays):
    """Feeds this process its share of each step."""
    rows, settings = Rows(arrays), resolved.train
    plan = BatchPlan(settings.global_batch_size, mesh.num_data_ranks, settings.micro_batch_size)
    send = Carrier.to(mesh.world.device, task).send
    count, sizes = (lambda micro: count_loss_terms(task, micro)), settings.batch_sizes
    return TrainLoader(rows, rows, plan, mesh.data_rank, Tuning(0), count, send=send, sizes=sizes)


def whole(model, shared_is_equal=False):
    """Name -> value of each parameter and buffer that is kept, gathered. Collective.

    `shared_is_equal`: what several processes have (tied ends of a pipeline) must be equal to the bit.
    """
    own = {}
    for name, value in get_model_state_dict(model).items():
        tensor = value.full_tensor() if isinstance(value, DTensor) else value
        tensor = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
        own[name] = tensor.detach().cpu().numpy().copy()
    everyones = [{}] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    found = {}
    for name, value in (pair for theirs in everyones for pair in theirs.items()):
        first = found.setdefault(name, value)
        assert not shared_is_equal or first.tobytes() == value.tobytes(), f"{name} differs from process to process"
    return dict(sorted(found.items()))
