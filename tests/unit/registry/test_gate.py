"""The gate's decisions and their reasons."""

import json
import math
import re
from pathlib import Path

import pytest

from kftrain.errors import ConfigError
from kftrain.registry.gate import Evidence, decide, find_metric
from kftrain.registry.settings import RegistryConfig
from kftrain.run.documents import GateReason, Interval
from kftrain.statistics.significance import PairedTest


def interval(low, value, high):
    return Interval(value=value, low=low, high=high)


def decision(
    improvement,
    champion=True,
    obstacle="",
    num_groups=20,
    test=None,
    slices=None,
    number=0,
    confidence=0.95,
    costs=(),
    on_reference=None,
    **settings,
):
    evidence = Evidence(
        challenger=interval(1.9, 2.0, 2.1),
        num_groups=num_groups,
        champion=interval(2.0, 2.1, 2.2) if champion else None,
        improvement=improvement,
        confidence=confidence,
        number=number,
        test=test,
        slices={} if slices is None else slices,
        costs=dict(costs),
        reference=on_reference,
        obstacle=obstacle,
    )
    return decide(RegistryConfig(metric="bits_per_byte", **settings), evidence)


def codes(found):
    return [(each.code, each.verdict) for each in found.reasons]


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
    found = decision(interval(*improvement), min_effect=min_effect)
    assert found.promote is promote and found.reason.startswith(reason)
    assert (
        f"improvement {improvement[1]:.4g} [{improvement[0]:.4g}, {improvement[2]:.4g}] at 95% confidence"
        in found.reason
    )


def test_the_first_model_is_promoted():
    found = decision(None, champion=False)
    assert (found.promote, found.reason) == (True, "first model: bits_per_byte 2")
    assert codes(found) == [("first_model", "for")]


def test_what_was_evaluated_differently_is_not_promoted():
    found = decision(None, champion=False, obstacle="the champion was measured on other data")
    assert not found.promote and found.awaits_person
    assert found.reason == "not promoted, a person decides: the champion was measured on other data"
    assert codes(found) == [("not_comparable", "person")]


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


@pytest.mark.parametrize(
    ("settings", "awaits", "code"),
    [
        ({"promotion": "manual"}, True, ("promotion_manual", "person")),
        ({"num_groups": 3}, True, ("too_few_groups", "person")),
        ({"promotion": "never"}, False, ("promotion_never", "against")),
    ],
)
def test_a_person_is_waited_for_only_where_nothing_but_the_person_is_missing(settings, awaits, code):
    better, worse = interval(0.05, 0.1, 0.15), interval(-0.3, -0.2, -0.1)
    found = decision(better, **settings)
    assert (found.promote, found.awaits_person) == (False, awaits)
    assert codes(found) == [("better", "for"), code] and found.reason.startswith("would be promoted, but ")
    assert not decision(worse, **settings).awaits_person and not decision(better).awaits_person


def test_reasons_are_data_that_json_can_hold():
    found = decision(interval(float("-inf"), 0.1, float("inf")), number=3)
    (reason,) = found.reasons
    assert reason.code == "not_significant" and reason.verdict == "against" and ", try 3" in found.reason
    assert reason.figures == {
        "challenger": 2.0,
        "champion": 2.1,
        "value": 0.1,
        "limit": 0.0,
        "confidence": 0.95,
        "try": 3.0,
    }
    assert GateReason.model_validate_json(reason.model_dump_json()) == reason
    json.loads(reason.model_dump_json(), parse_constant=lambda constant: pytest.fail(constant))


def test_a_share_that_is_right_must_pass_mcnemar_too():
    better = interval(0.05, 0.1, 0.15)
    agrees = decision(better, test=PairedTest(12, 2, 0.0065))
    assert agrees.promote and codes(agrees)[1] == ("mcnemar", "for")
    found = decision(better, test=PairedTest(8, 2, 0.055))
    assert not found.promote and not found.awaits_person
    assert found.reason.startswith("not promoted, McNemar's test does not agree (8 right that were wrong, 2 wrong")
    assert found.reason.endswith("at 95% confidence") and codes(found)[1] == ("mcnemar_not_significant", "against")
    assert found.reasons[1].figures == {"better": 8.0, "worse": 2.0, "p_value": 0.055, "limit": pytest.approx(0.025)}


def test_a_later_try_must_pass_mcnemar_at_its_own_level():
    better, test = interval(0.05, 0.1, 0.15), PairedTest(12, 2, 0.0065)
    later = decision(better, test=test, number=2, confidence=1 - 0.05 / 6)
    assert not later.promote and later.reasons[1].figures["limit"] == pytest.approx(0.05 / 6 / 2)


def test_a_slice_that_is_shown_to_be_worse_stops_a_challenger_that_is_better_on_the_whole():
    better = interval(0.05, 0.1, 0.15)
    slices = {"one": interval(-0.2, -0.15, -0.06), "two": interval(-0.2, -0.01, 0.1), "six": interval(-0.3, -0.2, -0.1)}
    assert decision(better, slices=slices).promote, "slices are only reported unless a limit is set"
    found = decision(better, slices=slices, max_slice_regression=0.05)
    assert codes(found) == [("better", "for"), ("slice_worse", "against"), ("slice_worse", "against")]
    assert found.reason.startswith("not promoted, worse on slice six by 0.2 [0.1, 0.3]; worse on slice one by 0.15")
    assert codes(decision(better, slices=slices, max_slice_regression=0.07))[1:] == [("slice_worse", "against")]
    assert decision(better, slices=slices, max_slice_regression=0.11).promote
    assert codes(decision(better, max_slice_regression=0.0)) == [("better", "for"), ("slices", "for")]


