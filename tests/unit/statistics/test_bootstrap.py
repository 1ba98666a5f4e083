"""Intervals against a naive loop and against their promised coverage."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain.errors import ConfigError, EvaluationError
from kftrain.statistics import bootstrap


def accuracy(sums):
    return {"accuracy": sums["correct"] / sums["count"], "error": 1.0 - sums["correct"] / sums["count"]}


def classifier(num_groups, rate, seed):
    generator = np.random.default_rng(seed)
    count = generator.integers(1, 20, num_groups).astype(np.float64)
    keys = np.array([f"document-{i:05d}" for i in range(num_groups)])
    return {
        "correct": generator.binomial(count.astype(int), rate).astype(np.float64),
        "count": count,
        "keys": keys,
    }


def naive(statistics, num_bootstrap, confidence, seed):
    generator = np.random.default_rng(seed)
    groups = sorted(zip(statistics["count"], statistics["correct"], strict=True))
    values = []
    for _ in range(num_bootstrap):
        drawn = [groups[i] for i in generator.integers(0, len(groups), len(groups))]
        values.append(sum(g[1] for g in drawn) / sum(g[0] for g in drawn))
    tail = (1 - confidence) / 2
    return np.quantile(values, [tail, 1 - tail])


def test_intervals_equal_those_of_a_naive_loop_for_any_chunk_size(monkeypatch):
    statistics = classifier(40, 0.7, seed=1)
    low, high = naive(statistics, 300, 0.9, seed=5)
    for chunk_bytes in (1, 8 * 40 * 7, 1 << 20):
        monkeypatch.setattr(bootstrap, "CHUNK_BYTES", chunk_bytes)
        found = bootstrap.intervals(accuracy, statistics, 300, 0.9, seed=5)["accuracy"]
        assert found.value == statistics["correct"].sum() / statistics["count"].sum()
        assert (found.low, found.high) == pytest.approx((low, high), rel=1e-12)


@settings(derandomize=True, max_examples=20, deadline=None)
@given(st.integers(1, 30), st.randoms(use_true_random=False))
def test_the_order_of_groups_does_not_matter(num_groups, random):
    statistics = classifier(num_groups, 0.6, seed=num_groups)
    order = random.sample(range(num_groups), num_groups)
    shuffled = {name: values[order] for name, values in statistics.items()}
    one, two = (bootstrap.intervals(accuracy, s, 100, 0.95, seed=0)["error"] for s in (statistics, shuffled))
    assert tuple(one.model_dump().values()) == pytest.approx(tuple(two.model_dump().values()), rel=1e-12)
    champion = classifier(num_groups, 0.4, seed=99)
    arguments = (100, 0.95, 0)
    paired = bootstrap.paired_improvement(accuracy, "accuracy", "maximize", statistics, champion, *arguments)
    assert paired == bootstrap.paired_improvement(accuracy, "accuracy", "maximize", shuffled, champion, *arguments)


def test_the_interval_covers_the_truth_about_as_often_as_it_promises():
    covered = 0
    for seed in range(200):
        found = bootstrap.intervals(accuracy, classifier(80, 0.7, seed), 200, 0.9, seed)["accuracy"]
        covered += found.low <= 0.7 <= found.high
    assert 0.84 <= covered / 200 <= 0.95


def test_pairing_finds_a_small_gain_that_separate_intervals_cannot_show():
    champion = classifier(400, 0.6, seed=2)
    challenger = dict(champion)
    challenger["correct"] = np.minimum(champion["correct"] + (np.arange(400) % 10 == 0), champion["count"])
    before, after = (bootstrap.intervals(accuracy, s, 300, 0.95, 0)["error"] for s in (champion, challenger))
    assert after.high > before.low
    gain = bootstrap.paired_improvement(accuracy, "error", "minimize", challenger, champion, 300, 0.95, 0)
    assert gain.value == pytest.approx(before.value - after.value)
    assert 0 < gain.low < gain.value < gain.high


def test_improvement_changes_its_sign_with_the_goal_and_with_the_roles():
    one = classifier(50, 0.8, seed=3)
    two = one | {"correct": np.floor(one["correct"] * 0.7)}
    up = bootstrap.paired_improvement(accuracy, "accuracy", "maximize", one, two, 100, 0.95, 0)
    down = bootstrap.paired_improvement(accuracy, "accuracy", "minimize", one, two, 100, 0.95, 0)
    swapped = bootstrap.paired_improvement(accuracy, "accuracy", "maximize", two, one, 100, 0.95, 0)
    assert up.value == -down.value == -swapped.value > 0
    for mirrored in (down, swapped):
        assert (up.low, up.high) == pytest.approx((-mirrored.high, -mirrored.low))


def test_a_model_against_itself_improves_by_exactly_nothing():
    statistics = classifier(30, 0.5, seed=4)
    found = bootstrap.paired_improvement(accuracy, "accuracy", "maximize", statistics, statistics, 100, 0.95, 0)
    assert (found.value, found.low, found.high) == (0, 0, 0)


def test_models_that_were_measured_on_other_groups_are_refused():
    one, two = classifier(10, 0.5, seed=0), classifier(11, 0.5, seed=0)
    with pytest.raises(EvaluationError, match="document-00010"):
        bootstrap.paired_improvement(accuracy, "accuracy", "maximize", one, two, 100, 0.95, 0)
    renamed = one | {"keys": np.array([*one["keys"][:-1], "another"])}
    with pytest.raises(EvaluationError, match="another"):
        bootstrap.paired_improvement(accuracy, "accuracy", "maximize", one, renamed, 100, 0.95, 0)
    doubled = one | {"keys": np.array([*one["keys"][:-1], one["keys"][0]])}
    with pytest.raises(EvaluationError, match="not unique"):
        bootstrap.paired_improvement(accuracy, "accuracy", "maximize", doubled, doubled, 100, 0.95, 0)


def test_an_unknown_metric_names_the_known_ones():
    statistics = classifier(10, 0.5, seed=0)
    with pytest.raises(ConfigError, match="known: accuracy, error"):
        bootstrap.paired_improvement(accuracy, "f1", "maximize", statistics, statistics, 100, 0.95, 0)


def test_nothing_to_resample_and_undefined_metrics_are_refused():
    with pytest.raises(EvaluationError, match="nothing to resample"):
        bootstrap.intervals(accuracy, {"correct": np.zeros(0), "count": np.zeros(0)}, 100, 0.95, 0)
    with pytest.raises(EvaluationError, match="not finite"):
        bootstrap.intervals(accuracy, {"correct": np.zeros(3), "count": np.zeros(3)}, 100, 0.95, 0)
    with pytest.raises(EvaluationError, match="one sum per group"):
        bootstrap.intervals(accuracy, {"correct": np.zeros(3), "count": np.zeros(4)}, 100, 0.95, 0)


def test_a_resample_without_a_value_says_nothing_so_it_makes_the_interval_wider():
    """With one group of four (0.75^4 = 32 % of all resamples lack it) nothing is known, with one of 2 it is 25 %."""
    rare = {"correct": np.array([1.0, 0, 0, 0]), "count": np.array([1.0, 0, 0, 0])}
    found = bootstrap.intervals(accuracy, rare, 200, 0.95, 0)["accuracy"]
    assert (found.value, found.low, found.high) == (1.0, -np.inf, np.inf)


@pytest.mark.parametrize(("num_with_value", "is_known"), [(2, False), (3, False), (6, True)])
def test_few_groups_with_a_value_among_many_are_not_certain(num_with_value, is_known):
    """Of 60 groups k have a value: (1 - k/60)^60 of the resamples draw none, 13 %, 4.6 % and 0.2 %."""
    keys = np.array([f"{i:02d}" for i in range(60)])
    count = (np.arange(60) < num_with_value).astype(np.float64)
    one, two = ({"correct": count * rate, "count": count, "keys": keys} for rate in (0.9, 0.5))
    found = bootstrap.paired_improvement(accuracy, "accuracy", "maximize", one, two, 1000, 0.95, 0)
    assert found.value == pytest.approx(0.4)
    assert (found.low > 0) == is_known and (found.high < np.inf) == is_known


def naive_differences(ours, theirs, num_bootstrap, confidence, seed, members):
    """Of the groups' numbers `members`, by a loop over draws from all of them."""
    generator = np.random.default_rng(seed)
    values = []
    for _ in range(num_bootstrap):
        drawn = [i for i in generator.integers(0, len(ours["keys"]), len(ours["keys"])) if i in members]
        rates = [sum(s["correct"][i] for i in drawn) / sum(s["count"][i] for i in drawn) for s in (ours, theirs)]
        values.append(rates[0] - rates[1])
    tail = (1 - confidence) / 2
    return np.quantile(values, [tail, 1 - tail])


