"""The restart budget: attempts in a row without a new checkpoint, counted from claims and from how workers end."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain.core import storage
from kftrain.run import attempts, commit
from kftrain.run.budget import RestartBudget, Standing, WorkerEnd, read_standing
from kftrain.run.paths import RunPaths

LOST = 138


@settings(derandomize=True, deadline=None)
@given(st.integers(0, 3), st.lists(st.booleans(), max_size=12))
def test_without_outages_it_is_spent_by_as_many_failures_in_a_row_as_may_be_and_one(limit, commits):
    """`commits`: whether each attempt committed before it failed. One worker, every attempt claims."""
    budget, in_a_row = RestartBudget(limit), 0
    for number, committed in enumerate(commits, start=1):
        step = sum(commits[:number])
        budget = budget.advance(Standing(step, number, 0), [WorkerEnd(0, LOST)])
        in_a_row = 0 if committed else in_a_row + 1
        assert (budget.num_failed, budget.is_spent) == (in_a_row, in_a_row > limit)


def test_attempts_that_fail_before_their_claim_count():
    budget = RestartBudget(1)
    for _ in range(2):
        budget = budget.advance(Standing(0, 0, 0), [WorkerEnd(0, LOST)])
    assert budget.is_spent


def test_attempts_of_which_only_claims_are_left_count_but_for_the_one_that_runs():
    assert RestartBudget(2).advance(Standing(0, 4, 4), []).num_failed == 3


def test_the_workers_of_one_attempt_are_one_failure():
    budget = RestartBudget(1).advance(Standing(0, 1, 1), [WorkerEnd(n, LOST) for n in range(8)])
    assert budget.num_failed == 1 and not budget.is_spent


def test_who_was_excused_has_not_failed_nor_has_the_claim_that_goes_with_it():
    budget = RestartBudget(0)
    for number in range(1, 6):
        budget = budget.advance(Standing(0, number, number), [WorkerEnd(0, LOST, is_excused=True)])
        assert not budget.is_spent
    assert budget.advance(Standing(0, 6, 6), [WorkerEnd(0, LOST)]).is_spent


def test_a_failure_forgives_no_claim():
    """The launcher saw the last of three attempts only."""
    assert RestartBudget(2).advance(Standing(0, 3, 3), [WorkerEnd(0, LOST)]).num_failed == 2


def test_the_workers_that_one_outage_took_forgive_one_claim():
    ends = [WorkerEnd(n, LOST, is_excused=True) for n in range(2)]
    assert RestartBudget(2).advance(Standing(0, 4, 4), ends).num_failed == 2


def test_a_worker_that_ended_twice_between_two_looks_has_failed_twice():
    assert RestartBudget(2).advance(Standing(0, 1, 1), [WorkerEnd(0, LOST)] * 2 + [WorkerEnd(1, LOST)]).num_failed == 2


def test_permanent_errors_are_not_counted_for_they_end_the_job():
    assert RestartBudget(0).advance(Standing(0, 1, 1), [WorkerEnd(0, 11), WorkerEnd(1, None)]).num_failed == 0


def test_a_new_checkpoint_starts_the_count_anew():
    budget = RestartBudget(0).advance(Standing(0, 3, 1), [WorkerEnd(0, LOST)])
    assert budget.is_spent
    later = budget.advance(Standing(5, 4, 4), [WorkerEnd(0, LOST)])
    assert (later.num_failed, later.step, later.first_attempt) == (0, 5, 4)


def test_what_a_folder_says(tmp_path):
    paths = RunPaths.of(str(tmp_path), "r")
    assert read_standing(paths, since=0) == Standing(0, 0, 0)
    for step in (0, 5, 5):
        attempts.claim_run(paths, step, 2)
    assert read_standing(paths, since=0) == Standing(0, 3, 2)
    assert read_standing(paths, since=2) == Standing(0, 3, 1)
    storage.publish(storage.join(paths.checkpoints, str(commit.CheckpointName(7, 3)), commit.COMMITTED), "")
    assert read_standing(paths, since=2) == Standing(7, 3, 1)
