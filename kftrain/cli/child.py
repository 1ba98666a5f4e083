"""The pipeline's process as `kftrain run` sees it: a stream of lines, signals in, an exit code out.

It leads a session of its own, so that Ctrl-C on the terminal reaches only us, and we decide: the first signal becomes
SIGTERM for everybody (training commits a checkpoint), the second one SIGKILL. When it has ended nothing of it is left.
A terminal that is closed counts as a signal, and so does an output that nobody reads any more.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

from kftrain.process.signals import HANGUP, INTERRUPT, STOP, handled
from kftrain.process.stage_lifetime import PARENT_VARIABLE

SIGNAL_CODE = 128
"""A program that a signal ended exits with this plus the signal's number."""

STOPPING = b"stopping: training commits a checkpoint first; a second signal kills everything here\n"

STOP_SECONDS = 330.0
"""After an error of ours: as long as a launcher waits for the pods of a job that it has deleted, and a little more."""


class PipelineProcess:
    """One run of the pipeline through the local runner."""

    def __init__(
        self, spec: str | Path, arguments: Path, root: Path, workdir: Path, environment: Mapping[str, str]
    ) -> None:
        """`environment` comes over that of this process, which stays as it is."""
        self._signal = 0
        self.killed = False
        """Whether a second signal has killed it: what it had launched elsewhere may still be there."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kftrain.cli.runner", str(spec), str(arguments), str(root)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=workdir,
            env={**os.environ, **environment, "PYTHONUNBUFFERED": "1", PARENT_VARIABLE: str(os.getpid())},
            start_new_session=True,
        )

    @property
    def stop_code(self) -> int:
        """The exit code that tells which signal stopped us; 0: none did."""
        return SIGNAL_CODE + self._signal if self._signal else 0

    def follow(self, on_line: Callable[[str], None]) -> int:
        """Hands over every line of output, newline included, until the pipeline ends. Returns its exit code."""
        assert self._process.stdout is not None
        with handled((INTERRUPT, *STOP), self._stop):
            try:
                for line in self._process.stdout:
                    on_line(line)
                return self._process.wait()
            finally:
                self._end()

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        if self._signal and number == HANGUP:  # a terminal that is closed says so twice: by its shell, by the kernel
            return
        if not self._signal:
            with contextlib.suppress(OSError):  # the terminal is gone
                os.write(2, STOPPING)  # not print: whatever is being printed was interrupted by this very handler
        self.killed = bool(self._signal)
        self._send(signal.SIGKILL if self.killed else signal.SIGTERM)
        self._signal = self._signal or number

    def _end(self) -> None:
        """Leaves nothing running. A pipeline that still runs, because a line could not be shown, is asked first."""
        assert self._process.stdout is not None
        if self._process.poll() is None:
            self._send(signal.SIGTERM)
            limit = threading.Timer(STOP_SECONDS, self._send, [signal.SIGKILL])
            limit.start()
            for _line in self._process.stdout:  # until it has ended: it may have much to say
                pass
            limit.cancel()
        self._send(signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()

    def _send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
