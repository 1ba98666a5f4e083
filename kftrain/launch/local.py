"""The local launcher: a job as torchrun processes of this machine, under the supervisor that worker pods have."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from types import FrameType

from kftrain.launch.spec import JobSpec
from kftrain.processes import shell_code, stop_signals


class LocalLauncher:
    """Runs jobs in a child process. The child and all below it die with this process, however it dies."""

    def __init__(self) -> None:
        self.interrupted = False
        self._child: subprocess.Popen[bytes] | None = None

    def run(self, spec: JobSpec) -> int:
        """See `Launcher.run`."""
        command = [sys.executable, "-m", "kftrain", *spec.worker_arguments()]
        before = self._take_signals()
        try:
            # A session of its own: Ctrl-C on a terminal must reach the job once, through us, as SIGTERM.
            self._child = subprocess.Popen(command, env={**os.environ, **spec.environment}, start_new_session=True)
            if self.interrupted:
                self._child.terminate()
            return shell_code(self._child.wait())
        finally:
            self._child = None
            for number, handler in before.items():
                signal.signal(number, handler)

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
