"""A model that cannot be loaded on one process: the champion is left out by all, the run's own is an error."""

import pytest
from helpers.documents import digits_config, publish_described_export

from kftrain import storage
from kftrain.errors import CheckpointError, ConfigError, RetryableError
from kftrain.evaluate import session
from kftrain.run import documents
from kftrain.run.documents import EvaluationRequest, EvaluationTarget, RunPaths, Unmeasured


class FakeWorld:
    """One of two processes; `others` is what the other one has found."""

    def __init__(self, is_main=True, others=""):
        self.is_main, self.others = is_main, others

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
    monkeypatch.setattr(session, "load_export", lambda *arguments: "a model")
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

    monkeypatch.setattr(session, "load_export", away)
    with pytest.raises(RetryableError):
        load(tmp_path, FakeWorld())
