"""`Task.decode`: the same random numbers for a sample on any number of processes, none outside of training."""

import numpy as np
import pandas
import pytest
import torch
from helpers import in_process
from helpers.splits import open_split
from helpers.toy_data import shard_toy, text_folder
from torch import nn

from kftrain.data.decoding import Decoding, Generators, wrap_decode
from kftrain.data.loader import TrainLoader
from kftrain.data.order import BatchPlan, TrainingOrder
from kftrain.data.schema import Field, SampleSchema
from kftrain.data.tuning import Tuning
from kftrain.errors import DataError, UserCodeError
from kftrain.evaluate import examples
from kftrain.evaluate.score import score
from kftrain.parallel.mesh import Mesh
from kftrain.tasks import Regression

SEED = 3


class Noisy(Regression):
    """Field `data` is its doubles, with noise in training; `target` is made from it."""

    targets = ("target", "length")

    def schema(self):
        return SampleSchema((Field("data", "uint8", (8,)), Field("length", "int64")))

    def decode(self, sample, generator):
        noise = 0.0 if generator is None else generator.normal()
        data = sample["data"].astype(np.float32) * 2 + np.float32(noise)
        return {"data": data, "target": np.float32(sample["length"])}

    def batch(self, arrays):
        return {name: torch.from_numpy(arrays[name]) for name in ("data", "target")}


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, data):
        return data[:, 0] * self.scale


def loaded(shards, num_ranks, task, first_step=0, num_steps=12, num_workers=0):
    """Rows of each position."""
    dataset = open_split(shards.manifest_uri, "train")
    order = TrainingOrder(dataset.num_samples, 0, 8, 2)
    plan, decoding = BatchPlan(4, num_ranks), Decoding(wrap_decode(task), SEED)
    found = {}
    for rank in range(num_ranks):
        for batch in TrainLoader(
            dataset, order, plan, rank, Tuning(2, num_workers, max(1, num_workers)), decoding=decoding
        ).steps(first_step, num_steps):
            positions = (batch.first_sample + plan.offsets(rank)).ravel()
            rows = np.concatenate([micro.arrays["data"] for micro in batch.micro_batches])
            found.update(zip(positions.tolist(), rows, strict=True))
    stored = dataset.read(order.locate(np.arange(4 * first_step, 4 * (first_step + num_steps))))["data"]
    return found, stored


@pytest.fixture
def shards(tmp_path):
    return shard_toy(text_folder(tmp_path / "texts"), tmp_path / "root")


def test_a_sample_is_decoded_alike_on_any_number_of_processes_and_after_a_restart(shards):
    alone, stored = loaded(shards, 1, Noisy())
    assert sorted(alone) == list(range(48))
    for position, row in alone.items():
        noise = Generators(SEED).at(position).normal()
        np.testing.assert_allclose(row, stored[position] * 2.0 + noise, rtol=1e-6)
    both, _ = loaded(shards, 2, Noisy())
    later, _ = loaded(shards, 2, Noisy(), first_step=7, num_steps=5, num_workers=3)
    for found in (both, later):
        assert all(np.array_equal(row, alone[position]) for position, row in found.items())
    assert sorted(both) == sorted(alone) and sorted(later) == list(range(28, 48))


def test_evaluation_examples_and_predict_decode_without_random_numbers(shards, monkeypatch):
    task, dataset = Noisy(), open_split(shards.manifest_uri, "validation")
    arrays, _ = dataset.read_range(0, dataset.num_samples)
    expected = arrays["data"][:, 0] * 2.0
    with in_process.world(monkeypatch) as world:
        found = score(First(), task, dataset, Mesh.of_copies(world), batch_size=3)
    np.testing.assert_allclose(found.statistics["squared_error"], np.square(expected - arrays["length"]))
    answer = task.predict(First(), pandas.DataFrame({"data": list(arrays["data"])}))
    np.testing.assert_allclose(answer["prediction"], expected)
    shown = examples.show_examples(task, First(), dataset, [0, 1], 2, torch.device("cpu"))
    assert shown == [{"target": float(arrays["length"][n]), "prediction": expected[n]} for n in (0, 1)]


def test_rows_of_different_shapes_are_the_users_error(shards):
    class Ragged(Noisy):
        def decode(self, sample, generator):
            return {"data": sample["data"][: generator.integers(1, 8)]}

    with pytest.raises(
        UserCodeError, match=r"train-\d+\.tar, \S+: task\.decode: must return 'data' as uint8 \[\d\] for"
    ):
        loaded(shards, 1, Ragged())


def test_a_validation_sample_that_cannot_be_decoded_is_named_with_shard_and_key(shards, monkeypatch):
    class Refusing(Noisy):
        def decode(self, sample, generator):
            raise DataError("damaged")

    dataset = open_split(shards.manifest_uri, "validation")
    with in_process.world(monkeypatch) as world, pytest.raises(DataError, match=r"validation-\d+\.tar, \S+: damaged"):
        score(First(), Refusing(), dataset, Mesh.of_copies(world), batch_size=3)
