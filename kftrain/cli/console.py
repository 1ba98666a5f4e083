"""What a person sees of a long command: a progress bar on a terminal, plain lines now and then elsewhere."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Iterator
from typing import Any, Protocol

from kftrain.cli.options import echo
from kftrain.core.printable import printable
from kftrain.core.progress import STEP

PLAIN_INTERVAL_SECONDS = 10.0
"""Between two step lines where there is no terminal; the last step is always shown."""


class Display(Protocol):
    """Takes lines of text and steps of training."""

    def line(self, text: str) -> None:
        """Shows a line for good."""

    def step(self, done: int, total: int, text: str) -> None:
        """Shows how far training is."""


class PlainDisplay:
    """Lines only: for logs and pipes."""

    def __init__(self, interval_seconds: float = PLAIN_INTERVAL_SECONDS) -> None:
        self._interval_seconds = interval_seconds
        self._next = float("-inf")

    def line(self, text: str) -> None:
        """Prints it."""
        echo(text, err=True)

    def step(self, done: int, total: int, text: str) -> None:
        """Prints it if the last one is long enough ago."""
        now = time.monotonic()
        if done >= total or now >= self._next:
            self.line(text)
            self._next = now + self._interval_seconds


class TerminalDisplay:
    """Lines above one bar, which is gone when training is."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._task: Any = None

    def line(self, text: str) -> None:
        """Prints it above the bar."""
        self._bar.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def step(self, done: int, total: int, text: str) -> None:
        """Moves the bar."""
        if self._task is None:
            self._task = self._bar.add_task("", total=total)
        self._bar.update(self._task, completed=done, total=total, description=text)
        if done >= total:
            self._bar.remove_task(self._task)
            self._task = None
            self.line(text)


@contextlib.contextmanager
def display() -> Iterator[Display]:
    """The display that fits where stderr goes."""
    if not sys.stderr.isatty():
        yield PlainDisplay()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), TextColumn("{task.description}", markup=False), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield TerminalDisplay(bar)


def show_step(shown: Display, line: str) -> bool:
    """Shows a worker's `step N/M …` line; False for any other line, which is not shown."""
    match = STEP.match(line.strip())
    if match is None:
        return False
    if " validation/" in line:  # few, and what the training is for: none is left out, and none is wiped away by the bar
        shown.line(_squeezed(line))
        return True
    shown.step(int(match.group(1)), int(match.group(2)), _squeezed(printable(line)))
    return True


def _squeezed(line: str) -> str:
    return re.sub(r"\s+", " ", line.strip())
