"""What a node that failed says of itself, and when it is not asked any more."""

import pytest

from kftrain.errors import FencedError, LostPeerError
from kftrain.run import attempts
from kftrain.run.error import ErrorDocument, read_error
from kftrain.run.paths import RunPaths
from kftrain.worker.node import NodeSpec
from kftrain.worker.supervisor import announce_error


@pytest.fixture
def node(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return NodeSpec("train", str(tmp_path / "runs" / "r"), "0" * 64, 1, 1, 0)


def fail(node, attempt, error=None):
    announce_error(node, ErrorDocument.of(error or LostPeerError("lost contact"), rank=1), attempt)
    return read_error(RunPaths(node.run_uri).error)


def test_the_error_of_the_attempt_at_work_is_that_of_the_run(node, capsys):
    attempts.claim_run(RunPaths(node.run_uri), 0, 1)
    found = fail(node, 1)
    assert found is not None and found.line == "lost contact" and (found.rank, found.attempt) == (1, 1)
    assert "rank 1: lost contact" in capsys.readouterr().err


def test_an_attempt_that_fails_before_its_claim_is_heard(node):
    attempts.claim_run(RunPaths(node.run_uri), 0, 1)
    found = fail(node, 2)
    assert found is not None and found.attempt == 2


def test_an_attempt_that_comes_back_after_another_one_says_nothing_of_the_run(node):
    for _ in range(2):
        attempts.claim_run(RunPaths(node.run_uri), 0, 1)
    assert fail(node, 1) is None


def test_who_is_fenced_says_nothing_of_the_run(node):
    attempts.claim_run(RunPaths(node.run_uri), 0, 1)
    assert fail(node, 1, FencedError("a newer attempt holds the run")) is None
