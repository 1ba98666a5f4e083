"""A server as the process that a launcher starts."""

import signal
import subprocess
import sys
import time

from helpers import clicks, jobs

from kftrain.core import storage
from kftrain.core.credentials import SERVER_SECRET_VARIABLE
from kftrain.errors import Preempted


def test_a_server_that_is_told_to_stop_does_not_say_that_its_work_is_done(tmp_path):
    paths, resolved = jobs.prepare(tmp_path, clicks.TEXT)
    command = [sys.executable, "-m", "kftrain", "server", "--run-uri", paths.uri, "--digest", resolved.digest()]
    environment = jobs.worker_environment({SERVER_SECRET_VARIABLE: clicks.SECRET})
    with subprocess.Popen(command, env=environment) as server:
        deadline = time.monotonic() + 60
        while not storage.exists(storage.join(paths.servers, "0.json")):
            assert server.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == Preempted.exit_code
