"""Who answers a signal within a block, after it, and where nobody may."""

import os
import signal
import threading

import pytest

from kftrain.process.signals import HANGUP, INTERRUPT, STOP, handle_signals, to_shell_code


@pytest.fixture(autouse=True)
def unchanged():
    """Other tests find the handlers that this one found."""
    before = {number: signal.getsignal(number) for number in (INTERRUPT, *STOP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in a shell's background it would be ignored
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number):
    os.kill(os.getpid(), number)


def test_signals_are_answered_in_the_block_and_by_whom_they_were_before_afterwards():
    seen, outside = [], []
    signal.signal(signal.SIGTERM, lambda number, _: outside.append(number))
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would be ignored
    with handle_signals((INTERRUPT, *STOP), lambda number, _: seen.append(number)):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            send(number)
    send(signal.SIGTERM)
    assert (seen, outside) == ([15, 2, 1], [15])
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)


def test_a_handler_that_raises_ends_the_block_and_is_gone():
    class StoppedError(Exception):
        pass

    def stop(number, frame):
        raise StoppedError

    before = [signal.getsignal(number) for number in STOP]
    with pytest.raises(StoppedError), handle_signals(STOP, stop):
        send(signal.SIGTERM)
    assert [signal.getsignal(number) for number in STOP] == before


def test_a_hangup_that_nohup_shields_from_stays_ignored():
    signal.signal(HANGUP, signal.SIG_IGN)
    with handle_signals((INTERRUPT, *STOP), lambda *_: None):
        assert signal.getsignal(HANGUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert signal.getsignal(HANGUP) is signal.SIG_IGN


def test_in_another_thread_the_block_runs_and_no_handler_is_set():
    found = []

    def block():
        with handle_signals(STOP, lambda *_: None):
            found.extend(signal.getsignal(number) for number in STOP)

    before = [signal.getsignal(number) for number in STOP]
    thread = threading.Thread(target=block)
    thread.start()
    thread.join()
    assert found == before


def test_a_signal_that_is_ignored_in_a_block_is_heard_again_after_it():
    with handle_signals([INTERRUPT], signal.SIG_IGN):
        send(INTERRUPT)
    with pytest.raises(KeyboardInterrupt):
        send(INTERRUPT)


@pytest.mark.parametrize(("returncode", "code"), [(0, 0), (17, 17), (-9, 137), (-15, 143)])
def test_a_return_code_as_a_shell_shows_it(returncode, code):
    assert to_shell_code(returncode) == code
