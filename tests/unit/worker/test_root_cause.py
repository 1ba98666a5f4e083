import pytest

from kftrain.errors import ConfigError, HangError, LauncherGoneError, LostPeerError, Preempted, RetryableError
from kftrain.run.error import ErrorDocument
from kftrain.worker import root_cause
from kftrain.worker.node import NodeSpec
from kftrain.worker.root_cause import (
    LOST_PEER,
    Failure,
    Stop,
    describe_silent_end,
    explain_silent_launcher,
    explain_stop,
    find_cause,
    judge_node,
    may_be_complete,
    outranks,
)

LOST = ErrorDocument.of(LostPeerError(f"{LOST_PEER}: Connection closed by peer"))
WRONG = ErrorDocument.of(ConfigError("wrong"))
PREEMPTED = ErrorDocument.of(Preempted("stopped at step 3 of 9"))
UNWRITTEN = ErrorDocument.of(RetryableError("the checkpoint could not be written: no space"))


def test_a_process_without_a_word_is_named_by_rank_and_signal():
    found = describe_silent_end(-9, 3)
    assert (found.kind, found.exit_code, found.rank) == ("", 137, 3)
    assert found.line == "rank 3 ended by SIGKILL without a word"
    assert describe_silent_end(7, 0).line == "rank 0 ended by exit code 7 without a word"
    assert describe_silent_end(140).line == "the agent ended by exit code 140 without a word"
    assert describe_silent_end(-33).line == "the agent ended by signal 33 without a word"
    assert describe_silent_end(-9).rank is None


@pytest.mark.parametrize(
    ("failures", "left", "rank", "line"),
    [
        # One was killed; its peer noticed within the same tenth of a second, and comes first by its number.
        ([Failure(0, 138, 50), Failure(1, -9, 50)], LOST, 1, "rank 1 ended by SIGKILL without a word"),
        ([Failure(4, -11, 50), Failure(5, 138, 51)], LOST, 4, "rank 4 ended by SIGSEGV without a word"),
        ([Failure(0, -9, 50)], None, 0, "rank 0 ended by SIGKILL without a word"),
        ([Failure(1, 3, 50), Failure(0, -15, 51)], None, 1, "rank 1 ended by exit code 3 without a word"),
        ([Failure(0, -15, 50), Failure(1, -9, 51)], None, 1, "rank 1 ended by SIGKILL without a word"),
        # the agent killed the others 30 s later: they are no cause.
        ([Failure(0, 138, 50), Failure(1, -9, 80)], LOST, 0, None),
        ([Failure(0, 138, 50), Failure(1, -15, 50)], LOST, 0, None),
        # One that said why it failed is the cause, whatever became of the others.
        ([Failure(1, 10, 50), Failure(0, -6, 50)], WRONG, 1, None),
        ([Failure(0, 143, 50), Failure(1, -9, 51)], PREEMPTED, 0, None),
    ],
)
def test_the_cause_is_who_was_killed_unless_somebody_said_more(failures, left, rank, line):
    found, document = find_cause(failures, left)
    assert found.rank == rank
    assert (document and document.line) == line


@pytest.mark.parametrize("ended", [PREEMPTED, LOST, describe_silent_end(-15)])
def test_a_node_that_was_stopped_for_its_silent_launcher_ends_for_good(ended):
    document = explain_silent_launcher(ended, 1800.0, killed=False)
    assert (document.kind, document.exit_code) == ("LauncherGoneError", LauncherGoneError.exit_code)
    assert "silent for 1800 s; stopped after a commit" in document.line


@pytest.mark.parametrize("ended", [WRONG, UNWRITTEN, ErrorDocument.of(HangError("hung")), describe_silent_end(-9, 1)])
def test_an_error_that_has_nothing_to_do_with_the_stop_wins(ended):
    assert explain_silent_launcher(ended, 1800.0, killed=False) == ended
    assert explain_stop(ended, "train") == ended


def test_a_node_that_had_to_be_killed_for_its_silent_launcher_ends_for_good_too():
    document = explain_silent_launcher(describe_silent_end(-9), 1800.0, killed=True)
    assert document.exit_code == 18 and "did not stop and were killed" in document.line


def test_a_node_that_was_stopped_before_it_could_say_so_is_preempted():
    assert explain_stop(PREEMPTED, "train") == PREEMPTED
    assert explain_stop(describe_silent_end(-15, 1), "train").kind == "Preempted"
    assert "training is complete" in explain_stop(describe_silent_end(-15, 1), "evaluate").line
    assert explain_stop(LOST, "train") == LOST


@pytest.mark.parametrize(
    ("document", "published", "wins"),
    [
        (WRONG, LOST, True),
        (describe_silent_end(-9, 1), LOST, True),
        (UNWRITTEN, LOST, True),
        (LOST, LOST, False),
        (LOST, describe_silent_end(-9, 1), False),
        (ErrorDocument.of(LauncherGoneError("gone")), PREEMPTED, True),
        (PREEMPTED, UNWRITTEN, False),
        (PREEMPTED, ErrorDocument.of(LauncherGoneError("gone")), False),
        (ErrorDocument.of(ConfigError("second")), WRONG, False),
    ],
)
def test_the_first_failing_node_wins_unless_it_was_no_cause(document, published, wins):
    assert outranks(document, published) is wins


def test_the_launchers_own_line_about_a_lost_peer_is_recognised_after_a_round_trip():
    assert root_cause.is_lost_peer(ErrorDocument.salvage({**LOST.to_dict(), "rank": 3, "node": "n"}))
    assert not root_cause.is_lost_peer(ErrorDocument(exit_code=137, line="x"))


def node(number):
    return NodeSpec("train", "uri", "digest", processes=2, nodes=2, node_rank=number)


@pytest.mark.parametrize(
    ("error", "stop", "may"),
    [
        (None, Stop(), True),
        (PREEMPTED, Stop(), True),
        (describe_silent_end(-15), Stop(asked=True), True),
        (describe_silent_end(-9), Stop(asked=True, silent_seconds=9.0, killed=True), True),
        (describe_silent_end(-9), Stop(asked=True), False),
        (WRONG, Stop(), False),
    ],
)
def test_who_failed_by_itself_has_completed_nothing(error, stop, may):
    assert may_be_complete(error, stop) is may


def test_only_the_first_node_has_to_prove_that_the_job_is_complete():
    document = judge_node(None, Stop(), node(0))
    assert document.exit_code == 138 and "ended with 0, but the job is not complete" in document.line
    assert judge_node(None, Stop(), node(1)) is None


def test_why_a_node_was_stopped_is_its_error_and_a_silent_launcher_goes_before_a_signal():
    assert judge_node(describe_silent_end(-15), Stop(), node(0)) == describe_silent_end(-15)
    assert judge_node(describe_silent_end(-15), Stop(asked=True), node(0)).kind == "Preempted"
    assert (
        judge_node(describe_silent_end(-15), Stop(asked=True, silent_seconds=9.0), node(0)).kind == "LauncherGoneError"
    )
    assert judge_node(WRONG, Stop(asked=True), node(1)) == WRONG
