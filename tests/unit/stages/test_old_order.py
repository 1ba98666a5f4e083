"""Runs that a release with another order of samples began, and configurations that release 0.2 has kept."""

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from helpers.documents import digits_config, finished_run, publish_commit

from kftrain import config, registry, tracking
from kftrain.cli import cli
from kftrain.core import storage
from kftrain.errors import ConfigError, OldOrderError, TrackingError
from kftrain.run import commit
from kftrain.run.config import read_config
from kftrain.run.paths import RunPaths
from kftrain.stages import preflight, register
from kftrain.stages.shard import shard_from_pipeline
from kftrain.stages.train import train

JOB = "8f11aaaa-0000"
LINE = (
    "this training was begun under another order of samples than 2 (got 1); "
    "finish it with the release that began it, or start a new run"
)


def kept_by_02(resolved):
    """A configuration as release 0.2 wrote it into a run's folder before it lost a key."""
    document = resolved.to_dict()
    document["data"]["shuffle_window_shards"] = None
    return yaml.safe_dump(document, sort_keys=False)


@pytest.fixture
def old_run(tmp_path, monkeypatch):
    """A finished run whose checkpoint is of another order."""
    monkeypatch.setattr(tracking, "check", lambda uri: None)
    paths, resolved = finished_run(tmp_path)
    publish_commit(paths, 20, {**resolved.training_identity("d"), "order": 1})
    storage.publish(paths.config, kept_by_02(resolved))
    return paths


def files_of(paths: RunPaths) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path(paths.uri).rglob("*") if path.is_file()}


@pytest.mark.parametrize("given", [False, True])
def test_one_that_is_not_complete_is_refused_and_left_as_it_was(tmp_path, old_run, given):
    storage.remove(old_run.complete)
    before = files_of(old_run)
    with pytest.raises(OldOrderError) as caught:
        shard_from_pipeline(digits_config(tmp_path).to_yaml() if given else "", {}, old_run.uri, JOB, [].append)
    assert caught.value.exit_code == 10
    assert caught.value.line.endswith(LINE)
    assert files_of(old_run) == before


def test_one_that_is_complete_stays_so_and_is_not_trained_again(old_run, monkeypatch):
    monkeypatch.setattr("kftrain.run.completion.is_export", lambda uri: True)
    monkeypatch.setattr("kftrain.tracking.mlflow_run.log_missing_curve", lambda *arguments: None)
    assert shard_from_pipeline("", {}, old_run.uri, JOB, [].append).run_uri == old_run.uri
    assert train(old_run.uri, [].append).summary["result"].startswith("was already trained")


@pytest.mark.parametrize("order", [{}, {"order": 1}, {"order": 3}])
def test_its_checkpoint_is_refused_too(tmp_path, order):
    new = digits_config(tmp_path).training_identity("d")
    old = {key: value for key, value in new.items() if key != "order"} | order
    fields = {name: "d" for name in ("dataset_digest", "training_digest")}
    numbers = dict.fromkeys(("step", "samples_consumed", "attempt", "world_size"), 1)
    manifest = commit.CheckpointManifest(training_identity=old, files={}, **fields, **numbers)
    for identity in (old, new):
        with pytest.raises(OldOrderError):
            commit.require_same_training(manifest, identity, "somewhere")


def test_a_configuration_that_release_02_kept_is_that_of_today(tmp_path):
    resolved = digits_config(tmp_path)
    kept = config.parse_kept(kept_by_02(resolved), "config.yaml")
    assert kept == resolved and "shuffle_window_shards" not in kept.to_dict()["data"]
    with pytest.raises(ConfigError, match="unknown key"):
        config.parse_kept(kept_by_02(resolved).replace("shards: null", "shards: 16"), "config.yaml")


def test_its_registered_models_are_looked_at_and_decided_again(old_run, monkeypatch):
    paths = old_run
    monkeypatch.setattr(preflight, "require_database", lambda uri: None)
    monkeypatch.setattr(registry, "audit", lambda given, contents: [])
    done = CliRunner().invoke(cli, ["models", "audit", "--run", paths.uri])
    assert done.exit_code == 0, done.exception
    assert read_config(paths).run.name == "tiny"
    with pytest.raises(TrackingError, match="the export is not the expected one"):
        register.gate(paths.uri)
