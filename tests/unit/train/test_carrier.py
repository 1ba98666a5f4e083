"""Batches on their way to the device, over a device that only writes down what it is asked for.

There is no GPU among the machines of the tests: `CudaStreams` itself is not run here.
"""

import contextlib
import threading

import numpy as np
import pytest
import torch
from helpers.decoded_samples import InMemory, Shuffled, decoding
from helpers.models import odd as odd_models

from kftrain.data.loader import MicroBatch, TrainLoader
from kftrain.data.order import BatchPlan
from kftrain.data.tuning import Tuning
from kftrain.errors import UserCodeError
from kftrain.train import probe
from kftrain.train.step import Carrier, compute_loss_sum, receive_tensors

CPU = torch.device("cpu")


class Rows:
    """`row` and `label` as tensors."""

    def count_terms(self, arrays):
        return np.full(len(arrays["label"]), 3)

    def batch(self, arrays):
        return {"row": torch.from_numpy(arrays["row"]), "label": torch.from_numpy(arrays["label"])}

    def inputs(self, batch):
        return (batch["row"],)


class FakeStreams:
    """A device: what is copied to it is another tensor; an event is how many copies there were."""

    def __init__(self):
        self.did = []
        self.is_aside = False

    def note(self, what, value=None):
        self.did.append((what, value, threading.current_thread().name.partition("_")[0], self.is_aside))

    @contextlib.contextmanager
    def aside(self):
        assert not self.is_aside
        self.is_aside = True
        yield
        self.is_aside = False

    def copy(self, tensor):
        copied = tensor.clone()
        self.note("copy", copied)
        return copied

    def mark(self):
        self.note("mark", len(self.did))
        return len(self.did) - 1

    def wait(self, event):
        self.note("wait", event)

    def hold(self, tensor):
        self.note("hold", tensor)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_tensors_are_copied_aside_in_the_loaders_thread_and_waited_for_where_they_are_used(prefetch):
    streams, task = FakeStreams(), Rows()
    loader = TrainLoader(
        *(InMemory(), Shuffled(), BatchPlan(6, 1, 3), 0, Tuning(prefetch)),
        count_terms=lambda micro: task.count_terms(micro.arrays) * micro.weight,
        decoding=decoding("augment"),
        send=Carrier(task, streams).send,
    )
    for batch in loader.steps(4, 5):
        assert batch.num_terms == 18
        for micro in batch.micro_batches:
            sent, before = micro.sent, len(streams.did)
            tensors = receive_tensors(task, micro, CPU)
            everything = [*tensors.batch.values(), tensors.weight, tensors.terms]
            copied = [number for number, (what, _, _, _) in enumerate(streams.did) if what == "copy"]
            own = [n for n in copied if any(streams.did[n][1] is tensor for tensor in everything)]
            assert len(own) == len(everything) == 4, "each is a copy, made once"
            assert streams.did[sent.event][:2] == ("mark", sent.event) and max(own) < sent.event
            assert not [n for n in copied if max(own) < n < sent.event], "nothing of another batch is waited for"
            did = [each for each in streams.did[before:] if each[0] in ("wait", "hold")]
            assert [what for what, *_ in did] == ["wait"] + ["hold"] * 4 and did[0][1] == sent.event
            assert {id(each[1]) for each in did[1:]} == set(map(id, everything))
            np.testing.assert_array_equal(tensors.batch["row"], micro.arrays["row"])
            np.testing.assert_array_equal(tensors.terms, [3.0] * 3)
            assert tensors.terms.dtype == tensors.weight.dtype == torch.float32
    thread = "prefetch" if prefetch else "MainThread"
    assert {each[2:] for each in streams.did if each[0] in ("copy", "mark")} == {(thread, True)}
    assert {each[2] for each in streams.did if each[0] in ("wait", "hold")} == {"MainThread"}


def test_on_the_cpu_nothing_is_copied():
    micro = MicroBatch({"row": np.ones((2, 3), np.float32), "label": np.arange(2)}, np.ones(2, np.float32))
    tensors = Carrier.to(CPU, Rows()).send(micro, np.ones(2)).receive()
    assert tensors.batch["row"].data_ptr() == micro.arrays["row"].ctypes.data
    assert tensors.weight.data_ptr() == micro.weight.ctypes.data


def test_what_the_task_raises_in_the_background_is_its_error_in_the_consumer():
    class Broken(Rows):
        def batch(self, arrays):
            raise ValueError("no batch")

    loader = TrainLoader(InMemory(), Shuffled(), BatchPlan(6, 1), 0, Tuning(2), send=Carrier(Broken(), None).send)
    with pytest.raises(UserCodeError, match=r"task\.batch: ValueError: no batch"):
        next(loader.steps(0, 1))


def test_a_loss_is_the_same_of_what_was_sent_and_of_rows():
    task, model = odd_models.Task(), odd_models.Stack()
    generator = np.random.default_rng(1)
    micro = MicroBatch({"x": generator.normal(size=(8, odd_models.DIM)).astype(np.float32)}, np.ones(8, np.float32))
    sent = Carrier(task, FakeStreams()).send(micro, np.ones(8))
    found = compute_loss_sum(model, task, receive_tensors(task, MicroBatch({}, micro.weight, sent), CPU))
    assert found.item() == compute_loss_sum(model, task, receive_tensors(task, micro, CPU)).item()


class Drawing(odd_models.Task):
    """Hides some numbers, as masked language models do."""

    def batch(self, arrays):
        x = torch.from_numpy(arrays["x"])
        return {"x": x * (torch.rand(x.shape) > 0.5)}


@pytest.mark.parametrize(("task", "draws"), [(odd_models.Task(), False), (Drawing(), True)])
def test_the_probe_sees_whether_a_batch_draws_numbers_that_the_step_has_seeded(task, draws):
    micro = MicroBatch({"x": np.ones((4, odd_models.DIM), np.float32)}, np.ones(4, np.float32))
    assert probe.observe_loss(odd_models.Stack(), task, micro, [], CPU, (0, 0)).draws is draws


def test_a_batch_that_draws_is_made_by_the_training_thread(monkeypatch):
    from helpers import in_process

    from kftrain import config
    from kftrain.parallel.mesh import Mesh
    from kftrain.train import session, spmd_factory

    class Loader(odd_models.Loader):
        sends = True

        def send_nothing(self):
            self.sends = False

    resolved = config.parse("{task: {kind: 'helpers.models.odd:Task'}, model: {kind: 'helpers.models.odd:Stack'}}")
    with in_process.world(monkeypatch) as world:
        for task, sends in ((odd_models.Task(), True), (Drawing(), False)):
            monkeypatch.setattr(spmd_factory, "build_task", lambda section, task=task: task)
            loader = Loader(world)
            session.build(resolved, task, loader, Mesh.of_copies(world))
            assert loader.sends is sends
