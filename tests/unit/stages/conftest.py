"""What tests of several stages need."""

import pytest

from kftrain.core import storage


@pytest.fixture
def storage_is_away(monkeypatch):
    """A function after whose call nothing can be read or written."""

    def refuse(*arguments):
        raise ConnectionError("the endpoint does not answer")

    def go_away():
        for name in ("exists", "read_bytes", "publish"):
            monkeypatch.setattr(storage, name, refuse)

    return go_away
