"""Runs against a real MLflow on sqlite."""

import time

import pytest

from kftrain import tracking
from kftrain.config import Config, parse
from kftrain.errors import TrackingError
from kftrain.tracking import client, model_client, runs, session
from kftrain.tracking.base import Point

LINEAGE = tracking.DatasetLineage("stdlib", "d" * 64, "/data/shards/d/manifest.json")


def config_at(uri, **changes) -> Config:
    overrides = [f"{key}={value}" for key, value in changes.items()]
    return parse("", ["run.name=toy", f"tracking.uri={uri}", *overrides])


def number_of_runs(uri):
    import mlflow

    return len(mlflow.MlflowClient(tracking_uri=uri).search_runs(["1"]))


def test_a_run_is_recorded_with_its_configuration_digests_and_data(uri, monkeypatch):
    import mlflow

    monkeypatch.setenv("KFTRAIN_GIT_COMMIT", "abc123")
    monkeypatch.setenv("MLFLOW_RUN_ID", "injected")
    config = config_at(uri)
    run = mlflow.MlflowClient(tracking_uri=uri).get_run(tracking.start_run(config, "run-1", LINEAGE))
    assert run.data.params["train.steps"] == "400"
    assert run.data.tags["kftrain.training_digest"] == config.training_digest(LINEAGE.digest)
    assert run.data.tags["kftrain.git_commit"] == "abc123"
    assert run.data.tags["mlflow.parentRunId"] == "injected"
    [dataset] = run.inputs.dataset_inputs
    assert (dataset.dataset.name, dataset.dataset.digest) == ("stdlib", "d" * 36)
    assert "mlruns/toy" in run.info.artifact_uri and run.info.artifact_uri.startswith(
        uri.removeprefix("sqlite:///")[:-9]
    )


def test_starting_again_goes_on_with_the_same_run_and_never_trips_over_parameters(uri):
    first = tracking.start_run(config_at(uri), "run-1", LINEAGE)
    tracking.finish_run(uri, first, "FAILED", {"error": "at http://user:canary@host"})
    assert tracking.read_status(uri, first) == "FAILED"
    again = tracking.start_run(config_at(uri, **{"launch.nodes": 4}), "run-1", LINEAGE)
    record = client.read_run(uri, again)
    assert again == first and number_of_runs(uri) == 1
    assert record.status == "RUNNING" and record.params["launch.nodes"] == "1"
    assert record.tags["error"] == "at http://host"
    assert tracking.start_run(config_at(uri), "run-2", LINEAGE) != first


def test_another_training_under_the_same_id_gets_a_run_of_its_own(uri):
    """MLflow never changes a parameter: the old run would show a model that was never trained."""
    first = tracking.start_run(config_at(uri, **{"model.dim": 32}), "run-1", LINEAGE)
    second = tracking.start_run(config_at(uri, **{"model.dim": 64}), "run-1", LINEAGE)
    again = tracking.start_run(config_at(uri, **{"model.dim": 64}), "run-1", LINEAGE)
    assert first != second == again
    assert client.read_run(uri, second).params["model.dim"] == "64"


def test_a_lost_response_does_not_make_a_second_run(uri, monkeypatch):
    create = client.create_run

    def lost(*arguments):
        create(*arguments)
        raise TrackingError("the connection was closed")

    monkeypatch.setattr(client, "create_run", lost)
    first = tracking.start_run(config_at(uri), "run-1", LINEAGE)
    monkeypatch.setattr(client, "create_run", create)
    assert tracking.start_run(config_at(uri), "run-1", LINEAGE) == first
    assert number_of_runs(uri) == 1


def test_the_end_status_is_set_and_may_be_set_again(uri):
    run_id = tracking.start_run(config_at(uri), "run-1", LINEAGE)
    for _ in range(2):
        tracking.finish_run(uri, run_id, "FINISHED")
    assert client.read_run(uri, run_id).status == "FINISHED"


