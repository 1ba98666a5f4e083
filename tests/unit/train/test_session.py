"""What an attempt finds of the ones before it, and what it may do while another holds the run."""

import types
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import jobs

from kftrain.checkpoint import load
from kftrain.core import storage
from kftrain.errors import CheckpointError, FencedError
from kftrain.parallel.shape import Shape
from kftrain.run import attempts, documents
from kftrain.run.documents import Completion
from kftrain.run.export import is_export
from kftrain.run.paths import RunPaths
from kftrain.train import completing, engines, session


def test_a_run_whose_export_is_gone_exports_again_without_a_step(tmp_path):
    quick = ["evaluate.interval_steps=4", "evaluate.max_interval_samples=8"]
    paths, resolved = jobs.make_run(tmp_path, ["train.steps=4", *quick])
    first = jobs.run_worker(paths, resolved, processes=1)
    assert first.returncode == 0 and " (first 8 samples)\n" in first.stdout
    before = documents.read(Completion, paths.complete)
    storage.remove(before.export_uri)
    done = jobs.run_worker(paths, resolved, processes=1)
    assert done.returncode == 0, done.stdout + done.stderr
    after = documents.read(Completion, paths.complete)
    assert is_export(after.export_uri) and (after.attempt, before.attempt) == (2, 1)
    assert (after.checkpoint_digest, after.export_digest) == (before.checkpoint_digest, before.export_digest)
    assert "going on after step 4" in done.stdout and "step 4/4" not in done.stdout


def test_a_fenced_attempt_does_not_export(tmp_path, monkeypatch):
    paths = RunPaths(f"{tmp_path}/r")
    finished = completing.Finished(attempts.claim_run(paths, 0, 1), 1, 100, [], None, 20, None)
    attempts.claim_run(paths, 0, 1)
    monkeypatch.setattr(completing.commit, "list_committed", lambda paths: ["step-00000010-a1"])
    monkeypatch.setattr(completing.commit, "read_checkpoint_manifest", lambda uri: (None, "digest"))
    monkeypatch.setattr(completing.exporting, "export_checkpoint", lambda *arguments: pytest.fail("exported"))
    with pytest.raises(FencedError):
        completing.complete(SimpleNamespace(paths=paths, config=None, task=None), finished, 1.0)


class Alone:
    """A world of one process."""

    rank = 0
    size = 1
    is_main = True

    def from_main(self, value):
        return value


@pytest.fixture
def training(tmp_path, monkeypatch):
    """What an attempt is given, up to the choice of a checkpoint: three steps were committed once."""
    monkeypatch.setattr(session, "_verify_data", lambda *arguments: None)
    monkeypatch.setattr(completing.commit, "find_last_step", lambda paths: 3)
    return SimpleNamespace(paths=RunPaths(f"{tmp_path}/r"), config=None, identity={}, manifest_uri="")


def test_the_run_is_claimed_before_a_checkpoint_is_chosen(training, monkeypatch, tmp_path):
    """Else it would take markers from, or call damaged, what a live attempt is just writing and retiring."""
    claimed = []

    def choose(paths, world, identity):
        claimed.append((attempts.find_last_attempt(paths), attempts.read_last_start_step(paths)))
        raise CheckpointError("all are damaged")

    monkeypatch.setattr(load, "choose_checkpoint", choose)
    with pytest.raises(CheckpointError, match="all are damaged"):
        session.run_attempt(training, Alone(), None, tmp_path)
    assert claimed == [(1, 3)]


def test_another_training_does_not_claim_the_run(training, monkeypatch, tmp_path):
    def refuse(paths, world, identity):
        raise CheckpointError("of another training")

    monkeypatch.setattr(load, "refuse_another_training", refuse)
    with pytest.raises(CheckpointError, match="another training"):
        session.run_attempt(training, Alone(), None, tmp_path)
    assert attempts.find_last_attempt(training.paths) == 0


@pytest.mark.parametrize(("size", "kind"), [(1, "spmd"), (2, "pipelined")])
def test_the_mesh_chooses_the_engine_and_the_session_names_none(monkeypatch, size, kind):
    for name in engines.FACTORIES:
        monkeypatch.setitem(engines.FACTORIES, name, lambda *arguments, name=name: (name, *arguments))
    mesh = types.SimpleNamespace(shape=Shape(pipeline=size))
    assert session.build("config", "task", "loader", mesh) == (kind, "config", "task", "loader", mesh, None)
    assert "spmd" not in Path(session.__file__).read_text().lower()
