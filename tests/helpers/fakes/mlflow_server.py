"""A real `mlflow server` process for tests."""

import os
import signal
import subprocess
import sys
import time

from helpers import ports

from kftrain.errors import TrackingError
from kftrain.tracking import endpoint

START_SECONDS = 200


class Server:
    """An MLflow server on a port of its own, with all its child processes; may be stopped and started again."""

    def __init__(self, folder, host="127.0.0.1", listen="127.0.0.1"):
        self._held = ports.Held(listen)
        self._port = self._held.number
        self._folder = folder
        self._listen = listen
        self._process = None
        self.uri = f"http://{host}:{self._port}"

    def start(self):
        """Returns when it answers."""
        command = [sys.executable, "-m", "mlflow", "server", "--workers", "1"]
        command += ["--backend-store-uri", f"sqlite:///{self._folder}/server.db"]
        command += ["--artifacts-destination", f"{self._folder}/artifacts"]
        command += ["--host", self._listen, "--port", str(self._port), "--allowed-hosts", "*"]
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                start_new_session=True,
                env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            )
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                return endpoint.probe(self.uri, 2.0)
            except TrackingError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise
                time.sleep(0.3)

    def stop(self):
        """Kills it and its job runner."""
        if self._process:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
