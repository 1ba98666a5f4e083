"""Length grouping: batches of near length, and still each sample exactly once."""

from collections import Counter

import numpy as np
from helpers.toy_data import toy_config
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain.data.dataset import ShardedDataset
from kftrain.data.length_groups import LengthGroups
from kftrain.data.order import TrainingOrder
from kftrain.data.schema import BYTES, Block, Field, SampleSchema
from kftrain.data.shards.manifest import Manifest, Split, content_digest
from kftrain.data.shards.writer import SplitWriter
from kftrain.data.training_split import open_training_split

LENGTHS = np.random.default_rng(5).integers(1, 500, 3000)


def order_of(num_samples: int, batch: int, batches: int, window: tuple[int, int] = (8, 12)) -> TrainingOrder:
    groups = LengthGroups(lambda samples: LENGTHS[samples], batch, batches) if batches else None
    return TrainingOrder(num_samples, 1, *window, "", groups)


def spread(samples: np.ndarray, batch: int) -> float:
    """Mean over whole batches of how far lengths lie apart in one."""
    lengths = LENGTHS[samples[: len(samples) // batch * batch]].reshape(-1, batch)
    return float((lengths.max(axis=1) - lengths.min(axis=1)).mean())


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.integers(1, 300), st.integers(1, 20), st.integers(1, 6), st.integers(1, 9), st.integers(1, 9), st.data())
def test_every_epoch_holds_every_sample_once_and_a_lookup_does_not_depend_on_others(
    num_samples: int, batch: int, batches: int, range_samples: int, ranges: int, data: st.DataObject
) -> None:
    window = (range_samples, ranges)
    seen = order_of(num_samples, batch, batches, window).locate(np.arange(2 * num_samples))
    for epoch in range(2):
        one = seen[epoch * num_samples : (epoch + 1) * num_samples].tolist()
        assert Counter(one) == dict.fromkeys(range(num_samples), 1)
    start = data.draw(st.integers(0, 2 * num_samples - 1))
    resumed = order_of(num_samples, batch, batches, window).locate(np.arange(start, 2 * num_samples))
    assert resumed.tolist() == seen[start:].tolist()


def test_more_batches_in_a_group_are_nearer_in_length() -> None:
    found = [spread(order_of(3000, 30, batches, (64, 64)).locate(np.arange(3000)), 30) for batches in (0, 4, 100)]
    assert found[0] > 3 * found[1] > 30 * found[2]


def test_batches_come_in_no_order_of_their_length() -> None:
    samples = order_of(3000, 30, 100, (64, 64)).locate(np.arange(3000))
    means = LENGTHS[samples].reshape(-1, 30).mean(axis=1)
    assert abs(np.corrcoef(np.arange(100), means)[0, 1]) < 0.25


def test_a_dataset_is_grouped_by_the_bytes_of_its_samples(tmp_path) -> None:
    schema = SampleSchema((Field("text", BYTES, (), ("txt",)),))
    shards = {}
    for split in ("train", "validation"):
        with SplitWriter(tmp_path, split, schema, 1 << 16) as writer:
            for number, length in enumerate(LENGTHS[:400].tolist()):
                content = np.empty(1, object)
                content[0] = b"x" * length
                writer.write(Block(f"{number:06d}", {"text": content}))
            shards[split] = writer.finish()
    manifest = Manifest(
        dataset_digest=content_digest(schema, {}, shards),
        sample_schema=schema,
        task_kind="test",
        task_settings={},
        splits={split: Split(shards=found) for split, found in shards.items()},
        source="test",
        source_listing_digest="",
        baselines={},
    )
    uri = f"{tmp_path}/manifest.json"
    assert ShardedDataset(uri, manifest, "train").num_samples == 400
    config = toy_config("x", tmp_path, length_group_batches=50)
    batch = config.train.global_batch_size
    samples, order = open_training_split(uri, manifest, config)
    numbers = order.locate(np.arange(400))
    assert [len(text) for text in samples.read(numbers)["text"]] == LENGTHS[numbers].tolist()
    ungrouped = open_training_split(uri, manifest, toy_config("x", tmp_path))[1].locate(np.arange(400))
    assert spread(ungrouped, batch) > 5 * spread(numbers, batch)
