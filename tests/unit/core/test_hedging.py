"""Requests that are slower than nearly all before them, and pauses after those that a store refuses."""

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kftrain.core import hedging
from kftrain.core.hedging import LEAST_KNOWN, LEAST_SECONDS, Hedge, choose_slow_seconds
from kftrain.core.outages import FIRST_DELAY_SECONDS, MAX_DELAY_SECONDS, iterate_pauses


@given(st.lists(st.floats(0, 100), max_size=300))
def test_at_most_one_of_a_hundred_is_slow(seconds):
    slow = choose_slow_seconds(seconds)
    if len(seconds) < LEAST_KNOWN:
        assert slow is None
    else:
        assert slow >= LEAST_SECONDS and sum(second > slow for second in seconds) <= max(1, len(seconds) / 50)
        assert slow == LEAST_SECONDS or slow in seconds


def test_a_pause_grows_to_its_limit_and_chance_takes_up_to_half_of_it():
    for attempt, pause in enumerate(itertools.islice(iterate_pauses(), 100)):
        longest = min(FIRST_DELAY_SECONDS * 2**attempt, MAX_DELAY_SECONDS)
        assert longest / 2 <= pause <= longest


def test_pauses_of_many_that_were_refused_at_once_do_not_meet():
    pauses = sorted(next(itertools.islice(iterate_pauses(), 5, None)) for _ in range(1000))
    assert pauses[-1] - pauses[0] > 0.4 * MAX_DELAY_SECONDS


class Store:
    """Answers with the number of the request, after so many seconds each."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.num_asked = 0
        self.num_cancelled = 0

    async def ask(self):
        number = self.num_asked
        self.num_asked += 1
        wait = self.seconds(number)
        try:
            await asyncio.sleep(abs(wait))
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if wait < 0:
            raise OSError(f"request {number}")
        return number


def learned():
    """A hedge that knows fast requests of 1 MB."""
    hedge = Hedge()

    async def many():
        for _ in range(2 * LEAST_KNOWN):
            await hedge.call(10**6, Store(lambda number: 0).ask)

    asyncio.run(many())
    return hedge


def test_a_request_that_hangs_is_made_again_and_cancelled():
    hedge, store = learned(), Store([600, 0.001].__getitem__)
    assert asyncio.run(asyncio.wait_for(hedge.call(10**6, store.ask), 60)) == 1
    assert (store.num_asked, store.num_cancelled) == (2, 1)


def test_a_request_that_is_usual_is_made_once():
    hedge, store = learned(), Store(lambda number: 0.001)
    assert asyncio.run(hedge.call(10**6, store.ask)) == 0 and store.num_asked == 1
    slow = Store(lambda number: 0.2)
    assert asyncio.run(hedge.call(10, slow.ask)) == 0 and slow.num_asked == 1, "of another size nothing is known"


@pytest.mark.parametrize(("seconds", "answer"), [([-0.2, 0.3], 1), ([0.3, -0.1], 0)])
def test_one_that_fails_leaves_the_other(seconds, answer):
    assert asyncio.run(learned().call(10**6, Store(seconds.__getitem__).ask)) == answer


def test_where_all_fail_the_error_is_raised():
    with pytest.raises(OSError, match="request 1"):
        asyncio.run(learned().call(10**6, Store([-0.1, -0.3].__getitem__).ask))
    store = Store(lambda number: -0.001)
    with pytest.raises(OSError, match="request 0"):
        asyncio.run(learned().call(10**6, store.ask))
    assert store.num_asked == 1, "a failure is for the policy of outages"


def test_a_store_that_becomes_slow_is_not_asked_for_twice_as_much(monkeypatch):
    monkeypatch.setattr(hedging, "LEAST_SECONDS", 0.0001)
    hedge, store = learned(), Store(lambda number: 0.01)

    async def many():
        await asyncio.gather(*(hedge.call(10**6, store.ask) for _ in range(200)))

    asyncio.run(many())
    assert 1 <= store.num_asked - 200 <= 300 / hedging.MAX_SHARE + 1