def test_an_evaluation_that_is_logged_twice_is_one_point(uri):
    import mlflow

    run_id = tracking.start_run(config_at(uri), "run-1", LINEAGE)
    for value in (0.5, 0.5, 0.25):
        tracking.log_evaluation(uri, run_id, {"loss": value})
    history = mlflow.MlflowClient(tracking_uri=uri).get_metric_history(run_id, "evaluation/loss")
    assert sorted(point.value for point in history) == [0.25, 0.5]
    assert {point.step for point in history} == {0}  # MLflow draws bars of it


def test_an_evaluation_of_a_run_of_before_stays_at_its_step(uri):
    run_id = tracking.start_run(config_at(uri), "run-1", LINEAGE)
    client.log_points(uri, run_id, [Point("evaluation/loss", 0.5, 400, 1)])
    tracking.log_evaluation(uri, run_id, {"loss": 0.25})
    assert client.read_run(uri, run_id).latest["evaluation/loss"].value == 0.25


def test_a_run_that_has_ended_keeps_its_end(uri):
    """A complete run that is resumed does nothing, and its duration does not grow."""
    import mlflow

    run_id = tracking.start_run(config_at(uri), "run-1", LINEAGE)
    tracking.finish_run(uri, run_id, "FINISHED")
    read = mlflow.MlflowClient(tracking_uri=uri).get_run
    ended = read(run_id).info.end_time
    time.sleep(0.01)
    tracking.finish_run(uri, run_id, "FINISHED")
    assert read(run_id).info.end_time == ended
    tracking.finish_run(uri, run_id, "FAILED")
    assert read(run_id).info.end_time > ended


def test_a_tag_that_is_empty_takes_one_away_and_adds_none(uri):
    run_id = tracking.start_run(config_at(uri), "run-1", LINEAGE, {"kftrain.a": "1", "kftrain.b": ""})
    assert "kftrain.b" not in client.read_run(uri, run_id).tags
    tracking.start_run(config_at(uri), "run-1", LINEAGE, {"kftrain.a": "", "kftrain.b": ""})
    assert client.read_run(uri, run_id).tags["kftrain.a"] == ""


def test_a_report_is_stored_with_the_run_beside_the_database(uri, tmp_path):
    run_id = tracking.start_run(config_at(uri), "run-1", LINEAGE)
    tracking.log_text(uri, run_id, "<html></html>", "report.html")
    assert [path.read_text() for path in tmp_path.rglob("report.html")] == ["<html></html>"]


def test_long_values_are_cut_and_credentials_are_left_out():
    flat = runs.flatten({"task": {"kind": "x" * 9000, "empty": {}}, "tracking": {"uri": "http://u:canary@h"}})
    assert flat["tracking.uri"] == "http://h"
    assert (flat["task.empty"], len(flat["task.kind"])) == ("{}", 9000)


def test_a_value_longer_than_mlflow_takes_is_recorded_cut(uri):
    config = config_at(uri, **{"task.note": "x" * 9000})
    record = client.read_run(uri, tracking.start_run(config, "run-1", LINEAGE))
    assert len(record.params["task.note"]) == session.MAX_VALUE_LENGTH


def test_an_alias_that_two_set_for_the_first_time_at_once_is_set_by_the_second_call(uri, monkeypatch):
    import mlflow

    class Colliding:
        def __init__(self, message):
            self.calls = []
            self.message = message

        def set_registered_model_alias(self, *arguments):
            self.calls.append(arguments)
            if len(self.calls) == 1:
                raise mlflow.MlflowException(self.message)

    colliding = Colliding("(sqlite3.IntegrityError) UNIQUE constraint failed: registered_model_aliases.alias")
    monkeypatch.setattr(session, "_open_client", lambda uri: colliding)
    model_client.set_alias(uri, "toy", "champion", 1)
    assert colliding.calls == [("toy", "champion", "1")] * 2
    other = Colliding("permission denied")
    monkeypatch.setattr(session, "_open_client", lambda uri: other)
    with pytest.raises(TrackingError, match="permission denied"):
        model_client.set_alias(uri, "toy", "champion", 1)


def test_failures_are_tracking_errors_that_say_where(uri):
    with pytest.raises(TrackingError, match="cannot read run nowhere"):
        client.read_run(uri, "nowhere")
    with pytest.raises(TrackingError, match="quotes"):
        tracking.start_run(config_at(uri), "it's", LINEAGE)


