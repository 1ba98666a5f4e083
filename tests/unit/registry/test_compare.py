"""Versions beside each other: which are meant, under which evaluation, and how they differ."""

import dataclasses
import io

import numpy as np
import pytest
from mlflow import MlflowClient

from kftrain import registry
from kftrain.core import storage
from kftrain.errors import TrackingError
from kftrain.run.documents import Slice


def halves(keys, sums):
    return ["low" if key < "item-030" else "high" for key in keys]


@pytest.fixture
def compare(config, metrics):
    return lambda *names, at_most=0: registry.compare(config, names, metrics, halves, at_most)


def numbers(found):
    return [each.version for each in found.versions]


def test_all_are_compared_with_the_champion(compare, finished):
    for name, quality in (("one", 0.6), ("two", 0.7), ("three", 0.65)):
        finished(name, quality).submit()
    found = compare()
    rows = {row.version: row for row in found.versions}
    assert numbers(found) == [3, 2, 1] and found.baseline == 2
    assert rows[2].aliases == ("champion",) and not rows[2].differences
    assert rows[1].differences["accuracy"].value == pytest.approx(-0.1)
    assert rows[3].differences["error"].value == pytest.approx(0.05)
    assert rows[3].evaluation.metrics["accuracy"].value == pytest.approx(0.65, abs=0.01)


def test_versions_are_named_by_number_and_alias_in_any_order_and_once(compare, finished):
    for name, quality in (("one", 0.6), ("two", 0.7), ("three", 0.65)):
        finished(name, quality).submit()
    found = compare("v3", "1", "v1")
    assert numbers(found) == [3, 1] and found.baseline == 3
    assert found.versions[1].differences["accuracy"].value == pytest.approx(-0.05)
    found = compare("1", "@previous_champion", "champion")
    assert numbers(found) == [1, 2] and found.baseline == 2
    with pytest.raises(TrackingError, match=r"no such version.*v7"):
        compare("1", "v7")
    with pytest.raises(TrackingError, match=r"no such version.*champ.*one of: champion, previous_champion"):
        compare("champ")


def test_one_version_is_found_by_its_name_with_what_it_was_made_of(config, finished):
    runs = [finished(name, quality) for name, quality in (("one", 0.6), ("two", 0.5))]
    for run in runs:
        run.submit()
    number, reference = registry.find_version(config, "champion")
    assert (number, reference.export_digest) == (1, runs[0].completion.export_digest)
    assert registry.find_version(config, "v2")[1].run_uri == runs[1].paths.uri
    with pytest.raises(TrackingError, match="no such version"):
        registry.find_version(config, "v3")


def test_of_many_the_champion_and_the_newest_are_shown(compare, finished):
    for number in range(5):
        finished(f"run-{number}", 0.6 if number else 0.9).submit()
    assert numbers(compare(at_most=3)) == [5, 4, 1]
    assert numbers(compare(at_most=5)) == [5, 4, 3, 2, 1]
    assert numbers(compare("2", "3", "4", "5", at_most=3)) == [2, 3, 4, 5]


def test_a_model_without_versions_says_so(compare, config):
    with pytest.raises(TrackingError, match="no versions yet"):
        compare()


def test_the_evaluation_that_most_have_counts_and_the_others_say_why_they_cannot(compare, finished, measure):
    old = finished("old", 0.6, "a" * 64)
    old.submit()
    finished("lone", 0.65, "c" * 64).submit()
    new = finished("new", 0.7, "b" * 64)
    measure(old, 0.6, "b" * 64)
    new.submit()
    found = compare("1", "2", "3")
    assert found.evaluation_digest == "b" * 64
    first, lone, last = found.versions
    assert first.evaluation.evaluation_digest == "b" * 64 and not first.problem
    assert lone.problem == "evaluated on other data or with other settings" and not lone.differences
    assert lone.evaluation.evaluation_digest == "c" * 64
    assert last.differences or first.differences


def test_damaged_and_foreign_versions_are_shown_without_an_evaluation(compare, finished, config, tmp_path):
    run = finished("one", 0.6)
    run.submit()
    finished("two", 0.7).submit()
    folder = run.paths.evaluation(run.completion.checkpoint_digest, "e" * 64)
    storage.publish(storage.join(folder, "statistics.npz"), b"damaged")
    MlflowClient(tracking_uri=config.tracking.uri).create_model_version("toy", str(tmp_path))
    found = compare("1", "2", "3")
    assert [each.problem for each in found.versions] == [
        "no evaluation that can be read",
        "",
        "not registered by kftrain, or its reference is gone",
    ]
    assert not any(each.differences for each in found.versions)


def with_slices(run, quality):
    """The run's evaluation with two slices, one of which was made of other groups than `halves` says."""
    folder = run.paths.evaluation(run.completion.checkpoint_digest, "e" * 64)
    with np.load(io.BytesIO(storage.read_bytes(storage.join(folder, "statistics.npz")))) as sums:
        low = float(sums["correct"][:30].sum() / sums["count"][:30].sum())
    slices = {
        "low": Slice(num_samples=300, metrics={"accuracy": low}),
        "high": Slice(num_samples=300, metrics={"accuracy": 0.1 * quality}),
    }
    evaluation = run.evaluation.model_copy(update={"slices": slices})
    storage.publish_json(storage.join(folder, "metrics.json"), evaluation.to_dict())
    return dataclasses.replace(run, evaluation=evaluation)


def test_slices_are_compared_where_they_are_what_the_evaluation_measured(compare, finished):
    for name, quality in (("one", 0.6), ("two", 0.7)):
        with_slices(finished(name, quality), quality).submit()
    parts = compare("1", "2").versions[0].slice_differences
    assert parts["low"]["accuracy"].value == pytest.approx(-0.1) and not parts["high"]
