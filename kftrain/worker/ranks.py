"""The ranks of a node as the supervisor sees them: processes below the agent, asked to stop or ended."""

from __future__ import annotations

import contextlib
import threading

import psutil

from kftrain.process.kept import KeptProcess
from kftrain.worker.watchdog import end_with_stacks

RETRY_SECONDS = 0.2
"""Seconds between two looks for ranks that start after they were asked to stop."""


class Ranks:
    """The ranks of one attempt. `ended` is set once the agent has reported their end: their ids may be others' then."""

    def __init__(self, agent: KeptProcess, ended: threading.Event) -> None:
        self._agent = agent
        self._ended = ended
        self._asked: set[psutil.Process] = set()

    def ask_to_stop(self) -> None:
        """Send SIGTERM to each rank once, so that it commits; to those that start later, as soon as they are there.

        Once, because a second SIGTERM would reach a rank that has left its training loop, where it ends the process at
        once. Children of a rank get none: a data loader's worker would die of it and take the rank along. The agent
        gets none either, as nobody else would wait for the ranks; it is ended only before it has started any, because
        there is nothing to commit then.
        """
        pid = self._agent.pid
        if pid is None or self._ended.is_set():
            return
        ranks = [child for agent in _find_process(pid) for child in _list_children(agent)]
        for process in ranks or ([] if self._asked else _find_process(pid)):
            if process not in self._asked:
                self._asked.add(process)
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.terminate()
        # The agent may be between two forks, so it is looked again. A timer, not a loop: this runs in a signal handler.
        timer = threading.Timer(RETRY_SECONDS, self.ask_to_stop)
        timer.daemon = True
        timer.start()

    def end_with_stacks(self) -> None:
        """Kill the ranks and all processes below them, once they have written their stacks."""
        pid = self._agent.pid
        if pid is not None:
            end_with_stacks([child for agent in _find_process(pid) for child in _list_children(agent, recursive=True)])


def _find_process(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [psutil.Process(pid)]
    return []


def _list_children(process: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
    children: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        children = process.children(recursive=recursive)
    return children
