"""Data that is gone is noticed before a job is started for it."""

import pytest
from helpers.documents import finished_run, sharded_run
from helpers.toy_data import shard_folder

from kftrain import launch, registry
from kftrain.core import storage
from kftrain.errors import DataError
from kftrain.launch import jobs
from kftrain.registry import Champion
from kftrain.run.documents import RunShards
from kftrain.run.error import read_error
from kftrain.stages.evaluate import evaluate
from kftrain.stages.train import train


@pytest.mark.parametrize("name", ["train-000000.tar", "validation-000000.tar", "train-000000.index.npy"])
@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda path: path.unlink(), "missing"),
        (lambda path: path.write_bytes(b""), "truncated or changed: it has 0 bytes"),
        (lambda path: path.write_bytes(path.read_bytes()[:-512]), "truncated or changed"),
    ],
    ids=["missing", "zero bytes", "cut"],
)
def test_fault_05_a_shard_that_is_gone_ends_the_stage_before_any_job(tmp_path, monkeypatch, name, damage, what):
    paths, _, shards = sharded_run(tmp_path)
    damage(shard_folder(shards.manifest_uri) / name)
    monkeypatch.setattr(launch, "run_training", lambda *arguments: pytest.fail("a job was started"))
    with pytest.raises(DataError, match=f"{name}: {what}"):
        train(paths.uri, lambda line: None)
    assert (read_error(paths.error).exit_code, read_error(paths.error).stage) == (11, "train")


def evaluated_run(root, monkeypatch, champion=None):
    """A run with all its documents, of which one shard is gone; a job would end the test."""
    paths, _ = finished_run(root)
    uri = RunShards.model_validate(storage.read_json(paths.shards)).manifest_uri
    (shard_folder(uri) / "validation-000000.tar").unlink()
    monkeypatch.setattr(registry, "champion", lambda config: champion)
    monkeypatch.setattr(jobs, "_run_to_end", lambda *arguments: pytest.fail("a job was started"))
    return paths


def test_a_shard_that_is_gone_ends_the_evaluation_before_its_job(tmp_path, monkeypatch):
    paths = evaluated_run(tmp_path, monkeypatch)
    storage.remove(storage.join(paths.uri, "evaluation"))
    with pytest.raises(DataError, match=r"validation-000000\.tar: missing"):
        evaluate(paths.uri, lambda line: None)
    assert (read_error(paths.error).exit_code, read_error(paths.error).stage) == (11, "evaluate")


def test_a_shard_that_is_gone_ends_the_evaluation_of_a_champion_before_its_job(tmp_path, monkeypatch):
    other = Champion(7, f"{tmp_path}/store/runs/other", "k" * 64, f"{tmp_path}/store/runs/other/export", "x" * 64)
    paths = evaluated_run(tmp_path, monkeypatch, other)
    monkeypatch.setattr("kftrain.stages.evaluate._is_measurable", lambda *arguments: True)
    with pytest.raises(DataError, match=r"validation-000000\.tar: missing"):
        evaluate(paths.uri, lambda line: None)


def test_what_is_evaluated_already_needs_no_shards(tmp_path, monkeypatch):
    assert evaluate(evaluated_run(tmp_path, monkeypatch).uri, lambda line: None).metrics["accuracy"] == 0.9
