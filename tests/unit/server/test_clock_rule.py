"""The clock rule under any schedule and any set of deaths."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain.server.clock import count_finished, may_begin

pytestmark = pytest.mark.timeout(60)


@settings(max_examples=150, deadline=None)
@given(
    num_workers=st.integers(1, 5),
    max_ahead=st.sampled_from([0, 1, 3, None]),
    schedule=st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["step", "step", "step", "die"])), max_size=80),
)
def test_nobody_is_too_far_ahead_and_somebody_may_always_go_on(num_workers, max_ahead, schedule):
    clocks = dict.fromkeys(range(num_workers), 0)
    history = []
    for worker, what in schedule:
        if worker not in clocks:
            continue
        if what == "die":
            del clocks[worker]
        elif may_begin(clocks, clocks[worker], max_ahead):
            history.append((clocks[worker], dict(clocks)))
            clocks[worker] += 1
        # No deadlock: the slowest of those that live may begin, whoever has died.
        assert not clocks or any(may_begin(clocks, clock, max_ahead) for clock in clocks.values())
    if max_ahead is not None:
        # What step c reads has all updates of the living of the steps before c - s.
        assert all(step - min(living.values()) <= max_ahead for step, living in history)


@pytest.mark.parametrize("max_ahead", [0, 1, 4])
def test_the_border_is_sharp(max_ahead):
    clocks = {0: 7, 1: 7 + max_ahead}
    assert may_begin(clocks, 7 + max_ahead, max_ahead) and not may_begin(clocks, 8 + max_ahead, max_ahead)
    assert may_begin({}, 10**9, max_ahead) and count_finished({}) == 0 and count_finished(clocks) == 7
