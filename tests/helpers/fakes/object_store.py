"""A real S3 server process for tests."""

import os
import signal
import subprocess
import sys
import time

import s3fs
from helpers import ports

BUCKET = "kftrain-tests"


class ObjectStore:
    """moto's S3 server on a port of its own, with one bucket; `environment` is what a client needs."""

    def __init__(self, host="127.0.0.1", listen="127.0.0.1"):
        self._held = ports.Held(listen)
        port = self._held.number
        self.environment = {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        }
        self._command = [sys.executable, "-m", "moto.server", "-H", listen, "-p", str(port)]
        self._process = None

    def start(self):
        """Returns when the bucket is there. This process forgets the servers that it has talked to before."""
        s3fs.S3FileSystem.clear_instance_cache()
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        script = f"import s3fs; s3fs.S3FileSystem().mkdir({BUCKET!r})"
        deadline = time.monotonic() + 240
        while True:
            done = subprocess.run(
                [sys.executable, "-c", script], env={**os.environ, **self.environment}, capture_output=True, check=False
            )
            if done.returncode == 0:
                return
            if time.monotonic() > deadline:
                raise AssertionError(done.stderr.decode())
            time.sleep(0.5)

    def pause(self):
        """Answers nothing until `go_on`."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self):
        self._process.send_signal(signal.SIGCONT)

    def stop(self):
        self._process.kill()
        self._process.wait()
