import tracemalloc

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain.data.order import BatchPlan, TrainingOrder

SHARDS = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def order_of(samples: list[int], seed: int = 0, window: int = 3, digest: str = "d") -> TrainingOrder:
    return TrainingOrder(samples, digest, seed, window)


def located(order: TrainingOrder, start: int, stop: int) -> list[tuple[int, int]]:
    shard_ids, rows = order.locate(np.arange(start, stop))
    return list(zip(shard_ids.tolist(), rows.tolist(), strict=True))


@settings(derandomize=True, max_examples=60, deadline=None)
@given(SHARDS, st.integers(1, 14), st.integers(0, 3))
def test_every_epoch_holds_every_sample_exactly_once(samples: list[int], window: int, epoch: int) -> None:
    order = order_of(samples, window=window)
    n = order.num_samples
    expected = sorted((shard, row) for shard, count in enumerate(samples) for row in range(count))
    assert sorted(located(order, epoch * n, (epoch + 1) * n)) == expected


@settings(derandomize=True, max_examples=80, deadline=None)
@given(SHARDS, st.integers(1, 40), st.data())
def test_any_ranks_and_resume_points_see_the_same_samples_in_the_same_steps(
    samples: list[int], batch: int, data: st.DataObject
) -> None:
    order = order_of(samples)
    num_steps = -(-2 * order.num_samples // batch)
    resumes = sorted(data.draw(st.sets(st.integers(1, num_steps), max_size=3)))
    seen: list[tuple[int, int]] = []
    for first, last in zip([0, *resumes], [*resumes, num_steps], strict=True):
        plan = BatchPlan(batch, data.draw(st.integers(1, batch)), data.draw(st.integers(0, batch)))
        for step in range(first, last):
            for rank in range(plan.num_ranks):
                kept = plan.weights(rank).ravel() == 1
                shard_ids, rows = order.locate(step * batch + plan.offsets(rank).ravel())
                seen += zip(shard_ids[kept].tolist(), rows[kept].tolist(), strict=True)
    assert seen == located(order, 0, num_steps * batch)


def test_epochs_seeds_and_datasets_have_different_orders() -> None:
    samples = [50, 50]
    orders = {
        tuple(located(order_of(samples), 0, 100)),
        tuple(located(order_of(samples), 100, 200)),
        tuple(located(order_of(samples, seed=1), 0, 100)),
        tuple(located(order_of(samples, digest="e"), 0, 100)),
    }
    assert len(orders) == 4


def test_positions_may_be_looked_up_in_any_order_and_over_several_epochs() -> None:
    order = order_of([7, 5])
    positions = np.array([30, 2, 13, 2, 0, 25])
    shard_ids, rows = order.locate(positions)
    whole = located(order, 0, 36)
    assert list(zip(shard_ids.tolist(), rows.tolist(), strict=True)) == [whole[p] for p in positions]


def test_a_window_keeps_reading_within_its_shards() -> None:
    order = order_of([10] * 12, window=3)
    shards = [shard for shard, _ in located(order, 0, 120)]
    windows = [set(shards[start : start + 30]) for start in range(0, 120, 30)]
    assert all(len(window) == 3 for window in windows) and set.union(*windows) == set(range(12))
    assert shards != sorted(shards)


def test_windows_of_equal_size_are_shuffled_differently() -> None:
    rows = [row for _, row in located(order_of([50, 50], window=1), 0, 100)]
    assert sorted(rows[:50]) == sorted(rows[50:]) == list(range(50))
    assert rows[:50] != rows[50:]


def test_looking_up_needs_memory_of_shards_not_of_samples() -> None:
    order = order_of([10**9] * 10, window=4)
    tracemalloc.start()
    shard_ids, rows = order.locate(np.arange(10**10 - 500, 10**10 + 500))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    assert len(set(zip(shard_ids.tolist(), rows.tolist(), strict=True))) == 1000