def test_the_points_that_mlflow_lacks_are_those_beyond_what_it_has_of_each_metric():
    history = [
        {"step": step, "loss": step / 2, **({"validation/loss": 9.0} if step == 4 else {})} for step in (2, 4, 6)
    ]
    found = runs.find_missing_points(history, {"loss": 2}, timestamp_ms=7)
    assert [(point.key, point.step, point.value, point.timestamp_ms) for point in found] == [
        ("loss", 4, 2.0, 7),
        ("validation/loss", 4, 9.0, 7),
        ("loss", 6, 3.0, 7),
    ]
    assert runs.find_missing_points(history, {"loss": 6, "validation/loss": 4}, 7) == []


def test_mlflow_shows_who_made_a_run_from_what_and_with_how_much_data(uri, monkeypatch, tmp_path):
    import getpass
    import json
    import subprocess

    import mlflow

    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-C", str(tmp_path)]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    monkeypatch.delenv("KFTRAIN_GIT_COMMIT", raising=False)
    monkeypatch.setenv("KFTRAIN_STARTED_BY", "kftrain run --config c.yaml")
    monkeypatch.chdir(tmp_path)
    lineage = tracking.DatasetLineage(
        "stdlib", "d" * 64, "/data/m.json", {"train": 900, "validation": 100}, {"tokens": "uint16 [256]"}
    )
    run = mlflow.MlflowClient(tracking_uri=uri).get_run(tracking.start_run(config_at(uri), "run-1", lineage))
    tags = run.data.tags
    assert tags["mlflow.source.git.commit"] == tags["kftrain.git_commit"] == commit
    assert (tags["mlflow.source.name"], tags["mlflow.source.type"]) == ("kftrain run --config c.yaml", "LOCAL")
    assert tags["mlflow.user"] == getpass.getuser()
    assert "900 train samples" in tags["mlflow.note.content"]
    [found] = run.inputs.dataset_inputs
    assert json.loads(found.dataset.profile) == {"num_train_samples": 900, "num_validation_samples": 100}
    assert json.loads(found.dataset.schema) == {"fields": {"tokens": "uint16 [256]"}}


def test_a_local_run_has_no_parameters_of_pods_and_one_on_a_cluster_has(uri):
    local = client.read_run(uri, tracking.start_run(config_at(uri), "run-1", LINEAGE)).params
    assert local["launch.backend"] == "local" and not [key for key in local if key.startswith("launch.kubernetes")]
    cluster = config_at(uri, **{"launch.backend": "pytorchjob"})
    assert "launch.kubernetes.gpus_per_node" in runs.list_parameters(cluster)


def test_parameters_are_the_settings_that_are_set_and_a_models_are_those_that_make_it(uri):
    config = parse("run: {seed: 7}\ndata: {source: stdlib}\n", [f"tracking.uri={uri}"])
    known = runs.list_parameters(config)
    assert known["run.seed"] == "7" and known["train.steps"]
    assert "data.mixture" not in known and "tracking.experiment" not in known  # [] and ''
    assert not [name for name in known if name.startswith("launch.kubernetes")]
    of_model = runs.list_model_parameters(config)
    assert {"data.source", "run.seed", "model.kind", "train.steps"} <= set(of_model) < set(known)
    assert not [name for name in of_model if name.startswith(("launch", "tracking", "checkpoint", "registry"))]


def test_metrics_of_a_dataset_name_it_on_the_logged_model_and_may_be_repeated(uri):
    import mlflow

    reader = mlflow.MlflowClient(tracking_uri=uri)
    run_id = tracking.start_run(config_at(uri), "run-1", LINEAGE)
    model = reader.create_logged_model("1", name="m", source_run_id=run_id)
    assert runs.read_dataset_name(uri, run_id) == "stdlib"
    points = runs.make_evaluation_points(uri, run_id, {"loss": 0.5})
    for _ in range(2):
        client.log_points(uri, run_id, points, model.model_id, ("stdlib", LINEAGE.digest))
    [metric] = reader.get_logged_model(model.model_id).metrics
    assert (metric.key, metric.value, metric.dataset_name) == ("evaluation/loss", 0.5, "stdlib")
