"""error.json as somebody, or a full disk, has left it: the reason of the failure is never lost to a traceback."""

import json

import pytest

from kftrain.errors import BUG_CODE, DataError, FailureClass, KftrainError, error_from_dict
from kftrain.run.error import ErrorDocument, read_error
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
    found = read_error(paths.error)
    error = found.to_error()
    assert isinstance(error, KftrainError) and error.exit_code == BUG_CODE
    assert "error.json is damaged" in error.line and "\n" not in error.line


@pytest.mark.parametrize("name", sorted(LEFT))
def test_what_is_left_of_a_reason_is_kept(paths, name):
    leave(paths, json.dumps(LEFT[name]).encode())
    found = read_error(paths.error)
    error = found.to_error()
    assert (error.line, error.exit_code) == (LINE, 16)
    assert found.failure_class is FailureClass.USER_CODE


def test_there_may_be_none(paths):
    assert read_error(paths.error) is None


@pytest.mark.parametrize("document", [[], None, 5, "x", {}, {"kind": "ConfigError"}, {"exit_code": "x", "line": []}])
def test_no_document_at_all_is_too_broken_to_be_raised(document):
    assert error_from_dict(document).exit_code == BUG_CODE


def test_what_is_written_is_read_as_it_was(paths):
    document = ErrorDocument.of(
        DataError("no rows", where="x.tar", value=3, fix="shard again"),
        **{"stage": "train", "time": 5.0, "attempt": 2, "rank": 3, "node_rank": 1, "node": "n", "pod": "p"},
        **{"last_lines": ["a", "b"], "warnings": ["w"]},
    )
    leave(paths, json.dumps(document.to_dict()).encode())
    found = read_error(paths.error)
    assert found == document
    assert (found.schema_version, found.failure_class.value, found.exit_code) == (1, "data", 11)
    again = found.to_error()
    assert type(again) is DataError and again.line == found.line == "x.tar: no rows (got 3); shard again"


BEFORE = {
    "kind": "LaunchError", "exit_code": 13, "line": "job x: 2 attempts in a row", "what": "2 attempts in a row",
    "where": "job x", "value": None, "fix": "", "stage": "train", "time": 1.5,
    "failure": {
        "schema_version": 1, "task": "train", "failure_class": "out of memory on the host", "line": "killed",
        "exit_code": 137, "rank": 2, "node": "n", "pod": "w-0", "last_lines": ["step 3"], "advice": "Lower it.",
    },
}  # fmt: skip
"""As releases before the schema wrote it."""


def test_one_of_before_is_read(paths):
    leave(paths, json.dumps(BEFORE).encode())
    found = read_error(paths.error)
    assert (found.failure_class, found.exit_code, found.line) == (FailureClass.HOST_MEMORY, 13, BEFORE["line"])
    assert (found.rank, found.node, found.pod, found.last_lines) == (2, "n", "w-0", ["step 3"])
    assert (found.stage, found.time) == ("train", 1.5)


@pytest.mark.parametrize(
    ("kind", "code", "failure_class"),
    [
        ("OtherTrainingError", 12, "another training"),
        ("", 138, "lost connection between workers"),
        ("", 137, "out of memory on the host"),
        ("ZeroDivisionError", 1, "bug"),
        ("", 99, "unknown"),
        ("NewError", 11, "data"),
    ],
)
def test_one_that_names_no_class_gets_that_of_its_kind_or_code(paths, kind, code, failure_class):
    leave(paths, json.dumps({"kind": kind, "exit_code": code, "line": "l"}).encode())
    assert read_error(paths.error).failure_class.value == failure_class


def test_one_of_a_later_version_is_shown_as_far_as_it_is_understood(paths):
    later = {
        **{"schema_version": 7, "kind": "DataError", "exit_code": 11, "line": LINE, "failure_class": "cosmic rays"},
        **{"rank": [0, 1], "stage": "train", "novelty": {}},
    }
    leave(paths, json.dumps(later).encode())
    found = read_error(paths.error)
    assert (found.line, found.exit_code, found.stage, found.rank) == (LINE, 11, "train", None)
    assert found.failure_class is FailureClass.DATA
