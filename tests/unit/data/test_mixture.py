import itertools
from collections import Counter, defaultdict
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain.data import shares
from kftrain.data.mixture import Concatenated, MixtureOrder, MixturePhases, Phase
from kftrain.data.order import BatchPlan, TrainingOrder
from kftrain.data.shares import compute_slots

SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=4)


def mixture_of(sizes: list[int], phases: list[tuple[int, list[float]]], seed: int = 0) -> MixtureOrder:
    orders = [TrainingOrder(size, seed, 4, 3, f"part {number}") for number, size in enumerate(sizes)]
    return MixtureOrder(orders, MixturePhases([Phase(first, tuple(weights)) for first, weights in phases]))


def owner(sizes: list[int], sample: int) -> tuple[int, int]:
    """Component and number in it, by counting."""
    for component, size in enumerate(sizes):
        if sample < size:
            return component, sample
        sample -= size
    raise AssertionError("beyond the last sample")


def drawn_phases(data: st.DataObject, num_components: int) -> list[tuple[int, list[float]]]:
    weights = st.lists(st.integers(0, 7), min_size=num_components, max_size=num_components).filter(any)
    first_positions = [0, *sorted(data.draw(st.sets(st.integers(1, 300), max_size=2)))]
    return [(first, [float(weight) for weight in data.draw(weights)]) for first in first_positions]


@settings(derandomize=True, max_examples=150, deadline=None)
@given(SIZES, st.data())
def test_every_component_is_seen_exactly_once_in_each_epoch_of_its_own(sizes: list[int], data: st.DataObject) -> None:
    mixture = mixture_of(sizes, drawn_phases(data, len(sizes)))
    stop = data.draw(st.integers(1, 500))
    seen = defaultdict(list)
    for sample in mixture.locate(np.arange(stop)).tolist():
        component, number = owner(sizes, sample)
        seen[component].append(number)
    for component, numbers in seen.items():
        for start in range(0, len(numbers), sizes[component]):
            epoch = numbers[start : start + sizes[component]]
            assert max(Counter(epoch).values()) == 1
            assert len(epoch) < sizes[component] or set(epoch) == set(range(sizes[component]))


@settings(derandomize=True, max_examples=100, deadline=None)
@given(SIZES, st.integers(1, 30), st.data())
def test_kills_and_changes_of_the_world_change_no_sample(sizes: list[int], batch: int, data: st.DataObject) -> None:
    phases = drawn_phases(data, len(sizes))
    num_steps = 300 // batch
    kills = data.draw(st.lists(st.integers(0, num_steps - 1), max_size=3))
    trained: list[list[int]] = []
    for kill in [*kills, num_steps]:
        mixture = mixture_of(sizes, phases)  # a new process
        plan = BatchPlan(batch, data.draw(st.integers(1, min(16, batch))), data.draw(st.integers(0, batch)))
        for step in range(len(trained), kill):
            kept: list[int] = []
            for rank in range(plan.num_ranks):
                found = mixture.locate(step * batch + plan.offsets(rank).ravel()).tolist()
                kept += [sample for sample, weight in zip(found, plan.weights(rank).ravel(), strict=True) if weight]
            trained.append(kept)
        if kill < num_steps:
            del trained[data.draw(st.integers(0, len(trained))) :]
    undisturbed = mixture_of(sizes, phases).locate(np.arange(num_steps * batch)).tolist()
    assert list(itertools.chain.from_iterable(trained)) == undisturbed


@settings(derandomize=True, max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=6).filter(any), st.integers(0, 400), st.integers(1, 300))
def test_the_share_of_a_component_is_its_weight_in_any_window(weights: list[int], start: int, length: int) -> None:
    mixture = mixture_of([10] * len(weights), [(0, [float(weight) for weight in weights])])
    counts = Counter(mixture.phases.split(np.arange(start, start + length))[0].tolist())
    num_components = sum(weight > 0 for weight in weights)
    for component, weight in enumerate(weights):
        share = Fraction(weight, sum(weights))
        assert abs(counts[component] - length * share) <= 1 + share * max(0, num_components - 2)


