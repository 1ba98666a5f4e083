"""Runs that release 0.1 began: their samples stood in an order that followed the shards."""

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from helpers.documents import digits_config, finished_run, publish_commit

from kftrain import config, registry, tracking
from kftrain.cli import cli
from kftrain.core import storage
from kftrain.errors import OldOrderError, TrackingError
from kftrain.process.stop_request import StopRequest
from kftrain.run import commit
from kftrain.run.config import read_config
from kftrain.run.paths import RunPaths
from kftrain.stages import preflight, register
from kftrain.stages.shard import shard_from_pipeline
from kftrain.stages.train import train
from kftrain.train import session

JOB = "8f11aaaa-0000"
LINE = (
    "this training was begun under the order of samples of release 0.1; finish it with kftrain 0.1, or start a new run"
)


def kept_by_01(resolved):
    """A configuration as release 0.1 wrote it into a run's folder."""
    document = resolved.to_dict()
    for name in ("shuffle_range_samples", "shuffle_window_ranges"):
        del document["data"][name]
    document["data"]["shuffle_window_shards"] = 16
    return yaml.safe_dump(document, sort_keys=False)


OPTIMIZER_IN_01 = (
    "kind",
    "learning_rate",
    "weight_decay",
    "beta1",
    "beta2",
    "epsilon",
    "schedule",
    "warmup_steps",
    "final_learning_rate_fraction",
)


def identity_in_01(resolved, dataset_digest):
    everything = resolved.to_dict()
    everything["optimizer"] = {name: everything["optimizer"][name] for name in OPTIMIZER_IN_01}
    names = ("steps", "global_batch_size", "gradient_clip_norm")
    return {
        "dataset": dataset_digest,
        "seed": everything["run"]["seed"],
        **{section: everything[section] for section in ("task", "model", "precision", "optimizer")},
        "train": {name: everything["train"][name] for name in names},
    }


@pytest.fixture
def old_run(tmp_path, monkeypatch):
    """A finished run, as release 0.1 left it."""
    monkeypatch.setattr(tracking, "check", lambda uri: None)
    paths, resolved = finished_run(tmp_path)
    publish_commit(paths, 20)
    storage.publish(paths.config, kept_by_01(resolved))
    completion = storage.read_json(paths.complete)
    digest = storage.digest_json(identity_in_01(resolved, completion["dataset_digest"]))
    storage.publish_json(paths.complete, {**completion, "training_digest": digest})
    return paths


def files_of(paths: RunPaths) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path(paths.uri).rglob("*") if path.is_file()}


def is_refused(paths, call):
    before = files_of(paths)
    with pytest.raises(OldOrderError) as caught:
        call()
    assert caught.value.exit_code == 10
    assert caught.value.line.endswith(LINE)
    assert files_of(paths) == before


@pytest.mark.parametrize("given", [False, True])
def test_one_that_is_not_complete_is_refused_by_every_stage_and_left_as_it_was(tmp_path, old_run, given):
    storage.remove(old_run.complete)
    text = digits_config(tmp_path).to_yaml() if given else ""
    is_refused(old_run, lambda: shard_from_pipeline(text, {}, old_run.uri, JOB, [].append))
    is_refused(old_run, lambda: train(old_run.uri, [].append))
    is_refused(old_run, lambda: session.train(old_run, read_config(old_run), StopRequest()))


def test_one_that_is_complete_stays_so_and_is_not_trained_again(old_run, monkeypatch):
    monkeypatch.setattr("kftrain.run.completion.is_export", lambda uri: True)
    monkeypatch.setattr("kftrain.tracking.mlflow_run.log_missing_curve", lambda *arguments: None)
    assert shard_from_pipeline("", {}, old_run.uri, JOB, [].append).run_uri == old_run.uri
    assert read_config(old_run).data.shuffle_window_shards == 16
    assert train(old_run.uri, [].append).summary["result"].startswith("was already trained")


def test_a_complete_one_does_not_become_a_training_of_today(tmp_path, old_run):
    text = digits_config(tmp_path).to_yaml()
    is_refused(old_run, lambda: shard_from_pipeline(text, {}, old_run.uri, JOB, [].append))


def test_its_checkpoint_is_refused_too(tmp_path):
    resolved = digits_config(tmp_path)
    old, new = identity_in_01(resolved, "d"), resolved.training_identity("d")
    fields = {name: "d" for name in ("dataset_digest", "training_digest")}
    numbers = dict.fromkeys(("step", "samples_consumed", "attempt", "world_size"), 1)
    manifest = commit.CheckpointManifest(training_identity=old, files={}, **fields, **numbers)
    for identity in (old, new):
        with pytest.raises(OldOrderError):
            commit.require_same_training(manifest, identity, "somewhere")


def test_its_configuration_is_read_and_keeps_what_it_says(tmp_path):
    resolved = digits_config(tmp_path)
    kept = config.parse_kept(kept_by_01(resolved), "config.yaml")
    assert kept.training_identity("d") == identity_in_01(resolved, "d")
    assert config.parse_kept(kept.to_yaml(), "config.yaml") == kept


def test_its_registered_models_are_looked_at_and_decided_again(old_run, monkeypatch):
    paths = old_run
    monkeypatch.setattr(preflight, "require_database", lambda uri: None)
    monkeypatch.setattr(registry, "audit", lambda given, contents: [])
    done = CliRunner().invoke(cli, ["models", "audit", "--run", paths.uri])
    assert done.exit_code == 0, done.exception
    with pytest.raises(TrackingError, match="the export is not the expected one"):
        register.gate(paths.uri)
