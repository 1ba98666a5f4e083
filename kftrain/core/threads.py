"""Work in a thread that nobody has to wait for: it may hang for ever, and the process ends all the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def start(work: Callable[[], T], name: str) -> Future[T]:
    """Run `work` in a daemon thread of that name; what it returns or raises is the future's."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is raised again, in the thread that waits
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=name).start()
    return future
