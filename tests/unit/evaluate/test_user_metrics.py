"""Metrics of a user's own: found by name, added to those of the task, and their faults are the user's."""

import numpy as np
import pytest

from kftrain.config import Config, parse
from kftrain.errors import ConfigError, UserCodeError
from kftrain.evaluate.identity import evaluation_digest
from kftrain.tasks.user_metrics import metrics_of

SUMS = {"correct": np.array([[3.0, 1.0]]), "count": np.array([[4.0, 4.0]])}


class Rate:
    def metrics(self, sums):
        return {"accuracy": sums["correct"] / sums["count"]}


def error_rate(sums):
    return {"error_rate": 1 - sums["correct"] / sums["count"]}


def same_name(sums):
    return {"accuracy": sums["count"]}


def scalar(sums):
    return {"mean": sums["count"].mean()}


def broken(sums):
    return {"x": sums["nothing"]}


not_a_function = 3


def of(*names):
    return metrics_of(Rate(), [f"{__name__}:{name}" for name in names])


def test_further_metrics_stand_beside_the_tasks():
    found = of("error_rate")(SUMS)
    assert found["accuracy"].tolist() == [[0.75, 0.25]] and found["error_rate"].tolist() == [[0.25, 0.75]]
    assert of()(SUMS).keys() == {"accuracy"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("same_name", "there is a metric of this name already"),
        ("scalar", r"must return \[1, 2\] for sums \[1, 2\], got \[\]"),
        ("broken", "KeyError: 'nothing'"),
    ],
)
def test_what_a_function_does_wrong_is_the_users_error_and_names_it(name, message, capsys):
    with pytest.raises(UserCodeError, match=message) as raised:
        of(name)(SUMS)
    assert raised.value.exit_code == 16 and f"{__name__}:{name}" in raised.value.line


@pytest.mark.parametrize("name", ["missing", "not_a_function"])
def test_a_function_that_is_not_there_is_an_error_of_the_configuration(name):
    with pytest.raises(ConfigError, match=r"evaluate\.metrics"):
        of(name)


def test_further_metrics_are_part_of_what_makes_evaluations_comparable_and_none_leaves_it_as_it_was():
    before = evaluation_digest(Config(), "d")
    assert evaluation_digest(parse("", ["evaluate.metrics=[]"]), "d") == before
    assert evaluation_digest(parse("", ["evaluate.metrics=['my.module:metric']"]), "d") != before
    assert evaluation_digest(parse("", ["evaluate.num_latency_passes=0"]), "d") == before
