import itertools
import tracemalloc
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain.data.order import BatchPlan, TrainingOrder

SIZES = st.integers(1, 400)


def order_of(
    num_samples: int, seed: int = 0, range_samples: int = 8, window_ranges: int = 3, name: str = ""
) -> TrainingOrder:
    return TrainingOrder(num_samples, seed, range_samples, window_ranges, name)


def located(order: TrainingOrder, start: int, stop: int) -> list[int]:
    return order.locate(np.arange(start, stop)).tolist()


def of_all_ranks(order: TrainingOrder, step: int, plan: BatchPlan) -> list[int]:
    """The samples of weight 1 of a step."""
    kept: list[int] = []
    for rank in range(plan.num_ranks):
        found = order.locate(step * plan.global_batch_size + plan.offsets(rank).ravel())
        assert found.dtype == np.int64
        weights = plan.weights(rank).ravel().tolist()
        kept += [sample for sample, weight in zip(found.tolist(), weights, strict=True) if weight]
    return kept


@settings(derandomize=True, max_examples=150, deadline=None)
@given(SIZES, st.integers(1, 40), st.integers(1, 14), st.integers(0, 3), st.integers(0, 2**32))
def test_every_epoch_holds_every_sample_exactly_once(
    num_samples: int, range_samples: int, window: int, epoch: int, seed: int
) -> None:
    found = located(order_of(num_samples, seed, range_samples, window), epoch * num_samples, (epoch + 1) * num_samples)
    assert Counter(found) == dict.fromkeys(range(num_samples), 1)


@settings(derandomize=True, max_examples=120, deadline=None)
@given(SIZES, st.integers(1, 40), st.integers(1, 20), st.integers(1, 10), st.integers(0, 9), st.data())
def test_kills_and_changes_of_the_world_lose_and_repeat_no_sample(
    num_samples: int, batch: int, range_samples: int, window: int, seed: int, data: st.DataObject
) -> None:
    """Each kill falls back to a commit before it; from there another number of processes goes on."""
    num_steps = -(-2 * num_samples // batch)
    kills = data.draw(st.lists(st.integers(0, num_steps - 1), max_size=3))
    trained: list[list[int]] = []
    for kill in [*kills, num_steps]:
        order = order_of(num_samples, seed, range_samples, window)  # a new process
        plan = BatchPlan(batch, data.draw(st.integers(1, min(16, batch))), data.draw(st.integers(0, batch)))
        trained += [of_all_ranks(order, step, plan) for step in range(len(trained), kill)]
        if kill < num_steps:
            del trained[data.draw(st.integers(0, len(trained))) :]
    assert len(trained) == num_steps and {len(step) for step in trained} == {batch}
    seen = list(itertools.chain.from_iterable(trained))
    for epoch in range(2):
        one = seen[epoch * num_samples : (epoch + 1) * num_samples]
        assert Counter(one) == dict.fromkeys(range(num_samples), 1)


def test_epochs_seeds_sizes_and_names_have_different_orders() -> None:
    orders = {
        tuple(located(order_of(100), 0, 100)),
        tuple(located(order_of(100), 100, 200)),
        tuple(located(order_of(100, seed=1), 0, 100)),
        tuple(located(order_of(101), 0, 100)),
        tuple(located(order_of(100, name="code"), 0, 100)),
    }
    assert len(orders) == 5


@settings(derandomize=True, max_examples=60, deadline=None)
@given(SIZES, st.integers(1, 20), st.integers(1, 5), st.lists(st.integers(0, 1200), min_size=1, max_size=30))
def test_positions_may_be_looked_up_in_any_order_and_over_several_epochs(
    num_samples: int, range_samples: int, window: int, positions: list[int]
) -> None:
    order = order_of(num_samples, 3, range_samples, window)
    one_by_one = [int(order_of(num_samples, 3, range_samples, window).locate(np.array([p]))[0]) for p in positions]
    assert order.locate(np.array(positions)).tolist() == one_by_one


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.integers(1, 700), st.integers(1, 40), st.integers(1, 14), st.integers(0, 2))
def test_a_window_reads_few_runs_of_samples_that_follow_each_other(
    num_samples: int, range_samples: int, window: int, epoch: int
) -> None:
    """Whatever the sizes: no window touches more ranges than it may, and none is larger than it may be."""
    order = order_of(num_samples, 1, range_samples, window)
    seen = located(order, epoch * num_samples, (epoch + 1) * num_samples)
    num_ranges = -(-num_samples // range_samples) if range_samples < num_samples else 1
    num_windows = -(-num_ranges // window)
    cuts = [w * num_ranges // num_windows * min(range_samples, num_samples) for w in range(num_windows)]
    for start, stop in itertools.pairwise([*cuts, num_samples]):
        stored = sorted(seen[start:stop])
        runs = 1 + sum(1 for a, b in itertools.pairwise(stored) if b != a + 1)
        assert len(stored) <= window * range_samples
        assert runs <= window + 1  # one range may go on from the last sample to the first


def test_ranges_are_cut_elsewhere_in_every_epoch() -> None:
    """Samples that share a range in one epoch do not stay together for ever."""
    order = order_of(1000, range_samples=100, window_ranges=1)
    borders = set()
    for epoch in range(12):
        one = set(located(order, epoch * 1000, epoch * 1000 + 100))
        (first,) = {sample for sample in one if (sample - 1) % 1000 not in one}
        borders.add(first % 100)
    assert len(borders) > 6


def test_windows_of_equal_size_are_shuffled_differently() -> None:
    found = located(order_of(128, range_samples=64, window_ranges=1), 0, 128)
    first, second = ([sample - min(half) for sample in half] for half in (found[:64], found[64:]))
    assert first != second and first != sorted(first)


def test_looking_up_needs_memory_of_a_window_not_of_the_samples() -> None:
    order = order_of(10**12, range_samples=1024, window_ranges=8)
    tracemalloc.start()
    samples = order.locate(np.arange(10**12 - 500, 10**12 + 500))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20
    assert samples.min() >= 0 and samples.max() < 10**12 and len(set(samples.tolist())) == 1000


def test_the_order_is_fixed_for_all_times_and_machines() -> None:
    """A change of these numbers is another order: every run that is on its way would have to be refused."""
    assert located(order_of(12, seed=7, range_samples=3, window_ranges=2, name="web"), 0, 24) == [
        7,
        2,
        1,
        0,
        8,
        6,
        9,
        10,
        4,
        5,
        11,
        3,
        7,
        5,
        8,
        6,
        3,
        4,
        9,
        1,
        11,
        0,
        2,
        10,
    ]
    large = order_of(10**9, seed=7, range_samples=1024, window_ranges=64)
    assert located(large, 3 * 10**9 - 2, 3 * 10**9 + 3) == [687058472, 466022088, 414348291, 560783241, 361760652]
