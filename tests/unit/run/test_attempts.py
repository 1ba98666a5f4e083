"""Attempts: claims are numbered without gaps, whoever is overtaken is fenced, and no progress is told from claims."""

import itertools
import os
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain.core import storage
from kftrain.errors import FencedError
from kftrain.run import attempts, documents
from kftrain.run.paths import RunPaths


@pytest.fixture
def paths(tmp_path):
    return RunPaths.of(str(tmp_path), "r")


def claims_of(paths):
    """Names of the claims that lie in the folder, by the store's own listing."""
    return sorted(storage.list_names(storage.join(paths.uri, "attempts")))


def test_a_claim_says_who_took_the_run_where_it_began_and_is_like_no_other(paths):
    assert [attempts.claim_run(paths, step, 3) for step in (0, 7)] == [1, 2]
    first, second = (documents.read(attempts.Claim, paths.attempt(number)) for number in (1, 2))
    assert (first.attempt, first.start_step, first.world_size) == (1, 0, 3)
    assert (second.attempt, second.start_step, second.process_id) == (2, 7, os.getpid())
    assert second.host == socket.gethostname() and second.start_time >= first.start_time > 1e9
    assert first.token and second.token and first.token != second.token


def test_who_loses_the_race_for_a_number_takes_the_next_and_overwrites_nothing(paths, monkeypatch):
    """Each sees a folder without claims, as processes do that look at the same moment."""
    monkeypatch.setattr(attempts, "find_last_attempt", lambda paths: 0)
    assert [attempts.claim_run(paths, step, 2) for step in (5, 6, 7)] == [1, 2, 3]
    assert claims_of(paths) == ["1.json", "2.json", "3.json"]
    assert [documents.read(attempts.Claim, paths.attempt(n)).start_step for n in (1, 2, 3)] == [5, 6, 7]


def test_the_highest_number_counts_not_the_last_name_and_other_files_do_not(paths):
    assert attempts.find_last_attempt(paths) == 0
    for number in (9, 10, 2):
        storage.create_json(paths.attempt(number), {})
    storage.create_json(storage.join(paths.attempts, "notes.json"), {})
    assert attempts.find_last_attempt(paths) == 10


def test_only_the_newest_attempt_holds_the_run(paths):
    attempts.claim_run(paths, 0, 2)
    attempts.require_held(paths, 1)
    for _ in range(2):
        attempts.claim_run(paths, 0, 2)
    attempts.require_held(paths, 3)
    for fenced in (1, 2):
        with pytest.raises(FencedError, match=f"attempt {fenced}, the newest is 3"):
            attempts.require_held(paths, fenced)


def test_the_step_of_the_newest_claim_and_that_there_is_none(paths):
    assert attempts.read_last_start_step(paths) == -1
    for step in (0, 40):
        attempts.claim_run(paths, step, 2)
        assert attempts.read_last_start_step(paths) == step


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 2), max_size=5), st.integers(0, 5))
def test_attempts_without_progress_are_the_newest_that_began_at_one_step(tmp_path_factory, increments, since):
    """The oracle groups the steps; of attempts up to `since` nothing is known."""
    paths = RunPaths.of(str(tmp_path_factory.mktemp("claims")), "r")
    steps = list(itertools.accumulate(increments))
    for step in steps:
        attempts.claim_run(paths, step, 1)
    runs = [len(list(alike)) for _, alike in itertools.groupby(steps[since:])]
    assert attempts.count_without_progress(paths, since) == (runs[-1] if runs else 0)
