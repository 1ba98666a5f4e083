"""A model that cannot be loaded on one process: the champion is left out by all, the run's own is an error."""

import errno

import pytest
from helpers.documents import digits_config, publish_described_export

from kftrain.core import storage
from kftrain.core.plugins import user_code
from kftrain.errors import CheckpointError, ConfigError, RetryableError, StorageError, UserCodeError
from kftrain.evaluate import session
from kftrain.registry import Champion
from kftrain.run import documents
from kftrain.run.documents import EvaluationRequest, EvaluationTarget, Unmeasured
from kftrain.run.paths import RunPaths
from kftrain.stages import evaluate as stage


class FakeWorld:
    """One of two processes; `others` is what the other one has found."""

    def __init__(self, is_main=True, others=""):
        self.is_main = is_main
        self.others = others

    def gather_slowly(self, value):
        return [value, self.others]


def load(tmp_path, world, *, required=False, output="champion", kind="vision_transformer"):
    config = digits_config(tmp_path)
    paths = RunPaths.of(config.run.storage_root, "r")
    sections = {"model": {"kind": kind}, "task": config.task.model_dump(mode="json"), "model_arguments": {}}
    digest = publish_described_export(f"{paths.uri}/export", {"schema_version": 1, **sections})
    target = EvaluationTarget(
        export_uri=f"{paths.uri}/export",
        export_digest=digest,
        checkpoint_digest="c",
        output_uri=output if "://" in output else f"{paths.uri}/{output}",
        required=required,
    )
    request = EvaluationRequest(evaluation_digest="e", targets=[target])
    return session._load(target, paths, request, config, world), paths, digest


def test_a_champion_that_is_damaged_is_left_out_with_the_reason(tmp_path):
    loaded, paths, digest = load(tmp_path, FakeWorld())
    found = documents.read(Unmeasured, paths.unmeasured)
    assert loaded is None and (found.evaluation_digest, found.export_digest) == ("e", digest)
    assert "the export has no config.json" in found.reason


@pytest.mark.parametrize(("output", "kind"), [("http://169.254.169.254/x", "vision_transformer"), ("c", "os:system")])
def test_a_champion_that_is_not_allowed_is_left_out_with_the_reason(tmp_path, output, kind):
    loaded, paths, _ = load(tmp_path, FakeWorld(), output=output, kind=kind)
    assert loaded is None
    assert "registry.trusted_" in documents.read(Unmeasured, paths.unmeasured).reason


def test_what_one_process_cannot_load_is_scored_by_none(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "read_empty", lambda *arguments: "a model")
    loaded, paths, _ = load(tmp_path, FakeWorld(others="its disk is full"))
    assert loaded is None and documents.read(Unmeasured, paths.unmeasured).reason == "its disk is full"
    storage.remove(paths.unmeasured)
    assert load(tmp_path, FakeWorld(is_main=False, others="its disk is full"))[0] is None
    assert not storage.exists(paths.unmeasured)
    assert load(tmp_path, FakeWorld())[0] == "a model" and not storage.exists(paths.unmeasured)


@pytest.mark.parametrize(("kind", "error"), [("vision_transformer", CheckpointError), ("os:system", ConfigError)])
def test_the_runs_own_model_must_be_loaded(tmp_path, kind, error):
    with pytest.raises(error):
        load(tmp_path, FakeWorld(), required=True, kind=kind)


def test_what_may_pass_is_tried_again(tmp_path, monkeypatch):
    def away(*arguments):
        raise RetryableError("storage is away")

    monkeypatch.setattr(session, "read_empty", away)
    with pytest.raises(RetryableError):
        load(tmp_path, FakeWorld())


@pytest.mark.parametrize("outage", [ConnectionError("refused"), TimeoutError("no answer"), OSError(errno.EIO, "I/O")])
def test_code_of_a_users_model_that_meets_an_outage_is_tried_again(tmp_path, monkeypatch, outage):
    """It may fetch a tokenizer or weights: that says nothing of the champion."""

    def away(*arguments):
        with user_code("model.kind"):
            raise outage

    monkeypatch.setattr(session, "read_empty", away)
    with pytest.raises(StorageError, match=r"refused|no answer|I/O"):
        load(tmp_path, FakeWorld())
    monkeypatch.setattr(session, "read_empty", lambda *arguments: raised(UserCodeError("no such layer")))
    loaded, paths, _ = load(tmp_path, FakeWorld())
    assert loaded is None and documents.read(Unmeasured, paths.unmeasured).reason == "no such layer"


def raised(error):
    raise error


def test_storage_that_is_away_is_no_obstacle_of_the_champion(tmp_path, monkeypatch):
    """The step that looks for one before it starts a job ends instead, to be run again."""
    folder = f"{digits_config(tmp_path).run.storage_root}/runs/c"
    champion = Champion(1, folder, "d" * 64, f"{folder}/export", "f" * 64)
    monkeypatch.setattr(storage, "read_bytes", lambda uri: raised(StorageError("storage cannot be reached")))
    with pytest.raises(StorageError):
        stage._find_obstacle(digits_config(tmp_path), champion, "e" * 64)
