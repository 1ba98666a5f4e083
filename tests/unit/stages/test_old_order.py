"""Runs that a release with another order of samples began, and configurations that release 0.2 has kept."""

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from helpers.documents import digits_config, finished_run, publish_commit, sharded_run

from kftrain import config, registry, tracking
from kftrain.cli import cli
from kftrain.core import storage
from kftrain.errors import ConfigError, OldOrderError, OtherTrainingError, TrackingError
from kftrain.run import commit
from kftrain.run.config import read_config
from kftrain.run.paths import RunPaths
from kftrain.sharding import mixing
from kftrain.stages import firing, preflight, register
from kftrain.stages.firing import Begun, Skipped
from kftrain.stages.shard import shard, shard_from_pipeline
from kftrain.stages.train import train
from kftrain.trust import read_shards

JOB = "8f11aaaa-0000"
LINE = (
    "this training was begun under another order of samples than 2 and 3 (got 1); "
    "finish it with the release that began it, or start a new run"
)


def kept_by_02(resolved):
    """A configuration as release 0.2 wrote it into a run's folder before it lost a key."""
    document = resolved.to_dict()
    document["data"]["shuffle_window_shards"] = None
    del document["data"]["order"], document["data"]["lanes"]
    return yaml.safe_dump(document, sort_keys=False)


@pytest.fixture
def old_run(tmp_path, monkeypatch):
    """A finished run whose checkpoint is of another order."""
    monkeypatch.setattr(tracking, "check", lambda uri: None)
    paths, resolved = finished_run(tmp_path, "data.order=2")
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


@pytest.mark.parametrize("order", [{}, {"order": 1}, {"order": 4}])
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
    resolved = digits_config(tmp_path, "data.order=2")
    kept = config.parse_kept(kept_by_02(resolved), "config.yaml")
    assert kept == resolved and "shuffle_window_shards" not in kept.to_dict()["data"]
    with pytest.raises(ConfigError, match="unknown key"):
        config.parse_kept(kept_by_02(resolved).replace("shards: null", "shards: 16"), "config.yaml")


@pytest.fixture
def run_of_02(tmp_path, monkeypatch):
    """A run that release 0.2 has opened, and with a checkpoint trained."""
    monkeypatch.setattr(tracking, "check", lambda uri: None)
    paths, resolved, _ = sharded_run(tmp_path)
    storage.publish(paths.config, kept_by_02(resolved))
    return paths


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("damage", ["", "manifest.json", "COMMITTED"])
def test_one_of_release_02_goes_on_in_its_order(tmp_path, run_of_02, given, damage):
    """As its configuration says, whether or not anybody can read its checkpoint."""
    identity = read_config(run_of_02).training_identity("d")
    assert identity["order"] == 2
    publish_commit(run_of_02, 10, identity)
    if damage:
        (file,) = Path(run_of_02.checkpoints).glob(f"*/{damage}")
        file.write_text("damaged")
    text = digits_config(tmp_path).to_yaml() if given else ""
    for _ in range(2):  # it stays so
        shard_from_pipeline(text, {}, run_of_02.uri, JOB, [].append)
        kept = read_config(run_of_02)
        assert kept.data.order == 2 and kept.training_identity("d") == identity


@pytest.mark.parametrize("given", [False, True])
def test_one_of_release_02_that_has_not_trained_keeps_its_order_and_its_shards(tmp_path, monkeypatch, run_of_02, given):
    """Its source may have grown since, and its window is over."""
    monkeypatch.setattr(mixing, "shard_mixture", lambda *arguments: pytest.fail("it has its shards"))
    text, shards = digits_config(tmp_path, "data.lanes=8").to_yaml() if given else "", read_shards(run_of_02)
    shard_from_pipeline(text, {}, run_of_02.uri, JOB, [].append)
    assert read_config(run_of_02).data == digits_config(tmp_path, "data.order=2").data
    assert read_shards(run_of_02) == shards


