"""What the slices of an evaluation hold: their metrics, with the intervals of the bootstrap of the whole."""

import numpy as np
import pytest

from kftrain.core import storage
from kftrain.errors import EvaluationError
from kftrain.evaluate.session import measure, sums_by_slice
from kftrain.registry import comparison
from kftrain.run.documents import Slice
from kftrain.statistics import bootstrap

NUM_BOOTSTRAP, SEED = 400, 0


class RecallTask:
    """Recall of a class that one part of the data does not have."""

    def slice_names(self, keys, statistics):
        return [key.split("/")[0] for key in keys]

    def metrics(self, sums):
        with np.errstate(invalid="ignore", divide="ignore"):
            return {"recall": sums["found"] / sums["there"], "size": sums["size"]}


def evaluated(task, statistics, keys, rows_per_group=None):
    rows = np.ones(len(keys), np.int64) if rows_per_group is None else rows_per_group
    return measure(task, statistics, rows, keys, NUM_BOOTSTRAP)


def test_a_metric_that_a_slice_does_not_determine_is_left_out_of_it():
    statistics = {"found": np.array([1.0, 0, 0]), "there": np.array([1.0, 1, 0]), "size": np.ones(3)}
    _, slices = evaluated(RecallTask(), statistics, ["a/1", "a/2", "b/1"], np.array([2, 3, 1]))
    assert slices["a"].metrics == {"recall": 0.5, "size": 2.0} and slices["a"].num_samples == 5
    assert slices["b"].metrics == {"size": 1.0} and slices["b"].num_samples == 1
    assert slices["b"].intervals.keys() == {"size"}
    storage.dump_json({name: part.model_dump(mode="json") for name, part in slices.items()})


def test_a_metric_that_all_of_the_data_does_not_determine_is_an_evaluation_error_that_names_it():
    statistics = {"found": np.zeros(3), "there": np.zeros(3), "size": np.ones(3)}
    with pytest.raises(EvaluationError, match="recall: a metric is not finite"):
        bootstrap.intervals(RecallTask().metrics, statistics, 100, 0.95, seed=0)


class MeanTask:
    def slice_names(self, keys, statistics):
        return [key.split("/")[0] for key in keys]

    def metrics(self, sums):
        with np.errstate(invalid="ignore", divide="ignore"):
            return {"mean": sums["value"] / sums["count"]}


def drawn(num_groups):
    """Groups whose sums ascend, which is the order of the bootstrap, dealt to three slices of very unequal size."""
    generator = np.random.default_rng(3)
    values = np.sort(generator.normal(size=num_groups))
    slices = ["rare" if number == 7 else "few" if number % 10 == 3 else "many" for number in range(num_groups)]
    keys = [f"{name}/{number}" for number, name in enumerate(slices)]
    return {"value": values, "count": np.ones(num_groups)}, keys


def resampled_means(values, members):
    """One plain loop: draw as many groups as there are, keep the slice's, take their mean."""
    generator = np.random.default_rng(SEED)
    for _ in range(NUM_BOOTSTRAP):
        kept = [values[number] for number in generator.integers(0, len(values), len(values)) if number in members]
        yield sum(kept) / len(kept) if kept else None


@pytest.mark.parametrize("name", ["many", "few"])
def test_the_interval_of_a_slice_is_that_of_the_resamples_of_the_whole(name):
    statistics, keys = drawn(80)
    _, slices = evaluated(MeanTask(), statistics, keys)
    members = {number for number, key in enumerate(keys) if key.startswith(name)}
    means = list(resampled_means(statistics["value"], members))
    found = slices[name].intervals["mean"]
    assert None not in means and found.low < found.value < found.high
    assert (found.low, found.high) == pytest.approx(np.quantile(means, [0.025, 0.975]), rel=1e-12)
    assert found.value == slices[name].metrics["mean"]


def test_a_slice_that_many_resamples_miss_has_no_bounds_and_the_whole_keeps_its_own():
    statistics, keys = drawn(80)
    metrics, slices = evaluated(MeanTask(), statistics, keys)
    rare = slices["rare"].intervals["mean"]
    assert (rare.value, rare.low, rare.high) == (statistics["value"][7], -np.inf, np.inf)
    assert metrics == bootstrap.intervals(MeanTask().metrics, statistics, NUM_BOOTSTRAP, 0.95, seed=SEED)
    kept = Slice.model_validate_json(slices["rare"].model_dump_json())
    assert kept == slices["rare"]


def test_the_order_of_groups_changes_no_interval_of_a_slice():
    statistics = {"value": np.arange(40.0) % 4, "count": np.ones(40)}
    keys = [f"{'ab'[number % 2]}/{number}" for number in range(40)]
    shuffled = np.random.default_rng(1).permutation(40)
    again = {name: values[shuffled] for name, values in statistics.items()}
    assert evaluated(MeanTask(), statistics, keys) == evaluated(MeanTask(), again, [keys[i] for i in shuffled])


def test_slices_of_before_have_no_intervals():
    assert Slice.model_validate({"num_samples": 3, "metrics": {"mean": 0.5}}).intervals == {}


def test_sums_by_slice_are_those_of_each_unit_within_each_slice_that_it_has_a_part_in():
    sums = {"value": np.array([1.0, 2.0, 4.0, 8.0, 16.0]), "count": np.ones(5)}
    units, parts = np.array([0, 1, 0, 1, 2]), np.array(["b", "a", "a", "a", "b"])
    found = sums_by_slice(sums, ["k0", "k1", "k2", "k3", "k4"], units, parts)
    slices = comparison.unpack_slices(found)
    assert list(slices) == ["a", "b"]
    rows = {
        name: [dict(zip(part, row, strict=True)) for row in zip(*part.values(), strict=True)]
        for name, part in slices.items()
    }
    assert rows["a"] == [{"keys": "k0", "value": 4.0, "count": 1.0}, {"keys": "k1", "value": 10.0, "count": 2.0}]
    assert rows["b"] == [{"keys": "k0", "value": 1.0, "count": 1.0}, {"keys": "k4", "value": 16.0, "count": 1.0}]
    assert sums_by_slice(sums, ["k"] * 5, units, np.array(["all"] * 5)) is None
