"""error.json as somebody, or a full disk, has left it: the reason of the failure is never lost to a traceback."""

import json

import pytest

from kftrain.errors import BUG_CODE, KftrainError, error_from_dict
from kftrain.run import documents
from kftrain.run.paths import RunPaths

LINE = "task.loss: must return a scalar"

BROKEN = {
    "a list": b"[]",
    "a text": b'"x"',
    "null": b"null",
    "nothing": b"",
    "cut": b'{"kind": "ConfigError", "li',
    "no text": b"\xff\xfe\x00",
    "deep": b"[" * 200_000,
    "empty": b"{}",
    "line is a number": b'{"kind": "ConfigError", "line": 5, "exit_code": 10}',
    "code is a text": b'{"kind": "x", "line": "l", "exit_code": "many"}',
    "code is a list": b'{"kind": "x", "line": "l", "exit_code": []}',
    "code is infinite": b'{"kind": "x", "line": "l", "exit_code": Infinity}',
    "kind is a list": b'{"kind": ["x"], "line": "l", "exit_code": 10}',
}

LEFT = {
    "no what": {"kind": "UserCodeError", "exit_code": 16, "line": LINE},
    "where is a number": {"kind": "UserCodeError", "exit_code": 16, "line": LINE, "what": "w", "where": 5, "fix": ""},
    "failure is a list": {"kind": "UserCodeError", "exit_code": 16, "line": LINE, "failure": ["x"]},
    "failure lacks keys": {"kind": "UserCodeError", "exit_code": 16, "line": LINE, "failure": {"line": "x"}},
}


@pytest.fixture
def paths(tmp_path):
    return RunPaths.of(str(tmp_path), "r")


def leave(paths, content):
    from pathlib import Path

    Path(paths.uri).mkdir(parents=True, exist_ok=True)
    Path(paths.error).write_bytes(content)


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_a_damaged_document_is_an_error_that_says_so(paths, name):
    leave(paths, BROKEN[name])
    found = documents.read_error(paths.error)
    error = error_from_dict(found)
    assert isinstance(error, KftrainError) and error.exit_code == BUG_CODE
    assert "error.json is damaged" in error.line and "\n" not in error.line


@pytest.mark.parametrize("name", sorted(LEFT))
def test_what_is_left_of_a_reason_is_kept(paths, name):
    leave(paths, json.dumps(LEFT[name]).encode())
    found = documents.read_error(paths.error)
    error = error_from_dict(found)
    assert (error.line, error.exit_code) == (LINE, 16)
    assert "failure" not in found


def test_there_may_be_none(paths):
    assert documents.read_error(paths.error) is None


@pytest.mark.parametrize("document", [[], None, 5, "x", {}, {"kind": "ConfigError"}, {"exit_code": "x", "line": []}])
def test_no_document_at_all_is_too_broken_to_be_raised(document):
    assert error_from_dict(document).exit_code == BUG_CODE
