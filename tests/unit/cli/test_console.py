import contextlib
import os

import pytest

from kftrain.client.console import PlainDisplay, TerminalDisplay, show_step
from kftrain.core import progress
from kftrain.core.printable import printable
from kftrain.core.progress import PREFIX, strip_mark, to_log
from kftrain.errors import KftrainError
from kftrain.process.output import Console


class Recorded:
    def __init__(self):
        self.lines = []
        self.steps = []

    def line(self, text):
        self.lines.append(text)

    def step(self, done, total, text):
        self.steps.append((done, total, text))


class FakeBar:
    def __init__(self):
        self.console = self
        self.tasks = {}
        self.printed = []

    def add_task(self, description, total):
        self.tasks[1] = (0, total)
        return 1

    def update(self, task, completed, total, description):
        self.tasks[task] = (completed, total)

    def remove_task(self, task):
        del self.tasks[task]

    def print(self, text, **options):
        self.printed.append(text)


def test_a_workers_step_line_drives_the_bar_and_no_other_line_does():
    shown = Recorded()
    assert show_step(shown, "    step 100/400 loss 1.234 | 80 samples/s\n")
    assert shown.steps == [(100, 400, "step 100/400 loss 1.234 | 80 samples/s")]
    for line in ("a step 1/2", "step one", "", "step 3/", "stepping 1/2"):
        assert not show_step(shown, line)
    assert len(shown.steps) == 1


def test_every_validation_is_a_line_that_stays():
    """Six of them came within the interval between two lines, and one was shown."""
    shown = Recorded()
    for step in range(1, 7):
        assert show_step(shown, f"    step {step}/6 validation/loss 0.5  validation/mae 1\n")
    assert shown.lines[-1] == "step 6/6 validation/loss 0.5 validation/mae 1"
    assert len(shown.lines) == 6 and not shown.steps


def test_without_a_terminal_the_first_and_the_last_step_are_shown_and_few_between(capfd):
    shown = PlainDisplay(interval_seconds=3600)
    for step in range(1, 101):
        shown.step(step, 100, f"step {step}/100")
    assert capfd.readouterr().err.split("\n") == ["step 1/100", "step 100/100", ""]


def test_on_a_terminal_the_bar_goes_when_training_is_done():
    bar = FakeBar()
    shown = TerminalDisplay(bar)
    shown.step(1, 2, "step 1/2")
    shown.line("a line")
    assert bar.tasks == {1: (1, 2)}
    shown.step(2, 2, "step 2/2")
    assert bar.tasks == {} and bar.printed == ["a line", "step 2/2"]
    shown.step(1, 5, "step 1/5")
    assert bar.tasks == {1: (1, 5)}


def test_a_marked_line_is_found_again_however_it_was_indented(capfd):
    to_log("shards written")
    written = capfd.readouterr().out
    assert strip_mark("    " + written) == "shards written"
    assert strip_mark("shards written") is None
    assert written.startswith(PREFIX)


FOREIGN = {
    "\x1b[31mred\x1b[0m": "red",
    "\x1b]0;title\x07text": "text",
    "\x1b]8;;http://evil\x1b\\\\link\x1b]8;;\x1b\\\\": "link",
    "\x1b]52;c;aGk=\x07clipboard": "clipboard",
    "\x9b2Jcleared": "cleared",
    "\x1bcreset": "reset",
    "a\rb\x08\x00": "a\ufffdb\ufffd\ufffd",
    "\u202eright to left\ud800": "\ufffdright to left\ufffd",
    "tab\tnewline\nß": "tab\tnewline\nß",
    "\x1b]never ends": "",
}


@pytest.mark.parametrize("text", FOREIGN)
def test_foreign_text_cannot_steer_a_terminal(text, capfd):
    PlainDisplay().line(text)
    assert capfd.readouterr().err == FOREIGN[text] + "\n"
    bar, told = FakeBar(), Recorded()
    TerminalDisplay(bar).line(text)
    assert bar.printed == [FOREIGN[text]]
    show_step(told, "step 1/2 " + text)
    assert all(character.isprintable() for _, _, shown in told.steps for character in shown.replace("\ufffd", "?"))
    assert printable(KftrainError(text).line) == KftrainError(text).line == " ".join(FOREIGN[text].split())
    found = []
    Console(found.extend, None).show([text])
    assert found == [FOREIGN[text]]


def test_a_console_that_nobody_reads_costs_lines_and_not_the_launcher(monkeypatch):
    """Standard output is a full pipe."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    monkeypatch.setattr(progress, "_console_seconds", 0.05)
    monkeypatch.setattr(progress, "CONSOLE_SECONDS", 0.05)
    with open(writing, "w") as halted:
        monkeypatch.setattr(progress.sys, "stdout", halted)
        for _ in range(100):
            to_log("a line that nobody reads")
        os.set_blocking(reading, False)
        with contextlib.suppress(BlockingIOError):
            while set(os.read(reading, 4096)) == {ord("x")}:
                pass
        to_log("read again")
        monkeypatch.undo()
    assert os.read(reading, 1 << 16) == b"kftrain| read again\n"
    os.close(reading)
