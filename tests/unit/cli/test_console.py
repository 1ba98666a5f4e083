from kftrain.cli.console import PlainDisplay, TerminalDisplay, show_step
from kftrain.progress import PREFIX, to_log, unmarked


class Recorded:
    def __init__(self):
        self.lines, self.steps = [], []

    def line(self, text):
        self.lines.append(text)

    def step(self, done, total, text):
        self.steps.append((done, total, text))


class FakeBar:
    def __init__(self):
        self.console, self.tasks, self.printed = self, {}, []

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
    assert unmarked("    " + written) == "shards written"
    assert unmarked("shards written") is None
    assert written.startswith(PREFIX)
