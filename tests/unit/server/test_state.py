"""The state of a server as a function of its frames: sent again or interleaved differently, they give the same."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain.core.frames import Frame, FrameKind
from kftrain.server.optimizers import RowSgd
from kftrain.server.state import ServerState
from kftrain.server.table import RowTable, TableSpec

pytestmark = pytest.mark.timeout(60)

KEYS = np.arange(20)
NUM_STEPS = 4


def make_state(folder, max_ahead=0):
    state = ServerState([RowTable(TableSpec("t", 2, 1), RowSgd(0.1), folder)], max_ahead)
    for worker in range(2):
        state.apply(Frame(FrameKind.JOIN, worker=worker))
    return state


def make_frames(worker):
    """Two pushes and the end of each step."""
    rng, frames = np.random.default_rng(worker), []
    for step in range(NUM_STEPS):
        for _ in range(2):
            keys = np.unique(rng.integers(0, 20, 6))
            values = rng.standard_normal(2 * len(keys)).astype(np.float32)
            frames.append(Frame(FrameKind.PUSH, 0, worker, len(frames) + 1, keys=keys, values=values))
        frames.append(Frame(FrameKind.FINISH, 0, worker, len(frames) + 1, step))
    return frames


@settings(max_examples=40, deadline=None)
@given(turns=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 4)), max_size=60), max_ahead=st.sampled_from([0, 1]))
def test_frames_that_come_again_or_in_another_turn_change_nothing(tmp_path_factory, turns, max_ahead):
    folder = tmp_path_factory.mktemp("state")
    state, plain = make_state(folder, max_ahead), make_state(folder, max_ahead)
    frames, sent = [make_frames(0), make_frames(1)], [0, 0]
    # Each turn is a worker's next frame, with as many of those before it sent again.
    for worker, num_again in [*turns, *[(worker, 0) for _ in range(3 * NUM_STEPS) for worker in range(2)]]:
        stop = min(sent[worker] + 1, len(frames[worker]))
        for frame in frames[worker][max(0, stop - 1 - num_again) : stop]:
            assert not state.find_flaw(frame)
            state.apply(frame)
        sent[worker] = stop
    for step in range(NUM_STEPS):
        for worker in range(2):
            for frame in frames[worker][3 * step : 3 * step + 3]:
                plain.apply(frame)
    assert state.clocks == {0: NUM_STEPS, 1: NUM_STEPS}
    weights = [one.tables[0].read(KEYS) for one in (state, plain)]
    if max_ahead == 0:
        assert np.array_equal(*weights), "bulk-synchronous steps are summed in the order of the workers"
    np.testing.assert_allclose(*weights, atol=1e-5)


@pytest.mark.parametrize(
    ("frame", "flaw"),
    [
        (Frame(FrameKind.PUSH, worker=5, sequence=1), "has not joined"),
        (Frame(FrameKind.PUSH, sequence=2), "a frame is lost"),
        (Frame(FrameKind.PUSH, 1, sequence=1), "no table"),
        (Frame(FrameKind.PUSH, sequence=1, keys=KEYS[:2], values=np.ones(3, np.float32)), "3 values for 2 keys"),
        (Frame(FrameKind.PUSH, sequence=1, keys=KEYS[[4, 4]], values=np.ones(4, np.float32)), "comes twice"),
        (Frame(FrameKind.FINISH, sequence=1, clock=3), "ends in step 0"),
    ],
)
def test_what_cannot_be_applied_is_named(tmp_path, frame, flaw):
    assert flaw in make_state(tmp_path).find_flaw(frame)


@pytest.mark.parametrize("max_ahead", [0, 2, None])
def test_what_a_dead_worker_pushed_in_a_step_that_it_did_not_finish_is_dropped(tmp_path, max_ahead):
    state = make_state(tmp_path, max_ahead)
    before = state.tables[0].read(KEYS)
    state.apply(Frame(FrameKind.PUSH, 0, 1, 1, keys=KEYS, values=np.ones(40, np.float32)))
    assert np.array_equal(state.tables[0].read(KEYS), before)
    state.apply(Frame(FrameKind.JOIN, worker=1))
    state.apply(Frame(FrameKind.FINISH, sequence=1))
    for sequence, keys in ((2, KEYS), (3, KEYS[:10])):  # its successor does the step again
        state.apply(Frame(FrameKind.PUSH, 0, 1, sequence, keys=keys, values=np.ones(2 * len(keys), np.float32)))
    state.apply(Frame(FrameKind.FINISH, 0, 1, 4))
    assert state.tables[0].num_updates == 1
    moved = np.where(KEYS < 10, 0.2, 0.1)
    np.testing.assert_allclose((before - state.tables[0].read(KEYS)).mean(1), moved, atol=1e-6)