def test_slices_that_cannot_be_compared_leave_the_decision_to_a_person():
    evidence = Evidence(interval(1, 2, 3), 20, interval(1, 2, 3), interval(0.05, 0.1, 0.15), 0.95, slices=None)
    found = decide(RegistryConfig(max_slice_regression=0.1), evidence)
    assert not found.promote and found.awaits_person and codes(found)[1] == ("slices_missing", "person")


def test_an_unknown_metric_names_the_known_ones():
    with pytest.raises(ConfigError, match="known: accuracy, loss"):
        find_metric({"loss": 1.0, "accuracy": 0.5}, "f1")


def test_every_code_is_in_the_docs():
    root = Path(__file__).parents[3]
    text = "".join((root / "kftrain" / "registry" / name).read_text() for name in ("gate.py", "judgement.py"))
    used = set(re.findall(r'code="(\w+)"|return "(\w+)", |_refusal\("(\w+)"|code = "(\w+)"|else "(\w+)"\n', text))
    codes = {name for groups in used for name in groups if name}
    described = set(re.findall(r"`(\w+)`", (root / "docs" / "gate.md").read_text()))
    assert len(codes) >= 14 and codes <= described


COSTS = {"calibration_error": 0.05, "latency_seconds": 0.02, "export_bytes": 1000.0}


@pytest.mark.parametrize("champion", [True, False])
def test_limits_hold_for_every_model_the_first_one_too(champion):
    better = interval(0.05, 0.1, 0.15) if champion else None
    limits = {"max_calibration_error": 0.05, "max_latency_seconds": 0.03, "max_export_bytes": 1000}
    found = decision(better, champion=champion, costs=COSTS, **limits)
    assert found.promote and codes(found)[1:] == [("limit_kept", "for")] * 3
    for name, limit in {"calibration_error": 0.04, "latency_seconds": 0.01, "export_bytes": 999}.items():
        found = decision(better, champion=champion, costs=COSTS, **{**limits, f"max_{name}": limit})
        (against,) = [each for each in found.reasons if each.verdict == "against"]
        assert not found.promote and not found.awaits_person and found.reason.startswith("not promoted, ")
        assert (against.code, against.figures) == ("limit_exceeded", {"value": COSTS[name], "limit": limit})


def test_a_limit_of_what_was_not_measured_leaves_the_decision_to_a_person():
    found = decision(interval(0.05, 0.1, 0.15), costs=COSTS, max_memory_bytes=5)
    assert not found.promote and found.awaits_person and codes(found)[1] == ("limit_unknown", "person")
    assert "registry.max_memory_bytes" in found.reason


def test_a_limit_that_is_exceeded_is_told_also_where_the_champion_cannot_be_compared():
    found = decision(None, champion=False, obstacle="its export is gone", costs=COSTS, max_export_bytes=5)
    assert (
        not found.awaits_person
        and found.reason == "not promoted: its export is gone; size in bytes 1000 is more than 5"
    )


@pytest.mark.parametrize(
    ("bounds", "margin", "code", "promote"),
    [
        ((-0.05, -0.01, 0.03), None, "reference", True),
        ((-0.05, -0.03, -0.01), None, "reference_worse", False),
        ((-0.05, -0.03, -0.01), 0.1, "reference", True),
        ((-0.05, -0.03, -0.01), 0.04, "reference_worse", False),
        ((-0.05, -0.01, 0.03), 0.04, "reference_not_within", False),
        ((float("-inf"), -0.01, float("inf")), 0.04, "reference_not_within", False),
        ((0.01, 0.03, 0.05), 0.0, "reference", True),
    ],
)
def test_a_challenger_must_not_get_worse_on_the_reference_set(bounds, margin, code, promote):
    found = decision(interval(0.05, 0.1, 0.15), on_reference=interval(*bounds), reference_margin=margin)
    assert codes(found) == [("better", "for"), (code, "for" if promote else "against")]
    assert found.promote is promote and not found.awaits_person
    assert promote or "on the reference set: improvement -0.0" in found.reason


def test_bounds_that_are_no_numbers_promote_nothing():
    unknown = interval(math.nan, math.nan, math.nan)
    better = interval(0.05, 0.1, 0.15)
    found = decision(better, on_reference=unknown)
    assert found.awaits_person and codes(found)[1] == ("reference_missing", "person")
    found = decision(better, slices={"a": unknown, "b": better}, max_slice_regression=0.1)
    assert not found.promote and codes(found)[1:] == [("slice_worse", "against")]
    assert "no value on slice a, where the champion has one" in found.reason
    assert not decision(unknown).promote


def test_a_champion_without_figures_on_the_reference_set_leaves_the_decision_to_a_person():
    one = interval(1, 2, 3)
    evidence = Evidence(one, 20, one, interval(0.05, 0.1, 0.15), 0.95, reference_obstacle="has no figures there")
    found = decide(RegistryConfig(), evidence)
    assert found.awaits_person and codes(found)[1] == ("reference_missing", "person")
    assert codes(decide(RegistryConfig(), Evidence(one, 20, reference_obstacle="x"))) == [("first_model", "for")]
