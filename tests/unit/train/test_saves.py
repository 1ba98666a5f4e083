"""Checkpoints that cannot be written cost nothing until too many in a row have failed."""

import pytest

from kftrain.checkpoint.settings import CheckpointConfig
from kftrain.errors import FencedError, RetryableError
from kftrain.train.saves import Saves

FULL = RetryableError("the checkpoint could not be written: No space left on device", where="s")


class Writer:
    """Saves end as they are told to: with an error, or committed."""

    def __init__(self, *endings):
        self._endings = list(endings)
        self.step = None
        self.committed_step = 0
        self.busy = False
        self.overdue = False

    def save(self, state, history, step, samples_consumed):
        assert self.step is None and samples_consumed == 4 * step
        self.step = step

    def wait(self):
        if self.step is None:
            return
        ending = self._endings.pop(0) if self._endings else None
        step, self.step = self.step, None
        if ending is not None:
            raise ending
        self.committed_step = step

    def overdue_error(self):
        return RetryableError("was not written within 1 s")


def saves_of(writer, max_failed=3, **options):
    return Saves(writer, CheckpointConfig(max_failed_saves=max_failed, **options), lambda step: 4 * step, tells=True)


def save(saves, step):
    saves.go_on(busy=False, overdue=False)
    saves.save({}, [], step)


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("max_failed", [0, 1, 3])
def test_fault_48_training_goes_on_for_so_many_failed_saves_and_then_ends_retryably(capsys, max_failed, asynchronous):
    saves = saves_of(Writer(*[FULL] * 9), max_failed, asynchronous=asynchronous)
    with pytest.raises(RetryableError, match="No space left") as caught:
        for step in range(1, 9):
            save(saves, step)
    assert caught.value.exit_code == 138
    lines = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert len(lines) == max_failed
    for number, line in enumerate(lines, start=1):
        assert f"no checkpoint at step {number} ({number} failed in a row, {max_failed} may)" in line
        assert "No space left on device" in line


def test_a_failed_save_is_told_at_the_next_step_and_not_an_interval_later(capsys):
    saves = saves_of(Writer(FULL))
    save(saves, 100)
    assert "warning" not in capsys.readouterr().out
    saves.go_on(busy=True, overdue=False)
    assert capsys.readouterr().out == ""
    saves.go_on(busy=False, overdue=False)
    assert "warning: no checkpoint at step 100" in capsys.readouterr().out


def test_a_commit_begins_the_count_anew_and_is_told(capsys):
    writer = Writer(FULL, FULL, None, FULL, FULL, None)
    saves = saves_of(writer, max_failed=2)
    for step in range(1, 8):
        save(saves, step)
    saves.go_on(busy=False, overdue=False)
    out = capsys.readouterr().out
    assert "checkpoint at step 3 committed" in out and "checkpoint at step 6 committed" in out
    assert writer.committed_step == 7


def test_the_last_save_must_succeed_whatever_the_one_before_did():
    saves = saves_of(Writer(FULL, None))
    save(saves, 1)
    assert saves.settle() == 0
    saves.finish({}, [], 2)
    assert saves.settle() == 2
    with pytest.raises(RetryableError):
        saves_of(Writer(FULL)).finish({}, [], 2)


def test_fault_49_a_slow_save_is_told_at_each_interval_and_ends_the_attempt_retryably_by_its_time(capsys):
    writer = Writer()
    saves = saves_of(writer)
    save(saves, 1)
    for step in (2, 3):
        saves.go_on(busy=True, overdue=False)
        saves.skip(step)
        assert writer.step == 1, "one in flight, which is not waited for"
        assert capsys.readouterr().out.endswith(
            f"warning: checkpoint at step {step} skipped: the one before is still being written\n"
        )
    with pytest.raises(RetryableError, match="not written within"):
        saves.go_on(busy=True, overdue=True)


def test_a_save_that_hangs_is_not_one_that_has_failed():
    class Hanging(Writer):
        def wait(self):
            raise self.overdue_error()

    saves = saves_of(Hanging())
    save(saves, 1)
    with pytest.raises(RetryableError, match="not written within"):
        saves.settle()


@pytest.mark.parametrize("error", [FencedError("a newer attempt holds this run"), AssertionError("a bug")])
def test_what_is_not_the_storages_fault_ends_the_attempt_at_once(error):
    saves = saves_of(Writer(error))
    save(saves, 1)
    with pytest.raises(type(error)):
        saves.go_on(busy=False, overdue=False)
