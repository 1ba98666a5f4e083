"""A process that does one task after another: what it has imported is there for the next.

What takes longest between a failure and the next step is reading torch. So a laptop's launcher keeps its worker, and a
worker the agent that has read torch. The process writes the exit code of a task to a descriptor, and reads a line from
its standard input for each further one, with the environment variables that are that task's alone; the end of the input
is the end of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import TextIO

REPORT_ENV = "KFTRAIN_REPORT_DESCRIPTOR"
"""Descriptor on which a kept process says how a task has ended."""


class Reporter:
    """The kept process's side. `kept` is False where nobody keeps it: then the first task is the only one."""

    def __init__(self) -> None:
        descriptor = os.environ.pop(REPORT_ENV, "")
        self.kept = bool(descriptor)
        self._descriptor = int(descriptor) if descriptor else -1
        if self.kept:
            os.set_inheritable(self._descriptor, False)

    def next_task(self, code: int) -> bool:
        """Says how the task has ended; whether there is another one, whose environment is set by then."""
        if not self.kept:
            return False
        with contextlib.suppress(BrokenPipeError):
            os.write(self._descriptor, f"{code}\n".encode())
        line = sys.stdin.readline()
        if line:
            os.environ.update(json.loads(line))
        return bool(line)

    def close(self) -> None:
        """In a fork, which is another process."""
        if self.kept:
            os.close(self._descriptor)


class KeptProcess:
    """A process that is kept, from outside."""

    def __init__(self, command: Sequence[str], new_session: bool = False) -> None:
        self._command, self._new_session = list(command), new_session
        self._process: subprocess.Popen[str] | None = None
        self._report: TextIO | None = None

    @property
    def pid(self) -> int | None:
        """Of the process; None while there is none."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self, inherited: Mapping[str, str], environment: Mapping[str, str]) -> None:
        """Starts a task, in the process that did the one before if it is still there.

        Args:
            inherited: The environment of the process.
            environment: What is this task's alone.
        """
        if self.pid is not None and self._sent(json.dumps(dict(environment))):
            return
        self.close()
        reading, writing = os.pipe()
        self._process = subprocess.Popen(
            self._command,
            env={**inherited, **environment, REPORT_ENV: str(writing)},
            stdin=subprocess.PIPE,
            pass_fds=[writing],
            text=True,
            start_new_session=self._new_session,
        )
        os.close(writing)
        self._report = os.fdopen(reading)

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

    def _sent(self, line: str) -> bool:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:  # it has just died
            return False
        return True
