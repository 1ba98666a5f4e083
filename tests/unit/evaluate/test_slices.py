"""What the slices of an evaluation hold where a part of the data does not determine a metric."""

import numpy as np
import pytest

from kftrain import bootstrap, storage
from kftrain.errors import EvaluationError
from kftrain.evaluate.score import group_sums
from kftrain.evaluate.session import _slices


class RecallTask:
    """Recall of a class that one part of the data does not have."""

    def slice_names(self, keys, statistics):
        return [key.split("/")[0] for key in keys]

    def metrics(self, sums):
        with np.errstate(invalid="ignore", divide="ignore"):
            return {"recall": sums["found"] / sums["there"], "size": sums["size"]}


KEYS = ["a/1", "a/2", "b/1"]
GROUPS = np.array([0, 1, 2])


def test_a_metric_that_a_slice_does_not_determine_is_left_out_of_it():
    statistics = {"found": np.array([1.0, 0, 0]), "there": np.array([1.0, 1, 0]), "size": np.ones(3)}
    slices = _slices(RecallTask(), statistics, GROUPS, group_sums(statistics, GROUPS, 3), KEYS)
    assert slices["a"].metrics == {"recall": 0.5, "size": 2.0}
    assert slices["b"].metrics == {"size": 1.0} and slices["b"].num_samples == 1
    storage.dump_json({name: part.model_dump() for name, part in slices.items()})


def test_a_metric_that_all_of_the_data_does_not_determine_is_an_evaluation_error_that_names_it():
    statistics = {"found": np.zeros(3), "there": np.zeros(3), "size": np.ones(3)}
    with pytest.raises(EvaluationError, match="recall: a metric is not finite"):
        bootstrap.intervals(RecallTask().metrics, statistics, 100, 0.95, seed=0)
