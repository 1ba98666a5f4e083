"""This machine: processes below the launcher, found by the run's URI in their command lines."""

import contextlib

import psutil
from launchers.site import Site


def list_processes(run_uri, words=""):
    """Processes of this machine with a run and these words in their command line."""
    return [
        f"{process.pid} {' '.join(process.info['cmdline'])[:80]}"
        for process in psutil.process_iter(["cmdline", "status"])
        if process.info["status"] != psutil.STATUS_ZOMBIE
        and any(run_uri in part for part in process.info["cmdline"] or ())
        and words in " ".join(process.info["cmdline"])
        and "pytest" not in " ".join(process.info["cmdline"])
    ]


class LocalSite(Site):
    """A storage root in a folder, one node with two processes."""

    def list_alive(self, run_uri):
        return list_processes(run_uri)

    list_left = list_alive

    def kill_worker(self, run_uri, rank=0):
        """Kills a training process, a child of the agent."""
        self._find_agent(run_uri).children()[0].kill()

    def stop_worker(self, run_uri, rank=0):
        """Tells the worker, whose child the agent is, to go."""
        self._find_agent(run_uri).parent().terminate()

    def _find_agent(self, run_uri):
        for process in psutil.process_iter(["cmdline"]):
            line = process.info["cmdline"] or ()
            if "kftrain.worker.agent" in line and any(run_uri in part for part in line):
                return process
        raise AssertionError(f"no agent of {run_uri}")


@contextlib.contextmanager
def open_site(request, folder):
    nothing_waits = "processes of this machine start at once"
    yield LocalSite(
        name="local",
        settings={
            "run.storage_root": str(folder / "root"),
            "launch.backend": "local",
            "launch.processes_per_node": 2,
        },
        nodes=1,
        refused={
            "suspend": "a job of this machine cannot be suspended",
            "logs": "the job is at work, and its output is where it was started",
        },
        not_run={
            "waits": nothing_waits,
            "adopted": "processes of this machine die with their launcher",
            "request": "a command line has no scheduler that takes it",
            "storage away": "the storage root is a folder of this machine",
            "garbage": "processes of this machine die with their launcher",
            "controller away": "there is no controller",
            "node lost": "there is one node",
        },
    )
