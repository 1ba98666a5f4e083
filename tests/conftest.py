"""What every test has: code that it names itself may be imported."""

import pytest

from kftrain import trust


class _Everything(set):
    def __contains__(self, kind):
        return True


@pytest.fixture(autouse=True)
def permitted(request, monkeypatch):
    """A test is whoever has started the process; one that asks for `nothing_permitted` begins as a process does."""
    strict = "nothing_permitted" in request.fixturenames
    monkeypatch.setattr(trust, "_permitted", set() if strict else _Everything())


@pytest.fixture
def nothing_permitted(permitted):
    """Nobody has named any code yet."""
