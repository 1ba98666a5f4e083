"""Threads that nobody has to wait for."""

import pytest

from kftrain.core import threads


@pytest.fixture
def made(monkeypatch):
    """The work of threads that have not begun."""
    targets = []

    class Idle:
        def __init__(self, target, **options):
            targets.append(target)

        def start(self):
            pass

    monkeypatch.setattr(threads.threading, "Thread", Idle)
    return targets


def test_what_is_cancelled_before_it_began_is_not_done(made):
    done = []
    future = threads.start(lambda: done.append(1), "x")
    assert future.cancel()
    made[0]()
    assert not done and future.cancelled()


def test_what_has_begun_cannot_be_cancelled(made):
    future = threads.start(lambda: future.cancel(), "x")
    made[0]()
    assert future.result() is False
