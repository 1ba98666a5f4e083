"""What MLflow's compare page shows of versions that were measured each on data of its own."""

import numpy as np
import pytest

from kftrain.core import storage
from kftrain.run.documents import ReferenceSet
from kftrain.tracking import model_client

THERE = "f" * 64


def noisy(quality, seed, num_groups=60):
    count = np.full(num_groups, 10.0)
    correct = 10 * quality + np.random.default_rng(seed).normal(0, 1.0, num_groups)
    return {
        "correct": correct,
        "count": count,
        "keys": np.array([f"item-{number:03d}" for number in range(num_groups)]),
    }


def shown(config, registration):
    import mlflow

    reader = mlflow.MlflowClient(tracking_uri=config.tracking.uri)
    run = reader.get_run(registration.mlflow_run_id)
    model = reader.get_logged_model(registration.logged_model_id)
    return run.data.metrics, {metric.key: metric.value for metric in model.metrics}, run.data.tags


def bootstrapped(ours, theirs):
    """A plain percentile bootstrap over groups, with resamples of its own."""
    rows = np.random.default_rng(99).integers(0, 60, (4000, 60))
    both = [each["correct"][rows].sum(1) / each["count"][rows].sum(1) for each in (ours, theirs)]
    return np.quantile(both[0] - both[1], [0.025, 0.975])


@pytest.fixture
def many(config):
    return config.model_copy(update={"evaluate": config.evaluate.model_copy(update={"num_bootstrap": 2000})})


def test_the_champion_stands_beside_each_metric_on_the_same_data_with_the_difference(many, finish, add_statistics):
    first = finish(many, "one", 0.6, "a" * 64)
    alone = first.submit()
    assert not [name for name in shown(many, alone)[0] if "." in name]
    ours, theirs = noisy(0.7, 1), noisy(0.5, 2)
    add_statistics(first, theirs, "b" * 64)
    run = finish(many, "two", 0.0, "b" * 64, statistics=ours)
    registration = run.submit()
    metrics, of_model, tags = shown(many, registration)
    values = {
        name.removeprefix("evaluation/accuracy."): value for name, value in metrics.items() if "accuracy." in name
    }
    accuracies = [each["correct"].sum() / each["count"].sum() for each in (ours, theirs)]
    assert values["champion"] == pytest.approx(accuracies[1], abs=1e-9)
    assert values["difference"] == pytest.approx(accuracies[0] - accuracies[1], abs=1e-9)
    low, high = bootstrapped(ours, theirs)
    assert (values["difference_low"], values["difference_high"]) == pytest.approx((low, high), abs=0.01)
    assert metrics["evaluation/error.difference"] == pytest.approx(-values["difference"], abs=1e-9)
    assert {name: value for name, value in metrics.items() if name in of_model} == of_model and len(of_model) == 10
    assert tags["kftrain.evaluation_digest"] == "b" * 64


def test_a_step_that_runs_again_records_the_same_points(config, finished):
    import mlflow

    finished("one", 0.6).submit()
    run = finished("two", 0.7)
    registration = run.submit()
    assert run.submit().promoted
    history = mlflow.MlflowClient(tracking_uri=config.tracking.uri).get_metric_history
    assert len(history(registration.mlflow_run_id, "evaluation/accuracy.difference")) == 1


def test_all_versions_have_their_figures_on_one_reference_set(config, finished, add_reference):
    found = []
    for name, quality, there, digest in (("one", 0.6, 0.8, "a"), ("two", 0.5, 0.85, "b")):
        run = finished(name, quality, digest * 64)
        add_reference(run, there, THERE)
        reference = ReferenceSet(manifest_uri="/data/manifest.json", dataset_digest="d", evaluation_digest=THERE)
        storage.publish_json(run.paths.reference_set, reference.to_dict())
        found.append(shown(config, run.submit()))
    assert found[0][1]["evaluation/reference_accuracy"] == pytest.approx(0.8, abs=0.01)
    assert found[1][1]["evaluation/reference_accuracy"] == pytest.approx(0.85, abs=0.01)
    assert found[1][0]["evaluation/reference_accuracy.difference"] == pytest.approx(0.05, abs=1e-6)
    assert found[1][2]["kftrain.reference_evaluation_digest"] == THERE
    assert "evaluation/accuracy.difference" not in found[1][0], "the champion was not measured on that window"


def test_the_description_says_what_its_figures_compare_with(config, finished):
    import mlflow

    run = finished("one", 0.6)
    run.submit()
    version = mlflow.MlflowClient(registry_uri=config.tracking.uri).get_model_version("toy", "1")
    assert version.description.startswith("Run one: 10 steps")
    assert version.description.endswith(
        "\n\nMeasured under evaluation eeeeeeeeeeee: compare figures with a version of the same evaluation only. On "
        "the same data, its run has the champion's as `evaluation/….champion` and the difference as "
        "`evaluation/….difference`."
    )
    assert model_client.search_versions(config.tracking.uri, "toy")[0].version == 1
