"""Shows a person how a long action goes: a progress bar on a terminal, plain lines now and then elsewhere."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Iterator
from typing import Any, Protocol

import click

from kftrain.core.printable import printable
from kftrain.core.progress import STEP, strip_mark

PLAIN_INTERVAL_SECONDS = 10.0
"""Seconds between two step lines where there is no terminal; the last step is always shown."""


def echo(text: str = "", err: bool = False, nl: bool = True) -> None:
    """Print a text, made printable: names, messages and errors in it may be other people's."""
    click.echo(printable(text), err=err, nl=nl)


class Display(Protocol):
    """Takes lines of text and steps of training."""

    def line(self, text: str) -> None:
        """Show a line for good."""

    def step(self, done: int, total: int, text: str) -> None:
        """Show how far training is."""


class PlainDisplay:
    """Lines only: for logs and pipes."""

    def __init__(self, interval_seconds: float = PLAIN_INTERVAL_SECONDS) -> None:
        self._interval_seconds = interval_seconds
        self._next = float("-inf")

    def line(self, text: str) -> None:
        """Print a line."""
        echo(text, err=True)

    def step(self, done: int, total: int, text: str) -> None:
        """Print a step if the last one is long enough ago, or if it is the final one."""
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
        """Print a line above the bar."""
        self._bar.console.print(printable(text), markup=False, highlight=False, soft_wrap=True)

    def step(self, done: int, total: int, text: str) -> None:
        """Move the bar; a final step removes it and stays as a line."""
        if self._task is None:
            self._task = self._bar.add_task("", total=total)
        self._bar.update(self._task, completed=done, total=total, description=text)
        if done >= total:
            self._bar.remove_task(self._task)
            self._task = None
            self.line(text)


@contextlib.contextmanager
def open_display() -> Iterator[Display]:
    """Open the display that fits where stderr goes."""
    if not sys.stderr.isatty():
        yield PlainDisplay()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), TextColumn("{task.description}", markup=False), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield TerminalDisplay(bar)


def show_output(display: Display, raw: str) -> None:
    """Show a line that a process has printed, if it is marked as ours; other programs share the output."""
    text = strip_mark(raw)
    if text is not None and not show_step(display, text):
        display.line(text)


def show_step(display: Display, line: str) -> bool:
    """Show a worker's `step N/M …` line; return False for any other line, which is not shown."""
    match = STEP.match(line.strip())
    if match is None:
        return False
    if " validation/" in line:  # few, and what the training is for: none is left out, and none is wiped away by the bar
        display.line(_squeeze_spaces(line))
        return True
    display.step(int(match.group(1)), int(match.group(2)), _squeeze_spaces(printable(line)))
    return True


def _squeeze_spaces(line: str) -> str:
    return re.sub(r"\s+", " ", line.strip())
