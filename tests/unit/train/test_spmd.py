"""The engine: no step waits for the device, none that is not finite counts, and its state fits any layout."""

import contextlib
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import in_process, ranks
from helpers.models.odd import ROWS, Loader
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from kftrain import config
from kftrain.parallel.mesh import Mesh
from kftrain.process.stop_request import StopRequest
from kftrain.tasks import build_task
from kftrain.train import session
from kftrain.train.loop import Loop
from kftrain.train.step import Carrier, count_loss_terms

STEPS = 6


READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.equal.default,
}


class NothingIsRead(TorchDispatchMode):
    """Refuses what waits for the device to give the host a number."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in READS, f"the host waits for {func}"
        return func(*args, **(kwargs or {}))


class NothingGoesToTheHost(NothingIsRead):
    """Refuses that it is asked for by name, too: on the device of these tests nothing is elsewhere."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        to_host = func is torch.ops.aten._to_copy.default and (kwargs or {}).get("device") == torch.device("cpu")
        assert not to_host, "a tensor goes to the host"
        return super().__torch_dispatch__(func, types, args, kwargs)


class Poisoned(Loader):
    """One step of it gives a gradient that is not finite on one process."""

    def __init__(self, world, bad_step):
        super().__init__(world)
        self.bad_step = bad_step

    def steps(self, first, count):
        for batch in super().steps(first, count):
            if batch.first_sample == self.bad_step and self.world.is_main:
                batch.micro_batches[0].arrays["x"][0] = float("inf")
            yield batch


def build(world, overrides=(), bad_step=None, model="Stack"):
    kinds = f"{{task: {{kind: 'helpers.models.odd:Task'}}, model: {{kind: 'helpers.models.odd:{model}'}}}}"
    settings = ["optimizer.warmup_steps=1", "train.gradient_clip_norm=0.5", f"train.steps={STEPS}", *overrides]
    resolved = config.parse(kinds, settings)
    loader = Poisoned(world, bad_step)
    mesh = Mesh(resolved.parallel.shape(world.size), world)
    engine, _ = session.build(resolved, build_task(resolved.task), loader, mesh)
    return resolved, engine, loader


def local(value):
    return value.to_local() if isinstance(value, DTensor) else value


def tensors(state, path=""):
    """Name -> a copy of each tensor of a state."""
    if isinstance(state, torch.Tensor):
        return {path: local(state).detach().clone()}
    items = state.items() if isinstance(state, dict) else []
    return {name: value for key, item in items for name, value in tensors(item, f"{path}/{key}").items()}


FORMATS = [[], ["precision.compute=bf16"]]
EIGHT_BIT = ["optimizer.state=8bit", "model.kind=helpers.models.odd:Wide"]
MATRICES = "optimizer.groups=[{pattern: '*.weight', muon: true}]"
OPTIMIZERS = [
    ["optimizer.kind=sgd"],
    ["optimizer.kind=sgd", "optimizer.momentum=0"],
    ["optimizer.kind=adafactor"],
    ["optimizer.kind=lamb"],
]
OPTIMIZERS += [["optimizer.kind=sgd", "optimizer.nesterov=true"], ["optimizer.kind=muon", MATRICES]]


def steps_without_a_read(world, overrides):
    _, engine, loader = build(world, overrides, bad_step=2)
    norms = []
    for batch in loader.steps(0, STEPS):
        with NothingIsRead():
            norms.append(engine.step(batch, ROWS, world.sum).gradient_norm)
    return [bool(torch.isfinite(norm)) for norm in norms]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("overrides", [*FORMATS, *OPTIMIZERS, ["train.average_decay=0.9"], EIGHT_BIT])
def test_the_host_reads_no_number_within_a_step(size, overrides):
    finite = [step != 2 for step in range(STEPS)]
    assert ranks.on(size, steps_without_a_read, overrides) == [finite] * size


def steps_with_sent_batches(world, model):
    """As the loader's thread sends them; whatever the engine itself brings to the device would wait for it."""
    _, engine, loader = build(world, model=model)
    from_numpy = torch.from_numpy
    send = Carrier.to(world.device, engine.task).send
    for batch in loader.steps(0, 3):
        micros = [replace(each, sent=send(each, count_loss_terms(engine.task, each))) for each in batch.micro_batches]
        torch.from_numpy = None
        try:
            with NothingGoesToTheHost():
                engine.step(replace(batch, micro_batches=micros), ROWS, lambda used: [0.0] * len(used))
        finally:
            torch.from_numpy = from_numpy


