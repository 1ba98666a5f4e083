"""The gate's decisions and their reasons."""

import pytest

from kftrain.contracts import Interval
from kftrain.errors import ConfigError
from kftrain.registry.gate import Decision, decide, metric_of


def interval(low, value, high):
    return Interval(value=value, low=low, high=high)


def decision(improvement, min_effect=0.0, promotion="auto", champion=True, comparable=True):
    return decide(
        metric="bits_per_byte",
        goal="minimize",
        min_effect=min_effect,
        confidence=0.95,
        promotion=promotion,
        challenger=interval(1.9, 2.0, 2.1),
        champion=interval(2.0, 2.1, 2.2) if champion else None,
        improvement=improvement,
        comparable=comparable,
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
    found = decision(None, champion=False, comparable=False)
    assert not found.promote and "no evaluation on the same data" in found.reason


def test_manual_promotion_says_what_it_would_have_done():
    found = decision(interval(0.05, 0.1, 0.15), promotion="manual")
    assert not found.promote and found.reason.startswith("would be promoted, but promotion is manual: better: ")
    assert decision(interval(-0.3, -0.2, -0.1), promotion="manual").reason.startswith("worse: ")
    assert not decision(None, champion=False, promotion="manual").promote


def test_an_unknown_metric_names_the_known_ones():
    with pytest.raises(ConfigError, match="known: accuracy, loss"):
        metric_of({"loss": 1.0, "accuracy": 0.5}, "f1")
