"""A process that does one task after another, so that the next task finds imported what the last one needed.

Importing torch takes longest between a failure and the next step. So a laptop's launcher keeps its worker, and a worker
the agent that has imported torch. The process reads a line from its standard input for each task, the environment of
the task, and writes the exit code to a descriptor; where the input ends, the process ends.
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
"""Variable with the descriptor on which a kept process reports exit codes, a comma, and its keeper's process id."""


class Reporter:
    """The kept process's side. `is_kept` is False where nobody keeps it: then there is one task, at once.

    A kept one dies with the process that keeps it, whenever that dies.
    """

    def __init__(self) -> None:
        descriptor, _, keeper = os.environ.pop(REPORT_ENV, "").partition(",")
        self.is_kept = bool(descriptor)
        self._descriptor = int(descriptor) if descriptor else -1
        self._num_tasks = 0
        if self.is_kept:
            die_with_parent(int(keeper))
            os.set_inheritable(self._descriptor, False)

    def begin(self) -> bool:
        """Wait for a task and set its environment; False where no more tasks will come."""
        self._num_tasks += 1
        if not self.is_kept:
            return self._num_tasks == 1
        line = sys.stdin.readline()
        if line:
            os.environ.update(json.loads(line))
        return bool(line)

    def end(self, code: int) -> None:
        """Report the task's exit code; does nothing where nobody keeps the process."""
        if self.is_kept:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._descriptor, f"{code}\n".encode())

    def close(self) -> None:
        """Close the descriptor; a fork calls this, because it must not report in the place of its parent."""
        if self.is_kept:
            os.close(self._descriptor)


class KeptProcess:
    """The keeper's side: starts the process, gives it tasks, and ends it."""

    def __init__(self, command: Sequence[str], new_session: bool = False) -> None:
        self._command = list(command)
        self._new_session = new_session
        self._process: subprocess.Popen[str] | None = None
        self._report: TextIO | None = None

    @property
    def pid(self) -> int | None:
        """Process id; None while no process lives."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def prepare(self, environment: Mapping[str, str]) -> None:
        """Start the process, unless it is there: it imports what it needs, and waits for a task."""
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
        os.close(writing)  # only the process has it now: when it dies, `wait` reads the end instead of waiting for ever
        self._report = os.fdopen(reading)

    def start(self, environment: Mapping[str, str]) -> None:
        """Start a task in this environment, in the process that is there already if one is."""
        self.prepare(environment)
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has just died: `wait` says how
            self._process.stdin.write(json.dumps(dict(environment)) + "\n")
            self._process.stdin.flush()

    def wait(self) -> int:
        """Wait for the end of the task; return its exit code, or -N where signal N has ended the process itself."""
        assert self._process is not None and self._report is not None
        line = self._report.readline()
        return int(line) if line else self._process.wait()

    def terminate(self) -> None:
        """Send the process SIGTERM; does nothing where there was none."""
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        """Send the process SIGKILL; does nothing where there was none."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """End the process at once: between tasks it has nothing to lose."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None and self._report is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._report.close()
        self._process = None