def test_one_of_release_02_keeps_its_shards_where_other_defaults_are_those_of_now(tmp_path, monkeypatch, run_of_02):
    """Its source may have grown since: then it could not go on."""
    document = yaml.safe_load(Path(run_of_02.config).read_text())
    document["data"] |= {"prefetch_batches": 2, "cache_bytes": 0}
    storage.publish(run_of_02.config, yaml.safe_dump(document, sort_keys=False))
    publish_commit(run_of_02, 10, read_config(run_of_02).training_identity("d"))
    monkeypatch.setattr(mixing, "shard_mixture", lambda *arguments: pytest.fail("it has its shards"))
    shards = read_shards(run_of_02)
    shard_from_pipeline(digits_config(tmp_path).to_yaml(), {}, run_of_02.uri, JOB, [].append)
    assert read_shards(run_of_02) == shards and read_config(run_of_02).data.prefetch_batches == "auto"


def test_other_lanes_are_no_other_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "check", lambda uri: None)
    paths, _, _ = sharded_run(tmp_path)
    monkeypatch.setattr(mixing, "shard_mixture", lambda *arguments: pytest.fail("it has its shards"))
    shard_from_pipeline(digits_config(tmp_path, "data.lanes=8").to_yaml(), {}, paths.uri, JOB, [].append)
    assert read_config(paths).data.lanes == 8


def test_one_of_release_02_whose_schedule_skips_it_now_is_no_other_training(tmp_path, run_of_02):
    identity = read_config(run_of_02).training_identity("d")
    publish_commit(run_of_02, 10, identity)
    given = digits_config(tmp_path)
    begun = Begun(given, skipped=Skipped(why="paused", line="its schedule is paused"))
    outcome = shard(given, run_of_02.run_id, True, [].append, JOB, begun)
    assert outcome.summary["why"] == "paused" and read_config(run_of_02).training_identity("d") == identity


@pytest.mark.parametrize("given", ["data.lanes=8", "data.order=2,data.lanes=8"])
def test_the_lanes_of_a_projects_new_runs_stop_no_run_of_release_02(tmp_path, run_of_02, given):
    identity = read_config(run_of_02).training_identity("d")
    publish_commit(run_of_02, 10, identity)
    shard_from_pipeline(digits_config(tmp_path, *given.split(",")).to_yaml(), {}, run_of_02.uri, JOB, [].append)
    assert read_config(run_of_02).training_identity("d") == identity


def test_a_run_with_lanes_that_has_trained_changes_neither_them_nor_its_order(tmp_path, run_of_02):
    paths, resolved, _ = sharded_run(tmp_path, run_id="r-2")
    publish_commit(paths, 10, resolved.training_identity("d"))
    for setting, change in {"data.order=2": "order 3 -> 2", "data.lanes=8": r"data\.lanes None -> 8"}.items():
        with pytest.raises(OtherTrainingError, match=change):
            shard_from_pipeline(digits_config(tmp_path, setting).to_yaml(), {}, paths.uri, JOB, [].append)


def test_a_release_with_another_order_is_nothing_to_train_on(tmp_path):
    digests = {firing._digest_identity(digits_config(tmp_path, f"data.order={order}"), "d") for order in (2, 3)}
    assert len(digests) == 1
    assert firing._digest_identity(digits_config(tmp_path, "data.lanes=8"), "d") not in digests


def test_its_registered_models_are_looked_at_and_decided_again(old_run, monkeypatch):
    paths = old_run
    monkeypatch.setattr(preflight, "require_database", lambda uri: None)
    monkeypatch.setattr(registry, "audit", lambda given, contents: [])
    done = CliRunner().invoke(cli, ["models", "audit", "--run", paths.uri])
    assert done.exit_code == 0, done.exception
    assert read_config(paths).run.name == "tiny"
    with pytest.raises(TrackingError, match="the export is not the expected one"):
        register.gate(paths.uri)
