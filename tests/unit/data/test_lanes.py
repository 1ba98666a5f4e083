"""Lanes: order 3. Each sample once an epoch, each lane its own ranges, and order 2 as it was."""

import hashlib
import itertools
import json
import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kftrain.data import permutation
from kftrain.data.lanes import Lanes
from kftrain.data.length_groups import LengthGroups
from kftrain.data.mixture import MixtureOrder, MixturePhases, Phase
from kftrain.data.order import BatchPlan, TrainingOrder

ORDER_2 = json.loads((Path(__file__).parents[2] / "golden" / "order_2.json").read_text())
"""Positions and their samples, as release 0.2 computed them."""


def stored_length(samples: np.ndarray) -> np.ndarray:
    return samples * 7919 % 541


def order_of(
    num_samples: int,
    batch: int,
    lanes: int,
    seed: int = 0,
    range_samples: int = 8,
    window_ranges: int = 3,
    groups: LengthGroups | None = None,
) -> TrainingOrder:
    cut = Lanes(lanes, batch, range_samples)
    return TrainingOrder(num_samples, seed, range_samples, window_ranges, "", groups, cut)


def lane_of_slots(batch: int, lanes: int) -> np.ndarray:
    """The lane of each slot: in each of the most equal parts of batch and lanes, the first lanes take the rest."""
    lanes = min(lanes, batch)
    parts = next(count for count in range(lanes, 0, -1) if lanes % count == 0 and batch % count == 0)
    plan = BatchPlan(batch // parts, lanes // parts)
    sizes = [stop - start for start, stop in map(plan.share, range(plan.num_ranks))] * parts
    return np.array([lane for lane, size in enumerate(sizes) for _ in range(size)])


def count_runs(samples: np.ndarray) -> int:
    ordered = np.sort(samples)
    return 1 + int((np.diff(ordered) != 1).sum())


@pytest.mark.parametrize("case", ORDER_2, ids=[str(number) for number in range(len(ORDER_2))])
def test_order_2_is_what_it_was_in_release_02(case) -> None:
    groups = LengthGroups(stored_length, *case["groups"]) if case["groups"] else None
    located = TrainingOrder(*case["arguments"], groups).locate(np.arange(*case["positions"]))
    assert located[:12].tolist() == case["first"]
    assert hashlib.sha256(located.astype("<i8").tobytes()).hexdigest() == case["sha256"]


SIZES = st.integers(1, 400)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(
    SIZES, st.integers(1, 70), st.integers(1, 20), st.integers(0, 2**32), st.integers(1, 30), st.integers(1, 14),
    st.integers(0, 3), st.data(),
)  # fmt: skip
def test_every_epoch_holds_every_sample_exactly_once(
    num_samples: int,
    batch: int,
    lanes: int,
    seed: int,
    range_samples: int,
    window: int,
    epoch: int,
    data: st.DataObject,
) -> None:
    """Whatever divides what, in whichever order positions are asked for, and however many ranks share a step."""
    sizes = (num_samples, batch, lanes, seed, range_samples, window)
    order, positions = order_of(*sizes), np.arange(epoch * num_samples, (epoch + 1) * num_samples)
    located = order.locate(positions)
    assert Counter(located.tolist()) == dict.fromkeys(range(num_samples), 1)
    plan, step = BatchPlan(batch, data.draw(st.integers(1, batch))), epoch * num_samples // batch + 1
    shares = [step * batch + np.arange(*plan.share(rank)) for rank in range(plan.num_ranks)]
    parts = [order_of(*sizes).locate(share) for share in shares]
    whole = order.locate(np.arange(step * batch, (step + 1) * batch))
    assert np.concatenate(parts).tolist() == whole.tolist()
    asked = np.random.default_rng(seed).permutation(len(positions))
    assert order.locate(positions[asked]).tolist() == located[asked].tolist()


@settings(derandomize=True, max_examples=150, deadline=None)
@given(
    st.integers(1, 2000), st.integers(1, 70), st.integers(1, 12), st.integers(1, 30), st.integers(1, 20),
    st.integers(0, 2),
)  # fmt: skip
def test_a_lane_reads_a_part_of_a_window_of_its_own(
    num_samples: int, batch: int, lanes: int, range_samples: int, window: int, epoch: int
) -> None:
    """It reads runs of samples that follow each other: not more of them than its share has ranges, and two ends."""
    range_samples, lanes = min(range_samples, num_samples), min(lanes, batch)
    order = order_of(num_samples, batch, lanes, 1, range_samples, window)
    num_ranges = -(-num_samples // range_samples)
    is_aligned = batch % lanes == 0 and range_samples % (batch // lanes) == 0
    most = max(-(-window // lanes), 1 if is_aligned else 2) * lanes
    assume(num_ranges > most)
    positions = np.arange(epoch * num_samples, (epoch + 1) * num_samples)
    samples, lane = order.locate(positions), lane_of_slots(batch, lanes)[positions % batch]
    num_units = num_ranges // lanes
    num_windows = -(-num_units * lanes // most)
    edges = [number * num_units // num_windows * lanes * range_samples for number in range(num_windows)]
    for start, stop in itertools.pairwise([*edges, num_samples]):
        assert stop - start < (most + lanes) * range_samples and stop - start <= order.window_ranges * range_samples
        for number in range(lanes):
            own = samples[start:stop][lane[start:stop] == number]
            if len(own):
                assert count_runs(own) <= -(-len(own) // range_samples) + 2 + (stop == num_samples)


def test_lanes_that_fit_have_whole_ranges() -> None:
    order = order_of(64 * 96 + 40, 32, 8, range_samples=96, window_ranges=8)
    positions = np.arange(64 * 96)
    samples, lane = order.locate(positions), (positions % 32) // 4
    for window, number in itertools.product(range(7), range(8)):
        own = samples[window * 768 : (window + 1) * 768][lane[window * 768 : (window + 1) * 768] == number]
        assert len(own) == 96 and count_runs(own) <= 2 and own.tolist() != sorted(own.tolist())


def test_samples_of_a_lane_come_in_no_order_and_lanes_in_none_of_theirs() -> None:
    order = order_of(200_000, 256, 64, range_samples=256, window_ranges=64)
    samples = order.locate(np.arange(64 * 256)).reshape(-1, 64, 4)
    for lane in (0, 13, 63):
        own = samples[:, lane].ravel()
        assert abs(np.corrcoef(np.arange(len(own)), own)[0, 1]) < 0.25
    assert abs(np.corrcoef(np.arange(64), samples.mean(axis=(0, 2)))[0, 1]) < 0.4
    assert len({tuple(np.argsort(samples[:, lane].ravel()).tolist()) for lane in range(64)}) == 64


@settings(derandomize=True, max_examples=80, deadline=None)
@given(st.integers(1, 300), st.integers(1, 70), st.integers(1, 20), st.integers(0, 2))
def test_a_dataset_that_fits_into_a_window_is_shuffled_as_a_whole_as_in_order_2(
    num_samples: int, batch: int, lanes: int, epoch: int
) -> None:
    positions = np.arange(epoch * num_samples, (epoch + 1) * num_samples)
    order = order_of(num_samples, batch, lanes, 5, 8, 38)
    assert order.locate(positions).tolist() == TrainingOrder(num_samples, 5, 8, 38).locate(positions).tolist()


def test_the_number_of_lanes_follows_no_number_of_nodes_and_fits_batch_and_table() -> None:
    assert Lanes(64, 32, 1024).num_lanes == 32
    assert Lanes(64, 1000, 1024).num_lanes == 64
    assert Lanes(64, 1000, 1 << 20).num_lanes == 2
    assert Lanes(64, 1000, 1 << 30).num_lanes == 1
    for batch, ranges in {1: 64, 32: 64, 64: 64, 256: 64, 100: 128, 192: 128}.items():
        assert Lanes(64, batch, 1024).widen_window(64, 1024, 6400) == ranges
    assert Lanes(100, 1000, 1024).widen_window(101, 1000, 6400) == 200


@settings(derandomize=True, max_examples=300, deadline=None)
@given(
    st.integers(1, 1 << 22), st.integers(1, 1 << 22), st.integers(1, 5000), st.integers(1, 9999),
    st.integers(1, 1 << 24),
)  # fmt: skip
def test_lanes_widen_no_window_beyond_the_largest_table(
    range_samples: int, window: int, batch: int, lanes: int, num_samples: int
) -> None:
    """Whatever the settings admit, also the last window of an epoch, to which goes what is left."""
    window = min(window, (1 << 22) // range_samples)
    order = order_of(num_samples, batch, lanes, 1, range_samples, window)
    assert order.window_ranges * order.range_samples <= 1 << 22
    for position in (0, num_samples // 2, num_samples - 1):
        table = order._find_window(position)
        assert table.stop - table.start <= min(1 << 22, order.window_ranges * order.range_samples)
        assert table.start <= position < table.stop


def test_what_fits_into_the_largest_window_is_shuffled_as_a_whole() -> None:
    positions = np.arange(127 << 15)
    order = order_of(127 << 15, 256, 64, 1, 1 << 15, 128)
    assert (
        order.locate(positions[:9]).tolist() == TrainingOrder(127 << 15, 1, 1 << 15, 128).locate(positions[:9]).tolist()
    )


def test_lanes_of_a_component_are_looked_up_once_a_window() -> None:
    """They cost as much as the rest of its table, whose samples may be sorted by length as well."""
    asked: list[int] = []
    lanes = Lanes(8, 24, 30, lambda own: asked.append(len(own)) or own)  # type: ignore[func-returns-value]
    TrainingOrder(6000, 1, 30, 16, "", LengthGroups(stored_length, 24, 10), lanes).locate(np.arange(240))
    assert asked == [240]


@settings(derandomize=True, max_examples=80, deadline=None)
@given(st.integers(1, 90), st.integers(1, 90), st.integers(0, 10**15))
def test_lanes_are_slots_that_follow_each_other_in_nearly_equal_numbers(batch: int, lanes: int, first: int) -> None:
    cut = Lanes(lanes, batch, 8)
    expected = lane_of_slots(batch, lanes)
    assert cut.find_lanes(first, 200).tolist() == expected[np.arange(first, first + 200) % batch].tolist()
    sizes = np.bincount(expected, minlength=cut.num_lanes)
    assert sizes.sum() == batch and sizes.max() - sizes.min() <= 1 and (np.diff(expected) >= 0).all()


@pytest.mark.parametrize(("batch", "lanes"), [(256, 64), (1000, 64), (480, 64), (96, 48), (63, 64), (60, 60)])
def test_nodes_that_divide_batch_and_lanes_share_none(batch: int, lanes: int) -> None:
    lane = Lanes(lanes, batch, 8).find_lanes(0, batch)
    for nodes in range(1, lanes + 1):
        if batch % nodes == 0 and min(lanes, batch) % nodes == 0:
            shares = [set(lane[slice(*BatchPlan(batch, nodes).share(node))].tolist()) for node in range(nodes)]
            assert sum(map(len, shares)) == len(set.union(*shares))


def test_order_3_is_fixed_for_all_times_and_machines() -> None:
    """A change of these numbers is another order: every run that is on its way would have to be refused."""
    located = order_of(26, 6, 3, 7, 4, 3).locate(np.arange(52)).tolist()
    assert located[:26] == [
        *(12, 15, 5, 6, 2, 1, 14, 13, 4, 7, 0, 3, 10, 11, 18, 20, 23, 22, 16, 17, 19, 21, 24, 25, 9, 8),
    ]
    assert located[26:] == [
        *(3, 4, 22, 21, 16, 15, 5, 6, 24, 23, 18, 17, 8, 2, 9, 10, 12, 14, 7, 1, 19, 20, 13, 11, 0, 25),
    ]
    positions = np.arange(3 * 10**9 - 2, 3 * 10**9 + 3)
    whole = [29176090, 717416644, 852662626, 852662034, 852661859]
    assert order_of(10**9, 256, 64, 7, 1024, 64).locate(positions).tolist() == whole
    uneven = [583177910, 717416357, 90400497, 852662463, 90401110]
    assert order_of(10**9, 100, 64, 7, 1024, 64).locate(positions).tolist() == uneven


def test_another_process_makes_the_same_tables() -> None:
    order = order_of(500, 10, 4)
    again = pickle.loads(pickle.dumps(order))
    assert again.locate(np.arange(900)).tolist() == order.locate(np.arange(900)).tolist()


@pytest.mark.parametrize("num_groups", [1, 7, 1 << 50])
def test_a_table_by_groups_is_the_same_on_every_machine(num_groups: int) -> None:
    """Of so many groups few bits of a hash are left: of equal ones the index decides, and not how numpy sorts."""
    key = permutation.derive_key("any")
    groups = np.random.default_rng(1).integers(0, 3, 5000) * ((num_groups - 1) // 2)
    hashes = permutation.derive_subkeys(key, np.arange(5000, dtype=np.uint64)).tolist()
    bits = 64 - int(groups.max()).bit_length()
    expected = sorted(range(5000), key=lambda i: (int(groups[i]), hashes[i] % (1 << bits) >> 13, i))
    assert permutation.shuffle_groups(groups, key).tolist() == expected


# -- mixtures ----------------------------------------------------------------------------------------------------------


@settings(derandomize=True, max_examples=150, deadline=None)
@given(st.integers(1, 4), st.data())
def test_each_own_position_of_a_component_stands_at_one_position(num_components: int, data: st.DataObject) -> None:
    weights = st.lists(st.integers(0, 7), min_size=num_components, max_size=num_components).filter(any)
    firsts = [0, *sorted(data.draw(st.sets(st.integers(1, 300), max_size=3)))]
    phases = MixturePhases([Phase(first, tuple(map(float, data.draw(weights)))) for first in firsts])
    positions = np.arange(500)
    components, own = phases.split(positions)
    for component in range(num_components):
        chosen = components == component
        asked = data.draw(st.permutations(range(int(chosen.sum())))) if chosen.any() else []
        back = phases.find_positions(component, own[chosen][asked])
        assert back.tolist() == positions[chosen][asked].tolist()
        beyond = phases.find_positions(component, np.arange(10_000, 10_050))  # of a component that pauses for ever, too
        assert len(set(beyond.tolist())) == 50 and beyond.min() >= 0


def mixture_of(sizes: list[int], batch: int, lanes: int, phases: list[Phase], range_samples: int = 16) -> MixtureOrder:
    rounds = MixturePhases(phases)
    orders = [
        TrainingOrder(
            size, 3, range_samples, 4, f"part {number}",
            lanes=Lanes(lanes, batch, range_samples, lambda own, number=number: rounds.find_positions(number, own)),
        )
        for number, size in enumerate(sizes)
    ]  # fmt: skip
    return MixtureOrder(orders, rounds)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=3), st.integers(1, 40), st.integers(1, 9), st.data())
def test_each_component_of_a_mixture_is_seen_exactly_once_in_each_of_its_epochs(
    sizes: list[int], batch: int, lanes: int, data: st.DataObject
) -> None:
    weights = st.lists(st.integers(0, 5), min_size=len(sizes), max_size=len(sizes)).filter(any)
    phases = [Phase(first, tuple(map(float, data.draw(weights)))) for first in (0, 170, 410)]
    samples = mixture_of(sizes, batch, lanes, phases, 4).locate(np.arange(900))
    first = 0
    for size in sizes:
        own = samples[(samples >= first) & (samples < first + size)] - first
        for start in range(0, len(own), size):
            counted = Counter(own[start : start + size].tolist())
            assert max(counted.values()) == 1 and len(counted) == min(size, len(own) - start)
        first += size


def test_slots_of_a_lane_read_its_ranges_of_each_component() -> None:
    """In both phases: a lane is a part of the global batch, not of the component's own samples."""
    batch, lanes, sizes = 32, 4, [40 * 16, 40 * 16]
    mixture = mixture_of(sizes, batch, lanes, [Phase(0, (3.0, 1.0)), Phase(batch * 10, (1.0, 1.0))])
    positions = np.arange(24 * batch)
    samples, (components, own) = mixture.locate(positions), mixture.phases.split(positions)
    lane = lane_of_slots(batch, lanes)[positions % batch]
    checked = 0
    for component, window, number in itertools.product(range(2), range(4), range(lanes)):
        inside = (components == component) & (own // (8 * 16) == window) & (lane == number)
        is_whole = (components == component).sum() >= (window + 1) * 8 * 16
        if is_whole:  # a window of two ranges for each lane
            assert count_runs(samples[inside]) <= -(-int(inside.sum()) // 16) + 3
            checked += 1
    assert checked >= 16


# -- batches of near length --------------------------------------------------------------------------------------------

LENGTHS = np.random.default_rng(5).lognormal(5, 0.4, 150_000).astype(np.int64)


def padding(samples: np.ndarray, batch: int) -> float:
    """Share of a batch that is padding, where each sample is as long as the longest."""
    lengths = LENGTHS[samples[: len(samples) // batch * batch]].reshape(-1, batch)
    return float(1 - lengths.sum() / (lengths.max(axis=1) * batch).sum())


@settings(derandomize=True, max_examples=120, deadline=None)
@given(
    SIZES, st.integers(1, 20), st.integers(1, 6), st.integers(1, 8), st.integers(1, 9), st.integers(1, 9), st.data()
)  # fmt: skip
def test_groups_of_lengths_hold_every_sample_once_and_a_lookup_does_not_depend_on_others(
    num_samples: int, batch: int, batches: int, lanes: int, range_samples: int, window: int, data: st.DataObject
) -> None:
    groups = LengthGroups(lambda samples: LENGTHS[samples], batch, batches)
    seen = order_of(num_samples, batch, lanes, 1, range_samples, window, groups).locate(np.arange(2 * num_samples))
    for epoch in range(2):
        one = seen[epoch * num_samples : (epoch + 1) * num_samples].tolist()
        assert Counter(one) == dict.fromkeys(range(num_samples), 1)
    start = data.draw(st.integers(0, 2 * num_samples - 1))
    resumed = order_of(num_samples, batch, lanes, 1, range_samples, window, groups)
    assert resumed.locate(np.arange(start, 2 * num_samples)).tolist() == seen[start:].tolist()


def test_a_lane_keeps_its_samples_of_a_group_and_batches_come_in_no_order_of_their_length() -> None:
    groups, positions = LengthGroups(lambda samples: LENGTHS[samples], 24, 10), np.arange(6000)
    plain = order_of(6000, 24, 8, 1, 30, 16).locate(positions).reshape(25, 10, 8, 3)  # group, batch, lane, slot
    sorted_by = order_of(6000, 24, 8, 1, 30, 16, groups).locate(positions).reshape(25, 10, 8, 3)
    for group, lane in itertools.product(range(25), range(8)):
        assert sorted(plain[group, :, lane].ravel().tolist()) == sorted(sorted_by[group, :, lane].ravel().tolist())
    means = LENGTHS[sorted_by].mean(axis=(2, 3))
    assert np.abs(np.mean([np.corrcoef(np.arange(10), row)[0, 1] for row in means])) < 0.25
    assert len({tuple(np.argsort(row).tolist()) for row in means}) > 20


def test_groups_of_more_batches_save_with_lanes_what_groups_saved_without() -> None:
    """A lane sorts its own few samples, so that a batch's lanes differ: stated, and what to do about it."""
    positions, num_samples, batch = np.arange(len(LENGTHS)), len(LENGTHS), 256

    def pad(batches: int, lanes: Lanes | None) -> float:
        groups = LengthGroups(lambda samples: LENGTHS[samples], batch, batches) if batches else None
        return padding(TrainingOrder(num_samples, 1, 1024, 64, "", groups, lanes).locate(positions), batch)

    lanes = Lanes(64, batch, 1024)
    none, old, now, more = pad(0, None), pad(50, None), pad(50, lanes), pad(250, lanes)
    print(f"padding {none:.3f}; groups of 50 batches {old:.3f} (order 2), {now:.3f}; of 250 {more:.3f}")
    assert now < 0.25 * none and more < 1.25 * old


# -- what a fleet reads ------------------------------------------------------------------------------------------------

BLOCK_BYTES = 192 << 10


def count_read(order: TrainingOrder, batch: int, num_nodes: int, sample_bytes: int, epoch: int = 1) -> float:
    """Count the blocks that the slots of each node touch in an epoch, over those that the dataset has."""
    positions = np.arange(epoch * order.num_samples, (epoch + 1) * order.num_samples)
    samples, plan = order.locate(positions), BatchPlan(batch, num_nodes)
    node = np.repeat(np.arange(num_nodes), [np.subtract(*plan.share(rank)[::-1]) for rank in range(num_nodes)])
    num_blocks = -(-order.num_samples * sample_bytes // BLOCK_BYTES)
    touched = np.concatenate([samples * sample_bytes, (samples + 1) * sample_bytes - 1]) // BLOCK_BYTES
    return len(np.unique(np.tile(node[positions % batch], 2) * num_blocks + touched)) / num_blocks


@pytest.mark.parametrize(
    ("batch", "range_samples", "sample_bytes"),
    [
        *[(256, 1024, 4096), (4096, 1024, 4129), (192, 1024, 4129), (480, 1024, 4096)],
        *[(1000, 200, 21_000), (64, 4096, 1024)],
    ],
)
def test_a_fleet_reads_the_dataset_once(batch: int, range_samples: int, sample_bytes: int) -> None:
    """Ranges of 4 MiB, verification on: whole blocks. Nodes that divide batch and lanes, from four windows on."""
    order = order_of(range_samples * 64 * 5 - 777, batch, 64, 0, range_samples, 64)
    old = TrainingOrder(order.num_samples, 0, range_samples, 64)
    for nodes in (1, 8, 64):
        if batch % nodes == 0:
            read, before = (count_read(one, batch, nodes, sample_bytes) for one in (order, old))
            what = f"batch {batch}, ranges of {range_samples} x {sample_bytes} bytes, {nodes} nodes"
            print(f"{what}: {read:.3f} x the dataset, {before:.2f} in order 2")
            assert read <= 1.1 and (nodes > 1 or read == 1.0)


def test_other_numbers_of_nodes_read_each_lane_once_for_each_of_its_nodes() -> None:
    """More nodes than lanes, or a number that does not divide them: factors are those of lanes that nodes have."""
    order = order_of(1024 * 64 * 5, 1024, 64, 0, 1024, 64)
    for nodes in (3, 48, 128, 256, 1000):
        read = count_read(order, 1024, nodes, 4096)
        shares = [BatchPlan(1024, nodes).share(node) for node in range(nodes)]
        lanes_read = sum(len({slot // 16 for slot in range(*share)}) for share in shares)
        print(f"{nodes} nodes: {read:.2f} = lanes {lanes_read / 64:.2f} x {read / lanes_read * 64:.3f}")
        assert 0.9 * lanes_read / 64 < read <= 1.1 * lanes_read / 64
