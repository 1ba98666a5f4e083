"""The local launcher: a job as processes of this machine, under the supervisor that worker pods have."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType

from kftrain.errors import FIRST_RETRYABLE_CODE
from kftrain.launch.spec import JobSpec
from kftrain.process.kept import KeptProcess
from kftrain.process.lifecycle import shell_code, stop_signals


class LocalLauncher:
    """Runs jobs in a child process. The child and all below it die with this process, however it dies.

    A child whose attempt may be followed by another is kept for it.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self._child: KeptProcess | None = None
        self._command: list[str] = []

    def prepare(self, spec: JobSpec) -> None:
        """See `Launcher.prepare`."""
        self._child_for(spec).prepare({**os.environ, **spec.environment})

    def run(self, spec: JobSpec) -> int:
        """See `Launcher.run`."""
        before = self._take_signals()
        try:
            child = self._child_for(spec)
            child.start({**os.environ, **spec.environment})
            if self.interrupted:
                child.terminate()
            code = shell_code(child.wait())
            if code < FIRST_RETRYABLE_CODE or self.interrupted:
                self.close()
            return code
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def close(self) -> None:
        """Ends the child that was kept."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def _child_for(self, spec: JobSpec) -> KeptProcess:
        command = [sys.executable, "-m", "kftrain", *spec.worker_arguments()]
        if self._child is None or command != self._command:
            self.close()
            # A session of its own: Ctrl-C on a terminal must reach the job once, through us, as SIGTERM.
            self._child, self._command = KeptProcess(command, new_session=True), command
        return self._child

    def _take_signals(self) -> dict[int, signal.Handlers]:
        """Handlers can be set in the main thread only; elsewhere whoever owns the process decides."""
        if threading.current_thread() is not threading.main_thread():
            return {}
        numbers = (signal.SIGINT, *stop_signals())
        return {number: signal.signal(number, self._on_signal) for number in numbers}  # type: ignore[misc]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = True
        if self._child is not None:
            self._child.terminate()