def test_paired_differences_of_all_metrics_and_slices_equal_those_of_a_naive_loop():
    theirs = classifier(30, 0.6, seed=1)
    ours = theirs | {"correct": np.minimum(theirs["count"], theirs["correct"] + np.arange(30) % 2)}
    slices = {key: "even" if number % 2 == 0 else "odd" for number, key in enumerate(theirs["keys"].tolist())}
    whole, parts = bootstrap.paired_differences(accuracy, ours, theirs, slices, 200, 0.9, 7)
    assert set(whole) == {"accuracy", "error"} and set(parts) == {"even", "odd"}
    for found, members in (
        (whole, set(range(30))),
        (parts["odd"], set(range(1, 30, 2))),
        (parts["even"], set(range(0, 30, 2))),
    ):
        low, high = naive_differences(ours, theirs, 200, 0.9, 7, members)
        assert (found["accuracy"].low, found["accuracy"].high) == pytest.approx((low, high), abs=1e-12)
        assert found["accuracy"].value == pytest.approx(-found["error"].value)
    assert parts["even"]["accuracy"].value == 0 < parts["odd"]["accuracy"].low


def test_a_slice_of_one_group_has_a_difference_but_no_bounds_and_a_shuffled_side_changes_nothing():
    ours, theirs = classifier(20, 0.7, seed=2), classifier(20, 0.7, seed=2)
    ours = ours | {"correct": np.minimum(ours["correct"] + 1, ours["count"])}
    shuffled = {name: values[::-1] for name, values in theirs.items()}
    arguments = ({"document-00003": "rare"}, 200, 0.95, 0)
    whole, parts = bootstrap.paired_differences(accuracy, ours, theirs, *arguments)
    assert (whole, parts) == bootstrap.paired_differences(accuracy, ours, shuffled, *arguments)
    rare = parts["rare"]["accuracy"]
    assert (rare.low, rare.high) == (-np.inf, np.inf)
    expected = (ours["correct"][3] - theirs["correct"][3]) / theirs["count"][3]
    assert rare.value == pytest.approx(expected)