@pytest.mark.parametrize("model", ["Statistics", "Normed"])
def test_statistics_of_all_processes_stay_on_the_device(model):
    assert ranks.on(2, steps_with_sent_batches, model) == [None, None]


class Quiet:
    """What a loop needs beside its engine: nothing is saved, validated or recorded but at the end."""

    history = ()
    step = None
    busy = False
    overdue = False
    committed_step = 0

    def __init__(self):
        self.points = []

    def mark_watched(self):
        return contextlib.nullcontext()

    mark_resting = mark_watched

    def record(self, step, values, num_steps, num_samples, data):
        self.points.append((step, values))

    def save(self, *arguments):
        pass


def test_nor_does_the_loop_between_two_steps(monkeypatch):
    with in_process.world(monkeypatch) as world:
        settings = ["evaluate.interval_steps=0", "train.log_interval_steps=3", "train.max_nonfinite_steps=1"]
        resolved, engine, loader = build(world, settings, bad_step=1)
        quiet = Quiet()
        loop = Loop(resolved, world, engine, loader, None, quiet, quiet, StopRequest(), quiet)
        with NothingIsRead(), monkeypatch.context() as patch:
            patch.setattr(loop, "_save", lambda *arguments: None)
            assert loop.run(0) == STEPS
    assert [step for step, _ in quiet.points] == [3, 6] and "loss" in quiet.points[0][1]


def before_and_after(world, overrides, bad_step):
    """The state before a step, after it, and after the next one."""
    _, engine, loader = build(world, overrides, bad_step)
    states = [tensors(engine.state.save())]
    for batch in loader.steps(0, 2):
        engine.step(batch, ROWS, world.sum)
        states.append(tensors(engine.state.save()))
    return [{name: each.numpy() for name, each in state.items()} for state in states]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("overrides", [*FORMATS, *OPTIMIZERS])
def test_a_step_that_is_not_finite_on_one_process_changes_no_tensor_of_the_state_on_any(size, overrides):
    for before, bad, good in ranks.on(size, before_and_after, overrides, 0):
        assert len(before) >= 20 and any(name.endswith("/step") for name in before)
        assert all((before[name] == bad[name]).all() for name in before), "weights, moments and counts"
        assert not all((bad[name] == good[name]).all() for name in before)


def written(world, folder, overrides):
    """Takes some steps and writes the state; the keys, and the weights as they would be on one process."""
    _, engine, loader = build(world, overrides)
    for batch in loader.steps(0, 3):
        engine.step(batch, ROWS, world.sum)
    dcp.state_dict_saver.save(engine.state.save(), checkpoint_id=folder)
    keys = sorted(dcp.filesystem.FileSystemReader(folder).read_metadata().state_dict_metadata)
    return keys, full(engine)


def read_again(world, folder, overrides):
    """What an engine has that goes on from there, before and after one more step."""
    _, engine, loader = build(world, overrides)
    state = engine.state.save()
    dcp.state_dict_loader.load(state, checkpoint_id=folder)
    engine.state.load(state)
    loaded = full(engine)
    engine.step(next(loader.steps(3, 1)), ROWS, world.sum)
    return loaded, full(engine)


def full(engine):
    every = engine.model.state_dict() | {
        f"{key}/{name}": value
        for name, parameter in engine.model.named_parameters()
        for member in engine.optimizer.members
        for key, value in member.state.get(parameter, {}).items()
    }
    return {name: (v.full_tensor() if isinstance(v, DTensor) else v).clone().numpy() for name, v in every.items()}


@pytest.mark.parametrize(
    ("before", "after", "overrides"),
    [(1, 2, []), (2, 1, []), *((2, 3, each) for each in OPTIMIZERS), (3, 1, OPTIMIZERS[-1]), (1, 2, OPTIMIZERS[2])],
)
def test_one_process_without_a_wrapper_and_many_go_on_from_each_others_state(tmp_path, before, after, overrides):
    ((keys, weights), *_) = ranks.on(before, written, str(tmp_path / "a"), overrides)
    ((other_keys, _), *_) = ranks.on(after, written, str(tmp_path / "b"), overrides)
    assert keys == other_keys and "model.layers.0.weight" in keys
    expected, same = (
        ranks.on(before, read_again, str(tmp_path / "a"), overrides)[0],
        ranks.on(after, read_again, str(tmp_path / "a"), overrides),
    )
    for loaded, stepped in same:
        assert loaded.keys() == weights.keys() == stepped.keys()
        assert all((loaded[name] == weights[name]).all() for name in weights)
        for name, value in expected[1].items():
            assert stepped[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
