"""A run's documents as a full disk or a stranger has left them: what is damaged is named, and finish goes on."""

import pytest
from helpers.documents import digits_config, finished_run, sharded_run

from kftrain import tracking
from kftrain.core import storage
from kftrain.errors import DataError, KftrainError
from kftrain.run import completion
from kftrain.run.job_tasks import TRAINING
from kftrain.run.paths import RunPaths
from kftrain.stages import resolve
from kftrain.stages.finish import finish
from kftrain.stages.train import read_history
from kftrain.tracking import mlflow_run
from kftrain.trust import read_shards

CUT = [
    '{"manifest_uri": "x"',
    "[]",
    "null",
    "{}",
    "",
    "\x00",
    '{"manifest_uri": 5, "dataset_digest": []}',
    "[" * 100_000,
]


@pytest.mark.parametrize("content", CUT)
def test_a_cut_shards_json_is_named(tmp_path, content):
    paths, config, _ = sharded_run(tmp_path)
    storage.publish(paths.shards, content)
    with pytest.raises(DataError, match=r"shards\.json"):
        read_shards(paths)
    with pytest.raises(KftrainError, match=r"shards\.json|COMPLETE\.json"):
        completion.read_completion(paths, config)


@pytest.mark.parametrize("content", CUT)
def test_a_cut_shards_json_of_a_complete_run_is_named(tmp_path, content):
    paths, config = finished_run(tmp_path)
    storage.publish(paths.shards, content)
    with pytest.raises(KftrainError, match=r"shards\.json"):
        completion.read_completion(paths, config)
    assert not TRAINING.is_complete(paths, config)


@pytest.mark.parametrize(
    "content", [*(each for each in CUT if each not in ("[]", "null", "{}")), "5", "[5]", "[{}, 0]"]
)
def test_a_damaged_curve_is_named(tmp_path, content):
    paths = RunPaths(str(tmp_path))
    storage.publish(paths.history, content)
    with pytest.raises(DataError, match=r"history\.json is (not valid JSON|damaged)"):
        read_history(paths)


@pytest.mark.parametrize(
    "content",
    ["[]", "null", '{"kind": "ConfigError"', "{}", '{"kind": "DataError", "exit_code": 11, "line": "no rows"}', "\x00"],
)
def test_finish_explains_a_run_whose_error_json_is_broken(tmp_path, monkeypatch, content):
    ended = []
    monkeypatch.setattr(tracking, "read_status", lambda uri, run: "RUNNING")
    monkeypatch.setattr(tracking, "finish_run", lambda uri, run, status, tags=None: ended.append((status, tags)))
    config = digits_config(tmp_path)
    paths = RunPaths.of(config.run.storage_root, "tiny-8f11")
    resolve.keep_run(resolve.OpenedRun(config, paths), "8F-11")
    storage.publish_json(mlflow_run.tracked_uri(paths), mlflow_run.Tracked(mlflow_run_id="m-1").to_dict())
    storage.publish(paths.error, content)
    outcome = finish(config.to_yaml(), "", "", "8F-11", "FAILED", [].append)
    expected = "no rows" if "no rows" in content else "error.json is damaged"
    assert expected in outcome.summary["result"] and expected in outcome.html
    assert storage.exists(storage.join(paths.uri, "failure.html"))
    assert [status for status, _ in ended] == ["FAILED"] and expected in ended[0][1]["kftrain.error"]
