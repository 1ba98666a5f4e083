"""An epoch holds every sample exactly once: whatever the shards, the processes, the workers and the kills."""

import contextlib
import itertools
import operator
from collections import Counter

import numpy as np
import pytest
from helpers.splits import open_split
from helpers.toy_data import shard_toy, text_folder
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain.data.dataset import ShardedDataset
from kftrain.data.decoding import Decoding
from kftrain.data.loader import StepBatch, TrainLoader
from kftrain.data.order import BatchPlan, TrainingOrder
from kftrain.data.tuning import Tuning


class Numbers:
    """A dataset whose samples are their numbers."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def read(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        return {"number": samples.copy()}

    def place_of(self, sample: int) -> str:
        return str(sample)


WEIGHTS = operator.attrgetter("weight")
DECODING = Decoding(lambda sample, generator: sample, 0)


def stepped(loader: TrainLoader, first_step: int, num_steps: int) -> list[StepBatch]:
    with contextlib.closing(loader):
        return list(loader.steps(first_step, num_steps))


def kept(batch: StepBatch) -> list[int]:
    return [
        number
        for micro in batch.micro_batches
        for number, weight in zip(micro.arrays["number"].tolist(), micro.weight.tolist(), strict=True)
        if weight
    ]


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 50), st.integers(1, 5), st.integers(0, 99), st.data())
def test_all_ranks_of_all_attempts_together_see_the_dataset(
    num_samples: int, batch: int, range_samples: int, window: int, seed: int, data: st.DataObject
) -> None:
    """Each kill falls back to a commit before it; then another number of processes goes on, in other micro batches."""
    num_steps = -(-num_samples // batch) + 1
    kills = data.draw(st.lists(st.integers(0, num_steps - 1), max_size=3))
    trained: list[list[int]] = []
    for kill in [*kills, num_steps]:
        ranks = data.draw(st.integers(1, min(16, batch, num_samples)))
        plan, workers = BatchPlan(batch, ranks, data.draw(st.integers(0, batch))), data.draw(st.sampled_from([0, 1, 3]))
        decoding = data.draw(st.sampled_from([None, DECODING]))
        tuning = Tuning(data.draw(st.integers(0, 4)), workers if decoding else 0, max(1, workers))
        first, wanted = len(trained), max(kill - len(trained), 0)
        order = TrainingOrder(num_samples, seed, range_samples, window)
        parts = [
            stepped(
                TrainLoader(Numbers(num_samples), order, plan, rank, tuning, WEIGHTS, decoding),
                first,
                wanted,
            )
            for rank in range(ranks)
        ]
        assert {len(part) for part in parts} == {wanted}
        assert len({tuple(len(micro.weight) for step in part for micro in step.micro_batches) for part in parts}) == 1
        trained += [[number for part in parts for number in kept(part[step])] for step in range(wanted)]
        if kill < num_steps:
            del trained[data.draw(st.integers(0, len(trained))) :]
    assert [len(step) for step in trained] == [batch] * num_steps
    epoch = list(itertools.chain.from_iterable(trained))[:num_samples]
    assert Counter(epoch) == dict.fromkeys(range(num_samples), 1)


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> list[ShardedDataset]:
    """The same samples in shards of two sizes."""
    folder = tmp_path_factory.mktemp("sharded")
    texts = text_folder(folder / "texts", 400)
    sizes = (1 << 16, 1 << 22)
    uris = [shard_toy(texts, folder / str(size), shard_size_bytes=size).manifest_uri for size in sizes]
    return [open_split(uri, "train") for uri in uris]


def test_the_order_of_the_samples_does_not_depend_on_the_size_of_a_shard(datasets: list[ShardedDataset]) -> None:
    seen = []
    for dataset in datasets:
        order = TrainingOrder(dataset.num_samples, 3, 16, 4)
        steps = TrainLoader(dataset, order, BatchPlan(16, 1), 0, Tuning(0)).steps(0, 2 * dataset.num_samples // 16)
        seen.append([bytes(row) for step in steps for row in step.micro_batches[0].arrays["data"]])
    assert len(datasets[0]._shards) > len(datasets[1]._shards)
    assert seen[0] == seen[1]
