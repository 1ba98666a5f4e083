"""Work in a thread that nobody has to wait for: it may hang for ever, and the process ends all the same."""

from __future__ import annotations

import contextvars
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
Item = TypeVar("Item")


def start(work: Callable[[], T], name: str) -> Future[T]:
    """Run `work` in a daemon thread of that name; what it returns or raises is the future's."""
    future: Future[T] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return  # cancelled before; from here on nobody can cancel it, so that it can be set
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised again, in the thread that waits
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=name).start()
    return future


def call_together(work: Callable[[Item], T], items: Sequence[Item], max_threads: int) -> list[T]:
    """Return what `work` returns for each item, called by several threads in the context of the caller.

    Raises what the first of them raises, where some raise; the others go on.
    """
    if len(items) == 1:
        return [work(items[0])]
    answers: list[Future[T]] = [Future() for _ in items]
    numbers = iter(range(len(items)))

    def run() -> None:
        for number in numbers:
            try:
                answers[number].set_result(work(items[number]))
            except BaseException as error:  # noqa: BLE001 - it is raised again, in the thread that waits
                answers[number].set_exception(error)

    for _ in range(min(max_threads, len(items))):
        start(functools.partial(contextvars.copy_context().run, run), "together")
    return [answer.result() for answer in answers]