def test_a_phase_begins_at_its_position_and_each_component_goes_on_where_it_was() -> None:
    sizes = [40, 40, 40]
    mixture = mixture_of(sizes, [(0, [1.0, 1.0, 0.0]), (31, [0.0, 1.0, 3.0])])
    components, own = mixture.phases.split(np.arange(71))
    assert Counter(components[:31].tolist()) == {0: 16, 1: 15}
    assert Counter(components[31:].tolist()) == {1: 10, 2: 30}
    for component in range(3):
        numbers = own[components == component].tolist()
        assert numbers == list(range(len(numbers)))


def test_components_of_equal_size_have_orders_of_their_own() -> None:
    mixture = mixture_of([40, 40], [(0, [1.0, 1.0])])
    samples = mixture.locate(np.arange(80))
    assert samples[samples < 40].tolist() != (samples[samples >= 40] - 40).tolist()


@pytest.mark.parametrize(
    ("weights", "slots"),
    [
        ([1.0], [1]),
        ([0.7, 0.3], [7, 3]),
        ([0.1, 0.2, 0.7], [1, 2, 7]),
        ([3.0, 0.0, 1.0], [3, 0, 1]),
        ([1.0, 1.0, 1.0], [1, 1, 1]),
        ([1e-05, 0.99999], [1, 99999]),
        ([500.0, 1500.0], [1, 3]),
    ],
)
def test_a_round_is_as_short_as_its_shares_allow(weights: list[float], slots: list[int]) -> None:
    assert compute_slots(weights) == slots


def test_thousands_of_components_are_no_matter_of_minutes() -> None:
    """Sums of fractions are counted, not seconds: each was made anew for each component."""
    added = []

    class Counted(Fraction):
        def __add__(self, other: object) -> Fraction:
            added.append(other)
            return Fraction(self) + other

        __radd__ = __add__

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shares, "Fraction", Counted)
        assert compute_slots([1.0] * 200) == [1] * 200
    assert len(added) <= 400


@pytest.mark.parametrize(("weights", "why"), [([0.0, 0.0], "above 0"), ([1.0, 1 / 3], "too many digits")])
def test_weights_without_a_round_are_refused(weights: list[float], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        compute_slots(weights)


class Numbers:
    """Samples that are their number, and whose they are."""

    def __init__(self, name: bytes, num_samples: int) -> None:
        self.name = name
        self.num_samples = num_samples

    def read(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        assert samples.max() < self.num_samples
        files = np.empty(len(samples), object)
        files[:] = [self.name] * len(samples)
        return {"pair": np.stack([samples, -samples], axis=1), "file": files}


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.data())
def test_datasets_read_as_one_give_the_rows_of_each(sizes: list[int], data: st.DataObject) -> None:
    whole = Concatenated([Numbers(bytes([component]), size) for component, size in enumerate(sizes)])
    assert whole.num_samples == sum(sizes)
    samples = data.draw(st.lists(st.integers(0, sum(sizes) - 1), min_size=1, max_size=20))
    rows = whole.read(np.array(samples))
    expected = [owner(sizes, sample) for sample in samples]
    assert rows["pair"].tolist() == [[number, -number] for _, number in expected]
    assert rows["file"].tolist() == [bytes([component]) for component, _ in expected]


def test_a_position_far_away_costs_no_more_memory() -> None:
    mixture = mixture_of([10**9, 10**8], [(0, [0.7, 0.3]), (10**15, [0.1, 0.9])])
    near, far = (mixture.phases.split(np.arange(start, start + 10)) for start in (10**15 - 10, 10**15))
    assert Counter(near[0].tolist()) == {0: 7, 1: 3} and Counter(far[0].tolist()) == {0: 1, 1: 9}
    assert min(far[1][far[0] == 1]) == 3 * 10**14
