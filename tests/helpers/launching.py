"""A launcher at work against the scripted API server, with clocks that run fast."""

import threading
import time

from kftrain.core import outages
from kftrain.launch.base import build_launcher
from kftrain.launch.kubernetes import client, launcher, lease, logs, retry, watcher, workflow
from kftrain.launch.kubernetes.control import ClusterJobs
from kftrain.launch.kubernetes.job_client import JobClient
from kftrain.launch.kubernetes.kinds.pytorchjob import KIND
from kftrain.run.paths import RunPaths

JOB = "r-train"
"""The job of run `r`."""

WORKERS = [f"{JOB}-worker-0", f"{JOB}-worker-1"]

PATIENCE_SECONDS = 120.0
"""How long a test waits for what must come: machines that run tests pause now and then."""

FAST = {
    lease: {"POLL_SECONDS": 0.02, "OWNER_SECONDS": 0.05},
    launcher: {"POLL_SECONDS": 0.02},
    watcher: {"EXPLAIN_SECONDS": 0.0, "WATCH_PAUSE_SECONDS": 0.02, "ANNOTATE_SECONDS": 0.0},
    client: {"EXPLAIN_OUTAGE_SECONDS": 0.05},
    logs: {"RECONNECT_SECONDS": 0.02, "JOIN_SECONDS": 3.0},
    workflow: {"POLL_SECONDS": 0.02},
    outages: {"FIRST_DELAY_SECONDS": 0.01, "MAX_DELAY_SECONDS": 0.05, "SAID_AFTER_SECONDS": 0.0},
    retry: {
        "SLICE_SECONDS": 0.02,
        "OUTAGE_SECONDS": 600.0,
        "HURRIED_SECONDS": 0.3,
        "CALL_TIMEOUT_SECONDS": (600.0, 600.0),
    },
}


def job_client(**options):
    """The namespace with its PyTorchJobs."""
    return JobClient(KIND, **options)


def cluster_jobs():
    """What a person does with PyTorchJobs."""
    return ClusterJobs([KIND])


def wait_until(condition):
    """Waits for a condition that other threads bring about; returns its value."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (value := condition()):
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.005)
    return value


def threads():
    """Threads of launchers that read logs or watch pods."""
    return [thread for thread in threading.enumerate() if thread.name.startswith(("log of", "watch of"))]


class Launch:
    """A launcher in a thread of its own, and what it has printed."""

    def __init__(self, resolved, job_spec, capsys):
        self.launcher = build_launcher(resolved)
        self.paths = RunPaths(job_spec.run_uri)
        self._capsys = capsys
        self._output = ""
        self._result = []
        self._thread = threading.Thread(target=self._run, args=(job_spec,), daemon=True)
        self._thread.start()

    def _run(self, job_spec):
        try:
            self._result.append(self.launcher.run(job_spec))
        except BaseException as error:  # noqa: BLE001 - `finish` raises it
            self._result.append(error)

    @property
    def output(self):
        """Everything that was printed so far."""
        self._output += self._capsys.readouterr().out
        return self._output

    @property
    def is_running(self):
        """Whether it has not returned yet."""
        return not self._result

    def wait_for(self, part):
        """Waits for something to be printed; fails with what was printed instead."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while part not in self.output:
            assert self.is_running and time.monotonic() < deadline, f"{part!r} never came:\n{self.output}{self._result}"
            time.sleep(0.005)

    def settle(self, namespace):
        """Waits until it has looked at what there is now, from the first to the last."""
        looks = namespace.num_looks
        wait_until(lambda: namespace.num_looks >= looks + 2 or not self.is_running)

    def finish(self):
        """Its exit code once it has returned; raises what it raised."""
        self.join()
        assert self._result, f"the launcher does not end:\n{self.output}"
        if isinstance(self._result[0], BaseException):
            raise self._result[0]
        return self._result[0]

    def join(self):
        """Waits until it has returned."""
        self._thread.join(PATIENCE_SECONDS)
