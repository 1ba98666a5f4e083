"""The clock of a job: what counts as queueing, starting and training."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain.launch.kubernetes.settings import KubernetesConfig
from kftrain.launch.kubernetes.states import State
from kftrain.launch.kubernetes.watcher import Clock

QUEUED = (State.QUEUED,)
STARTING = (State.ADMITTED, State.SCHEDULING, State.PULLING, State.RENDEZVOUS)
TRAINING = (State.WORKING, State.COMMITTING)
OVER = (State.SUCCEEDED, State.FAILED, State.GONE)

histories = st.lists(st.tuples(st.sampled_from(State), st.integers(0, 10_000)), max_size=30)


def limits_of(queue_seconds, start_seconds, training_seconds):
    return KubernetesConfig(
        queue_timeout_seconds=queue_seconds,
        start_timeout_seconds=start_seconds,
        training_timeout_seconds=training_seconds,
    )


def played(history, start=100.0):
    clock = Clock(start)
    for state, seconds in history:
        clock = clock.advance(state, clock.time + seconds)
    return clock


def total(history, states):
    return sum(seconds for state, seconds in history if state in states)


def since_another(history, states):
    """The part of a history that has been in `states` without a break."""
    live = [entry for entry in history if entry[0] not in OVER]
    return list(itertools.takewhile(lambda entry: entry[0] in states, reversed(live)))


def test_every_state_is_counted_somewhere():
    assert {*QUEUED, *STARTING, *TRAINING, *OVER} == set(State)


@settings(derandomize=True, max_examples=300)
@given(histories)
def test_training_is_summed_up_and_the_rest_begins_anew(history):
    clock = played(history)
    assert clock.time == 100 + sum(seconds for _, seconds in history)
    assert clock.training_seconds == total(history, TRAINING)
    assert clock.queue_seconds == total(since_another(history, QUEUED), QUEUED)
    assert clock.start_seconds == total(since_another(history, STARTING), STARTING)


@settings(derandomize=True, max_examples=200)
@given(histories)
def test_no_second_is_lost_or_counted_twice(history):
    """What queueing and starting lose when they begin anew is all that is missing from the wall clock."""
    clock, counted = Clock(0.0), 0.0
    for state, seconds in history:
        before, clock = clock, clock.advance(state, clock.time + seconds)
        kept = [
            max(0.0, after - earlier)
            for after, earlier in (
                (clock.queue_seconds, before.queue_seconds),
                (clock.start_seconds, before.start_seconds),
                (clock.training_seconds, before.training_seconds),
            )
        ]
        counted += sum(kept)
        assert sum(seconds > 0 for seconds in kept) <= 1
    assert counted == total(history, QUEUED + STARTING + TRAINING)


@pytest.mark.parametrize(
    ("state", "setting"),
    [
        (State.QUEUED, "launch.kubernetes.queue_timeout_seconds = 10 s"),
        (State.PULLING, "launch.kubernetes.start_timeout_seconds = 20 s"),
        (State.WORKING, "launch.kubernetes.training_timeout_seconds = 30 s"),
    ],
)
def test_each_limit_is_named_once_it_is_exceeded(state, setting):
    limits = limits_of(10, 20, 30)
    limit = float(setting.split()[-2])
    assert played([(state, limit)]).find_exceeded(limits) == ""
    assert played([(state, limit + 1)]).find_exceeded(limits) == setting


def test_to_verify_the_data_is_no_part_of_the_start_however_long_it_takes():
    clock = played([(State.RENDEZVOUS, 15), (State.WORKING, 10_000), (State.RENDEZVOUS, 15)])
    assert not clock.find_exceeded(limits_of(10, 20, 20_000))
    assert clock.advance(State.RENDEZVOUS, clock.time + 6).find_exceeded(limits_of(10, 20, 20_000))


def test_a_start_that_storage_held_up_begins_anew():
    late = played([(State.WORKING, 7), (State.RENDEZVOUS, 25)])
    assert late.find_exceeded(limits_of(10, 20, 30)) and not late.reset_start().find_exceeded(limits_of(10, 20, 30))
    assert late.reset_start().training_seconds == 7


def test_the_end_of_a_start_is_no_late_start():
    """A look finds Training: what came before does not count any more, whatever time it took."""
    late = played([(State.RENDEZVOUS, 25)])
    assert late.find_exceeded(limits_of(10, 20, 30))
    assert not late.advance(State.WORKING, late.time).find_exceeded(limits_of(10, 20, 30))
