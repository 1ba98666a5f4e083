"""The gate's decisions and their reasons."""

import pytest

from kftrain.errors import ConfigError
from kftrain.registry.gate import Decision, decide, metric_of
from kftrain.run.documents import Interval


def interval(low, value, high):
    return Interval(value=value, low=low, high=high)


def decision(improvement, min_effect=0.0, promotion="auto", champion=True, obstacle="", num_groups=20, min_groups=20):
    return decide(
        metric="bits_per_byte",
        goal="minimize",
        min_effect=min_effect,
        confidence=0.95,
        promotion=promotion,
        challenger=interval(1.9, 2.0, 2.1),
        champion=interval(2.0, 2.1, 2.2) if champion else None,
        improvement=improvement,
        obstacle=obstacle,
        num_groups=num_groups,
        min_groups=min_groups,
    )


@pytest.mark.parametrize(
    ("improvement", "min_effect", "promote", "reason"),
    [
        ((0.05, 0.1, 0.15), 0.0, True, "better: bits_per_byte 2.1 -> 2"),
        ((0.05, 0.1, 0.15), 0.05, False, "better, but not by more than 0.05: "),
        ((0.0, 0.0, 0.0), 0.0, False, "not significantly better: "),
        ((-0.01, 0.1, 0.2), 0.0, False, "not significantly better: "),
        ((-0.3, -0.2, -0.1), 0.0, False, "worse: "),
    ],
)
def test_a_challenger_is_promoted_only_if_the_lower_bound_exceeds_the_least_effect(
    improvement, min_effect, promote, reason
):
    found = decision(interval(*improvement), min_effect)
    assert found.promote is promote and found.reason.startswith(reason)
    assert (
        f"improvement {improvement[1]:.4g} [{improvement[0]:.4g}, {improvement[2]:.4g}] at 95% confidence"
        in found.reason
    )


def test_the_first_model_is_promoted():
    assert decision(None, champion=False) == Decision(True, "first model: bits_per_byte 2")


def test_what_was_evaluated_differently_is_not_promoted():
    found = decision(None, champion=False, obstacle="the champion was measured on other data")
    assert found == Decision(False, "not promoted, a person decides: the champion was measured on other data")


def test_few_groups_leave_the_decision_to_a_person():
    better = interval(0.05, 0.1, 0.15)
    found = decision(better, num_groups=19)
    assert not found.promote
    assert found.reason.startswith("would be promoted, but 19 groups are too few to decide without a person")
    assert "registry.min_groups" in found.reason and "better: bits_per_byte 2.1 -> 2" in found.reason
    assert decision(better, num_groups=20).promote
    assert decision(better, num_groups=3, min_groups=3).promote
    assert decision(interval(-0.3, -0.2, -0.1), num_groups=3).reason.startswith("worse: ")
    assert decision(None, champion=False, num_groups=1).promote, "the first model ever has nothing to be compared with"


def test_an_interval_that_is_not_known_promotes_nothing():
    found = decision(interval(float("-inf"), 0.1, float("inf")))
    assert not found.promote and found.reason.startswith("not significantly better")


def test_manual_promotion_says_what_it_would_have_done():
    found = decision(interval(0.05, 0.1, 0.15), promotion="manual")
    assert not found.promote and found.reason.startswith("would be promoted, but promotion is manual: better: ")
    assert decision(interval(-0.3, -0.2, -0.1), promotion="manual").reason.startswith("worse: ")
    assert not decision(None, champion=False, promotion="manual").promote


def test_an_unknown_metric_names_the_known_ones():
    with pytest.raises(ConfigError, match="known: accuracy, loss"):
        metric_of({"loss": 1.0, "accuracy": 0.5}, "f1")
