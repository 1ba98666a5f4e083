"""Going on with a run may be refused: then nothing of it changes, neither a file nor what MLflow shows."""

from pathlib import Path

import pytest
from helpers.documents import digits_config, finished_run, publish_commit

from kftrain import tracking
from kftrain.core import storage
from kftrain.errors import CheckpointError, ConfigError, KftrainError, OtherTrainingError
from kftrain.stages.finish import finish
from kftrain.stages.shard import shard_from_pipeline
from kftrain.stages.train import train
from kftrain.tracking import mlflow_run

JOB = "8f11aaaa-0000"


@pytest.fixture
def ended(monkeypatch):
    """What MLflow was told of the end of a run."""
    told = []
    monkeypatch.setattr(tracking, "check", lambda uri: None)
    monkeypatch.setattr(tracking, "read_status", lambda uri, mlflow_run_id: "FAILED")
    monkeypatch.setattr(tracking, "finish_run", lambda *arguments: told.append(arguments))
    return told


@pytest.fixture
def champion(tmp_path):
    """A finished run with its MLflow run; returns its paths."""
    paths, _ = finished_run(tmp_path)
    publish_commit(paths, 20)
    storage.publish_json(mlflow_run.tracked_uri(paths), mlflow_run.Tracked(mlflow_run_id="m-1").to_dict())
    return paths


def files_of(paths):
    return {path: path.read_bytes() for path in Path(paths.uri).rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("override", "kind"),
    [
        ("model.dim=32", OtherTrainingError),
        ("data.validation_fraction=0.3", OtherTrainingError),
        ("launch.processes_per_node=17", ConfigError),
    ],
)
def test_a_resume_that_is_refused_leaves_a_finished_run_as_it_was(tmp_path, ended, champion, override, kind):
    before, lines = files_of(champion), []
    text = digits_config(tmp_path, override).to_yaml()
    with pytest.raises(kind) as caught:
        shard_from_pipeline(text, {}, champion.uri, JOB, lines.append)
    outcome = finish(text, "", champion.uri, JOB, "FAILED", lines.append)
    assert files_of(champion) == before
    assert ended == []
    assert caught.value.line in lines[-1].replace("\\", "") or lines[-1].startswith("error ")
    assert outcome.html and not any(line.startswith("run ") for line in lines)


def test_a_resume_that_is_stopped_before_the_run_is_open_leaves_it_as_it_was(tmp_path, ended, champion, monkeypatch):
    monkeypatch.setenv("KFTRAIN_STOP", "1")
    before, text = files_of(champion), digits_config(tmp_path).to_yaml()
    with pytest.raises(KftrainError, match="stopped"):
        shard_from_pipeline(text, {}, champion.uri, JOB, [].append)
    finish(text, "", champion.uri, JOB, "FAILED", [].append)
    assert files_of(champion) == before and ended == []


def test_a_resume_that_was_opened_and_then_failed_is_reported_in_the_run(tmp_path, ended, champion):
    text = digits_config(tmp_path).to_yaml()
    shard_from_pipeline(text, {}, champion.uri, JOB, [].append)
    finish(text, "", champion.uri, JOB, "FAILED", [].append)
    assert storage.exists(f"{champion.uri}/failure.html")
    assert len(ended) == 1


def test_the_pipeline_run_that_opened_a_run_reports_though_another_was_refused_since(tmp_path, ended, champion):
    text = digits_config(tmp_path).to_yaml()
    shard_from_pipeline(text, {}, champion.uri, JOB, [].append)
    with pytest.raises(OtherTrainingError):
        shard_from_pipeline(digits_config(tmp_path, "model.dim=32").to_yaml(), {}, champion.uri, "other", [].append)
    finish(text, "", champion.uri, JOB, "FAILED", [].append)
    assert storage.exists(f"{champion.uri}/failure.html")


def test_training_a_complete_run_as_another_one_changes_nothing(tmp_path, ended, champion):
    storage.publish(champion.config, digits_config(tmp_path, "model.dim=32").to_yaml())
    before = files_of(champion)
    with pytest.raises(CheckpointError, match="another training"):
        train(champion.uri, [].append)
    assert files_of(champion) == before and ended == []
