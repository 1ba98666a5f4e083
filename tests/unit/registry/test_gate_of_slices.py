"""The gate on real files: slices that got worse, and accuracies that McNemar's test does not find better."""

import dataclasses
import math
import types

import numpy as np
import pytest
import scipy.stats

from kftrain.core import storage
from kftrain.errors import EvaluationError
from kftrain.registry import comparison
from kftrain.registry.comparison import MeasuredExport
from kftrain.run.documents import GateReason

NUM_GROUPS = 60
SLICES = ["a"] * 25 + ["b"] * 25 + ["few"] * 10


def answers(right):
    keys = np.array([f"item-{number:03d}" for number in range(NUM_GROUPS)])
    return {"correct": np.asarray(right, np.float64), "count": np.ones(NUM_GROUPS), "keys": keys}


def right_at(*numbers):
    found = np.zeros(NUM_GROUPS)
    found[list(numbers)] = 1.0
    return answers(found)


def changed(config, **registry_options):
    return config.model_copy(update={"registry": config.registry.model_copy(update=registry_options)})


@pytest.fixture
def traded(finished):
    """A challenger that gained all of slice a and lost a part of b, and its champion."""
    finished("one", 0, statistics=right_at(*range(25, 42), *range(50, 60)), slices=SLICES).submit()
    gained = right_at(*range(25), *range(35, 42), *range(50, 60))
    return finished("two", 0, statistics=gained, slices=SLICES)


def test_a_gain_that_costs_a_slice_is_refused_where_slices_are_looked_at(config, traded):
    refused = traded.submit(changed(config, max_slice_regression=0.05))
    assert not refused.promoted and "worse on slice b by 0.4" in refused.reason
    (worse,) = [each for each in refused.reasons if each.code == "slice_worse"]
    assert worse.figures["value"] == pytest.approx(-0.4) and worse.figures["limit"] == 0.05
    assert traded.submit(changed(config, max_slice_regression=0.4)).promoted


def test_by_default_slices_do_not_decide(traded):
    found = traded.submit()
    assert found.promoted and [each.code for each in found.reasons] == ["better", "mcnemar"]


def test_slices_of_few_groups_are_not_looked_at(config, finished):
    finished("one", 0, statistics=right_at(*range(25, 60)), slices=SLICES).submit()
    run = finished("two", 0, statistics=right_at(*range(50)), slices=SLICES)
    assert (
        run.submit(changed(config, max_slice_regression=0.0, slice_min_groups=20, promotion="never")).reasons[2].code
        == "slices"
    )
    small = run.submit(changed(config, max_slice_regression=0.0, slice_min_groups=5))
    assert not small.promoted and "worse on slice few by 1" in small.reason


def test_an_evaluation_of_before_has_no_sums_by_slice_and_leaves_the_decision_to_a_person(config, traded):
    folder = traded.paths.evaluation(traded.completion.checkpoint_digest, "e" * 64)
    evaluation = traded.evaluation.model_copy(update={"slices_sha256": ""})
    storage.publish_json(storage.join(folder, "metrics.json"), evaluation.to_dict())
    old = dataclasses.replace(traded, evaluation=evaluation)
    found = old.submit(changed(config, max_slice_regression=0.4))
    assert not found.promoted and found.awaits_person and "no sums by slice" in found.reason
    assert old.submit().promoted


def test_a_damaged_file_of_slices_is_refused(finished):
    finished("one", 0.6).submit()
    run = finished("two", 0, statistics=right_at(*range(50)), slices=SLICES)
    registered = run.register()
    folder = run.paths.evaluation(run.completion.checkpoint_digest, "e" * 64)
    storage.publish(storage.join(folder, "slices.npz"), b"no")
    with pytest.raises(EvaluationError, match="not those of"):
        run.gate(registered)


def test_mcnemar_decides_a_share_of_units_that_are_right(finished):
    finished("one", 0, statistics=right_at(*range(20, 40))).submit()
    found = finished("two", 0, statistics=right_at(*range(9), *range(22, 40))).submit()
    (test,) = [each for each in found.reasons if each.code.startswith("mcnemar")]
    tail = sum(math.comb(11, k) for k in range(9, 12)) / 2**11
    assert test.figures["p_value"] == pytest.approx(tail) and test.figures["limit"] == pytest.approx(0.0125)
    assert (test.verdict, found.promoted) == ("against", False)


def test_mcnemar_says_nothing_of_units_with_parts(finished):
    finished("one", 0.6).submit()
    assert [each.code for each in finished("two", 0.7).submit().reasons] == ["better"]


@pytest.mark.parametrize("count", [0, 3])
def test_what_the_champion_was_trained_on_is_said_and_decides_nothing(finished, count):
    finished("one", 0.5).submit()
    known = GateReason(code="trained_on", verdict="for", text="it was trained on some", figures={"value": count})
    found = finished("two", 0.7).submit(None, known)
    assert found.promoted and found.reasons[-1] == known
    assert found.reason.endswith("; it was trained on some") == (count > 0)


def precision(sums):
    """Of what was called positive; of a slice where nothing was there is none."""
    return {"accuracy": sums["correct"] / sums["count"]}


def test_a_slice_where_only_the_champion_has_a_value_is_a_loss_and_not_left_out(config):
    """Precision: a challenger that calls nothing positive on a slice has 0 / 0 there."""
    looked = changed(config, slice_min_groups=20, max_slice_regression=0.5)
    some, none = ({"correct": np.full(20, each), "count": np.full(20, each)} for each in (1.0, 0.0))
    keys = {"keys": np.array([f"{number:02d}" for number in range(20)])}

    def measured(a, b, c):
        slices = {name: {**sums, **keys} for name, sums in zip("abc", (a, b, c), strict=True)}
        return MeasuredExport(types.SimpleNamespace(slices=["a"]), {}, slices)

    ours, theirs = measured(some, none, none), measured(some, some, none)
    found = comparison.compute_slice_improvements(looked, precision, ours, theirs)
    assert sorted(found) == ["a", "b"] and math.isnan(found["b"].high) and found["a"].value == 0
    assert sorted(comparison.compute_slice_improvements(looked, precision, theirs, ours)) == ["a"]


def test_the_more_slices_are_looked_at_the_wider_are_their_intervals(config):
    """Bonferroni: all of them together have the confidence of one."""
    looked = changed(config, slice_min_groups=20)
    rng, keys = np.random.default_rng(0), np.array([f"{number:02d}" for number in range(40)])

    def measured(right, count):
        sums = {"correct": right, "count": np.ones(40), "keys": keys}
        slices = {f"s{number}": sums for number in range(count)}
        return MeasuredExport(types.SimpleNamespace(slices=["s0"]), {}, slices)

    ours, theirs = rng.random(40), rng.random(40)
    difference = ours - theirs
    for count in (1, 2, 10):
        found = comparison.compute_slice_improvements(looked, precision, measured(ours, count), measured(theirs, count))
        tail = (1 - config.registry.confidence) / count / 2
        margin = scipy.stats.t.isf(tail, 39) * difference.std(ddof=1) / math.sqrt(40)
        for each in found.values():
            assert each.high >= difference.mean() + margin - 1e-12
            assert each.low <= difference.mean() - margin + 1e-12
