"""A process that does one task after another: what it has imported is there for the next.

What takes longest between a failure and the next step is reading torch. So a laptop's launcher keeps its worker, and a
worker the agent that has read torch. The process reads a line from its standard input for each task, the environment
of the task, and writes the exit code to a descriptor; the end of the input is the end of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

from kftrain.process.parent_death import die_with_parent

REPORT_ENV = "KFTRAIN_REPORT_DESCRIPTOR"
"""Descriptor on which a kept process says how a task has ended, and the process that keeps it."""


class Reporter:
    """The kept process's side. `kept` is False where nobody keeps it: then there is one task, at once.

    A kept one dies with the process that keeps it, whenever that dies.
    """

    def __init__(self) -> None:
        descriptor, _, keeper = os.environ.pop(REPORT_ENV, "").partition(",")
        self.kept = bool(descriptor)
        self._descriptor = int(descriptor) if descriptor else -1
        self._num_tasks = 0
        if self.kept:
            die_with_parent(int(keeper))
            os.set_inheritable(self._descriptor, False)

    def begin(self) -> bool:
        """Waits for a task; its environment is set by then. False where there will be none any more."""
        self._num_tasks += 1
        if not self.kept:
            return self._num_tasks == 1
        line = sys.stdin.readline()
        if line:
            os.environ.update(json.loads(line))
        return bool(line)

    def end(self, code: int) -> None:
        """Says how the task has ended."""
        if self.kept:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._descriptor, f"{code}\n".encode())

    def close(self) -> None:
        """In a fork, which is another process."""
        if self.kept:
            os.close(self._descriptor)


class KeptProcess:
    """A process that is kept, from outside."""

    def __init__(self, command: Sequence[str], new_session: bool = False) -> None:
        self._command = list(command)
        self._new_session = new_session
        self._process: subprocess.Popen[str] | None = None
        self._report: TextIO | None = None

    @property
    def pid(self) -> int | None:
        """Of the process; None while there is none."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def prepare(self, environment: Mapping[str, str]) -> None:
        """Starts the process, unless it is there: it imports what it needs, and waits for a task."""
        if self.pid is not None:
            return
        self.close()
        reading, writing = os.pipe()
        self._process = subprocess.Popen(
            self._command,
            env={**environment, REPORT_ENV: f"{writing},{os.getpid()}"},
            stdin=subprocess.PIPE,
            pass_fds=[writing],
            text=True,
            start_new_session=self._new_session,
        )
        os.close(writing)
        self._report = os.fdopen(reading)

    def start(self, environment: Mapping[str, str]) -> None:
        """Starts a task in this environment, in the process that is there already if one is."""
        self.prepare(environment)
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has just died: `wait` says how
            self._process.stdin.write(json.dumps(dict(environment)) + "\n")
            self._process.stdin.flush()

    def wait(self) -> int:
        """Returns how the task has ended: its exit code; -N where signal N has ended the process itself."""
        assert self._process is not None and self._report is not None
        line = self._report.readline()
        return int(line) if line else self._process.wait()

    def terminate(self) -> None:
        """Sends SIGTERM."""
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        """Sends SIGKILL."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Ends the process at once: between tasks it has nothing to lose."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None and self._report is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._report.close()
        self._process = None
