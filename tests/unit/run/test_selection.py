"""The best of a series of evaluations, against a plain look at the series."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain import config
from kftrain.errors import ConfigError
from kftrain.run.selection import BestEvaluation, count_evaluation, describe_choice, order_steps
from kftrain.train.best import BestCheckpoint, choose_goal

VALUES = st.lists(st.one_of(st.integers(-3, 3).map(float), st.just(math.nan), st.just(math.inf)), max_size=12)


@settings(derandomize=True)
@given(VALUES, st.sampled_from(["minimize", "maximize"]))
def test_the_best_is_the_first_of_the_best_values_that_are_finite(values, goal):
    found = None
    for step, value in enumerate(values):
        found = count_evaluation(found, "m", goal, step, value)
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        count = found.num_without_improvement if found else 0
        assert (found is None, count) == (not values, len(values))
        assert found is None or (found.step, found.value) == (0, None)
        return
    value = min(finite) if goal == "minimize" else max(finite)
    assert (found.value, found.step) == (value, values.index(value))
    assert found.num_without_improvement == len(values) - 1 - found.step


def test_the_words():
    best = BestEvaluation(metric="loss", goal="minimize", step=300, value=1.61, num_without_improvement=5)
    assert describe_choice(best, 800, 1000) == (
        "best validation/loss 1.61 at step 300 of 1,000; stopped after 5 evaluations without improvement"
    )
    assert describe_choice(best, 1000, 1000) == "best validation/loss 1.61 at step 300 of 1,000"
    one = best.model_copy(update={"num_without_improvement": 1})
    assert describe_choice(one, 400, 1000).endswith("stopped after 1 evaluation without improvement")


@pytest.mark.parametrize(
    ("goal", "values", "steps", "expected"),
    [
        ("minimize", {10: 3.0, 20: 1.0, 30: 2.0}, [30, 20, 10], [20, 30, 10]),
        ("maximize", {10: 3.0, 20: 4.0, 30: 2.0}, [30, 20, 10], [20, 10, 30]),
        ("minimize", {10: math.nan, 20: 1.0}, [45, 20, 10, 5], [20, 45, 10, 5]),
        ("minimize", {20: 1.0, 30: 2.0}, [30, 25], [30, 25]),
        ("minimize", {20: 1.0, 30: 1.0, 10: 1.0}, [30, 20, 10], [20, 30, 10]),
        ("minimize", {}, [], []),
    ],
)
def test_which_checkpoint_takes_the_place_of_a_damaged_one(goal, values, steps, expected):
    best = BestEvaluation(metric="m", goal=goal, step=20, value=values.get(20, 0.0))
    assert order_steps(best, values, steps) == expected
    assert order_steps(None, values, steps) == steps[:1], "without a best one there is one model only"
    assert order_steps(BestEvaluation(metric="m", goal=goal), values, steps) == steps[:1]


def test_the_words_where_the_best_one_is_not_the_model():
    best = BestEvaluation(metric="loss", goal="minimize", step=300, value=1.61)
    assert describe_choice(best, 1000, 1000, 300) == describe_choice(best, 1000, 1000)
    assert describe_choice(best, 1000, 1000, 900) == (
        "best validation/loss 1.61 at step 300 of 1,000, "
        "whose checkpoint is damaged or gone: that of step 900 is the model"
    )
    none = BestEvaluation(metric="loss", goal="minimize", num_without_improvement=3)
    assert describe_choice(none, 300, 1000, 300) == (
        "no finite validation/loss in 3 evaluations: the last checkpoint is the model; "
        "stopped after 3 evaluations without improvement"
    )


def test_evaluations_without_a_finite_value_are_counted_until_there_is_one():
    best = best_of(["train.stop_after_no_improvement=3"])
    for step, value in enumerate([math.nan, math.inf, 5.0, math.nan, 6.0], start=1):
        assert not best.is_enough
        best.take(step, value)
    assert (best.selection.step, best.selection.num_without_improvement) == (3, 2) and not best.is_enough
    best = best_of(["train.stop_after_no_improvement=3"])
    for step in range(3):
        assert not best.is_enough
        best.take(step, math.nan)
    assert best.is_enough
    again = best_of(["train.stop_after_no_improvement=4"])
    again.resume(best.selection)
    assert not again.is_enough
    again.take(9, 1.0)
    again.forget(9)
    assert again.selection == best.selection, "the only good one could not be written"


def best_of(overrides=(), loss_metric=""):
    resolved = config.parse("", ["checkpoint.keep_best=m", "checkpoint.keep_best_goal=minimize", *overrides])
    return BestCheckpoint(resolved, None, loss_metric)


def test_a_best_checkpoint_that_could_not_be_written_is_the_one_before_again():
    best = best_of(["train.stop_after_no_improvement=2"])
    best.take(10, 3.0)
    best.take(20, 4.0)
    best.take(30, 2.0)
    best.forget(20)
    assert best.selection.step == 30
    best.forget(30)
    assert (best.selection.step, best.selection.value) == (10, 3.0) and not best.is_enough
    best.take(40, 3.5)
    assert best.is_enough and best.selection.step == 10
    none = best_of()
    none.take(10, 3.0)
    none.forget(10)
    assert none.selection is None


def test_what_a_checkpoint_says_of_another_metric_does_not_count():
    found = BestEvaluation(metric="m", goal="minimize", step=3, value=1.0)
    for other in ({"metric": "n"}, {"goal": "maximize"}):
        best = best_of()
        best.resume(found.model_copy(update=other))
        assert best.selection is None
    best.resume(found)
    assert best.selection == found


@pytest.mark.parametrize(
    ("overrides", "loss_metric", "goal"),
    [
        (["registry.metric=m", "registry.goal=maximize"], "", "maximize"),
        (["registry.metric=m", "registry.goal=maximize", "checkpoint.keep_best_goal=minimize"], "", "minimize"),
        ([], "m", "minimize"),
        ([], "n", None),
    ],
)
def test_which_direction_is_better(overrides, loss_metric, goal):
    resolved = config.parse("", ["checkpoint.keep_best=m", *overrides])
    if goal is None:
        with pytest.raises(ConfigError, match="keep_best_goal"):
            choose_goal(resolved, loss_metric)
    else:
        assert choose_goal(resolved, loss_metric) == goal
