"""Sizes of batches that grow: each position once, whatever step an attempt begins at."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kftrain import config
from kftrain.data.batch_sizes import BatchSizes
from kftrain.data.loader import TrainLoader
from kftrain.data.order import BatchPlan
from kftrain.data.tuning import Tuning
from kftrain.errors import ConfigError

GROWTH = st.lists(st.tuples(st.integers(1, 7), st.integers(3, 9)), max_size=4)


class Numbers:
    """Samples that are their own numbers, in their order."""

    num_samples = 100_000

    def read(self, samples):
        return {"number": samples}

    def locate(self, positions):
        return positions


@given(GROWTH, st.integers(3, 12), st.integers(0, 30))
def test_positions_are_the_sums_of_the_sizes_before(growth, final, num_steps):
    sizes = BatchSizes(final, tuple(growth))
    plain = [size for steps, size in growth for _ in range(steps)] + [final] * 40
    assert [sizes.find_size(step) for step in range(num_steps)] == plain[:num_steps]
    assert sizes.count_samples(num_steps) == sum(plain[:num_steps])


@given(GROWTH, st.integers(3, 12), st.integers(1, 3), st.integers(0, 4), st.integers(0, 9), st.integers(0, 5))
def test_all_ranks_together_read_each_sample_once(growth, final, num_ranks, micro, first, prefetch):
    sizes, plan = BatchSizes(final, tuple(growth)), BatchPlan(final, num_ranks, micro)
    seen, starts = [], []
    for rank in range(num_ranks):
        loader = TrainLoader(Numbers(), Numbers(), plan, rank, Tuning(prefetch), sizes=sizes)
        for batch in loader.steps(first, 12):
            starts.append(batch.first_sample)
            assert len({len(each.weight) for each in batch.micro_batches}) == 1
            seen += [number for each in batch.micro_batches for number in each.arrays["number"][each.weight > 0]]
        loader.close()
    expected = np.arange(sizes.count_samples(first), sizes.count_samples(first + 12))
    assert sorted(seen) == expected.tolist()
    assert starts == [sizes.count_samples(step) for step in range(first, first + 12)] * num_ranks


@pytest.mark.parametrize(
    "phases", ["[{steps: 2, batch_size: 32}]", "[{steps: 1, batch_size: 8}, {steps: 1, batch_size: 4}]"]
)
def test_batches_that_do_not_grow_are_refused(phases):
    with pytest.raises(ConfigError, match="must grow up to global_batch_size"):
        config.parse(f"train: {{global_batch_size: 32, batch_warmup: {phases}}}")


def test_a_rate_that_is_scaled_needs_a_reference():
    with pytest.raises(ConfigError, match="are set together"):
        config.parse("optimizer: {scale_learning_rate: linear}")
    with pytest.raises(ConfigError, match="are set together"):
        config.parse("optimizer: {reference_batch_size: 4}")


def test_the_keys_are_in_the_training_identity_only_where_they_are_set():
    plain = config.parse("").training_identity("d")
    assert "batch_warmup" not in str(plain) and "scale_learning_rate" not in str(plain)
    grown = config.parse("train: {batch_warmup: [{steps: 2, batch_size: 4}]}").training_identity("d")
    assert grown["train"]["batch_warmup"] == [{"steps": 2, "batch_size": 4}]
