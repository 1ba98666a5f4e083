"""The ranks of a node as the supervisor sees them: processes below the agent, asked to stop or ended."""

from __future__ import annotations

import contextlib
import threading

import psutil

from kftrain.process.kept import KeptProcess
from kftrain.worker.watchdog import end_with_stacks

RETRY_SECONDS = 0.2
"""Between two looks for ranks that have not started yet when they are to stop."""


class Ranks:
    """Of one attempt. `ended`: set once the agent has reported how they ended; until then their ids are theirs."""

    def __init__(self, agent: KeptProcess, ended: threading.Event) -> None:
        self._agent = agent
        self._ended = ended
        self._asked: set[psutil.Process] = set()

    def ask_to_stop(self) -> None:
        """Sends SIGTERM to each rank once, so that it commits; to those that start later, as soon as they are there.

        Once: a second SIGTERM would reach a rank that has left its training loop, where it ends the process at once.
        Not to what a rank has forked: a data loader's worker would die of it, and take the rank along. Nor to the
        agent, without which nobody would wait for the ranks; only before it has started any is it ended itself, because
        nothing could be committed then.
        """
        pid = self._agent.pid
        if pid is None or self._ended.is_set():
            return
        ranks = [child for agent in _existing(pid) for child in _children(agent)]
        for process in ranks or ([] if self._asked else _existing(pid)):
            if process not in self._asked:
                self._asked.add(process)
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.terminate()
        # The agent may be between two forks, so it is looked again. A timer, not a loop: this runs in a signal handler.
        timer = threading.Timer(RETRY_SECONDS, self.ask_to_stop)
        timer.daemon = True
        timer.start()

    def end_with_stacks(self) -> None:
        """Kills the ranks and all that they have started, once they have written where they stand."""
        pid = self._agent.pid
        if pid is not None:
            end_with_stacks([child for agent in _existing(pid) for child in _children(agent, recursive=True)])


def _existing(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [psutil.Process(pid)]
    return []


def _children(process: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        found = process.children(recursive=recursive)
    return found
