import pickle

import pytest

from kftrain import errors
from kftrain.errors import ConfigError, KftrainError, RetryableError, error_from_dict, error_to_dict


def every_kind():
    return [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, KftrainError) and kind is not KftrainError
    ]


OF_THEIR_OWN = {"OldOrderError": ConfigError.exit_code}
"""Kinds that are told apart by another code than that of the kind they are one of."""


def test_exit_codes_are_distinct_and_documented():
    public = [kind for kind in every_kind() if not kind.__name__.startswith("_")]
    direct = [kind for kind in public if kind.__base__ is KftrainError]
    assert len({kind.exit_code for kind in direct}) == len(direct)
    for kind in public:
        assert kind in direct or kind.exit_code == OF_THEIR_OWN.get(kind.__name__, kind.__base__.exit_code)
        assert f"{kind.__name__:<20} {kind.exit_code}".split() == [kind.__name__, str(kind.exit_code)]
        assert kind.__name__ in errors.__doc__
        assert str(kind.exit_code) in errors.__doc__


def test_the_operator_retries_exactly_the_retryable_kinds():
    assert RetryableError("x").retryable
    assert not ConfigError("x").retryable
    assert {k.__name__ for k in every_kind() if k.exit_code >= 128 and not k.__name__.startswith("_")} == {
        "InterruptedByUser",
        "RetryableError",
        "LostPeerError",
        "StorageError",
        "StorageAwayError",
        "HangError",
        "Preempted",
    }


def test_the_line_holds_what_where_value_and_fix():
    error = ConfigError("unknown key", where="config: a.b", value={"x": 1}, fix="did you mean 'c'?")
    assert error.line == "config: a.b: unknown key (got {'x': 1}); did you mean 'c'?"


def test_a_line_stays_one_short_line():
    error = ConfigError("bad\nthing", value="x" * 5000)
    assert "\n" not in error.line
    assert len(error.line) < 300


@pytest.mark.parametrize("value", ["text", 5, None, ["a"]])
def test_an_error_survives_the_way_through_json(value):
    error = ConfigError("what", where="where", value=value, fix="fix")
    again = error_from_dict(error_to_dict(error))
    assert type(again) is ConfigError
    assert again.line == error.line


def test_a_bug_keeps_its_type_and_place():
    try:
        raise KeyError("k")
    except KeyError as error:
        document = error_to_dict(error)
    assert document["exit_code"] == 1
    assert "KeyError" in document["line"] and "test_error_types.py" in document["line"]
    assert error_from_dict(document).exit_code == 1


def test_an_error_of_an_unknown_kind_survives_two_ways_through_json():
    once = error_from_dict({"kind": "OfAnotherVersion", "exit_code": 42, "line": "something"})
    again = error_from_dict(error_to_dict(once))
    assert (again.line, again.exit_code) == ("something", 42)


def test_an_error_survives_the_way_to_another_process():
    """As pickles, which torch sends the errors of one process to the others in."""
    for error in (errors.RetryableError("full", where="s", fix="free some"), errors.DataError("bad", value=[1])):
        copied = pickle.loads(pickle.dumps(error))
        assert (type(copied), copied.line, copied.exit_code) == (type(error), error.line, error.exit_code)
