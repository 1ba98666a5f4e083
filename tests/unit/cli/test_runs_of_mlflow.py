"""`kftrain runs --mlflow`: what a tracking database shows, whichever storage root a run lies in; with a real MLflow."""

import json
import sqlite3

import mlflow
import pytest
from click.testing import CliRunner

from kftrain import config, tracking
from kftrain.cli.jobs import runs_command
from kftrain.errors import TrackingError
from kftrain.tracking import DatasetLineage

LINEAGE = DatasetLineage(name="texts", digest="d" * 64, uri="s3://b/m.json")


@pytest.fixture(scope="module")
def uri(tmp_path_factory):
    """A database with three trainings of two experiments, and a run that is none."""
    uri = f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"
    client = mlflow.MlflowClient(tracking_uri=uri)

    def start(name, run_id, root, *settings):
        overrides = [*settings, f"tracking.uri={uri}", f"run.name={name}", f"run.storage_root={root}", "train.steps=40"]
        return tracking.start_run(config.parse("", [*overrides, "registry.metric=accuracy"]), run_id, LINEAGE)

    best = start("lm", "lm-1", "s3://one/root")
    for step in (10, 40):
        client.log_metric(best, "loss", 1.0 / step, step=step)
    client.log_metric(best, "evaluation/accuracy", 0.75, step=40)
    client.log_metric(best, "validation/accuracy", 0.5, step=40)
    client.set_terminated(best, "FINISHED")
    client.create_registered_model("lm")
    for _ in range(2):
        version = client.create_model_version("lm", "s3://one/model", run_id=best).version
    client.set_registered_model_alias("lm", "champion", version)
    broken = start("vision", "vision-2", "/data")
    client.set_tag(broken, "kftrain.error", "a shard is damaged \x1b[31m")
    client.set_terminated(broken, "FAILED")
    start("lm", "lm-0", "/data", "schedule.name=nightly", "schedule.cron=0 0 2 * * *")
    client.create_run(client.create_experiment("others"), tags={"mlflow.user": "x"})
    with sqlite3.connect(uri.removeprefix("sqlite:///")) as database:
        database.execute("UPDATE runs SET start_time = 1000 * (rowid + 1795314600)")
    return uri


def invoke(*arguments):
    return CliRunner().invoke(runs_command, arguments, standalone_mode=False)


def test_the_runs_of_every_root_and_experiment_are_listed(uri):
    found = {
        run["run_id"]: run for run in json.loads(invoke("--mlflow", "--set", f"tracking.uri={uri}", "--json").output)
    }
    assert list(found) == ["lm-1", "vision-2", "lm-0"]
    assert [run["started"] for run in found.values()] == [f"2026-11-22T02:30:0{second}Z" for second in (1, 2, 3)]
    scheduled = json.loads(invoke("--mlflow", "--set", f"tracking.uri={uri}", "--json", "--schedule", "nightly").output)
    assert [run["run_id"] for run in scheduled] == ["lm-0"]
    best = found["lm-1"]
    assert (best["state"], best["step"], best["num_steps"]) == ("registered", 40, 40)
    assert (best["metric"], best["value"], best["version"], best["is_champion"]) == ("accuracy", 0.75, 2, True)
    assert best["uri"] == "s3://one/root/runs/lm-1"
    assert (found["vision-2"]["state"], found["vision-2"]["version"]) == ("failed", None)
    assert "a shard is damaged" in found["vision-2"]["reason"]
    assert (found["lm-0"]["state"], found["lm-0"]["value"], found["lm-0"]["is_champion"]) == ("running", None, False)


def test_the_table_is_that_of_a_storage_root(uri):
    output = invoke("--mlflow", "--set", f"tracking.uri={uri}").output
    assert "lm 2, champion" in output and "accuracy 0.7500" in output
    assert "\n  a shard is damaged" in output and "\x1b" not in output


def test_a_database_that_is_not_there_is_not_made(tmp_path):
    found = invoke("--mlflow", "--set", f"tracking.uri=sqlite:///{tmp_path}/no.db")
    assert isinstance(found.exception, TrackingError) and "no such database" in found.exception.line
    assert not list(tmp_path.iterdir())


def test_a_storage_root_and_mlflow_are_not_asked_at_once(tmp_path):
    found = CliRunner().invoke(runs_command, [str(tmp_path), "--mlflow"])
    assert found.exit_code == 2 and "leave STORAGE_ROOT out" in found.output
