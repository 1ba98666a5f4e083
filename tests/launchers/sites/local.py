"""This machine: processes below the launcher, found by the run's URI in their command lines; an object store."""

import contextlib

import psutil
from helpers.fakes.object_store import BUCKET, ObjectStore
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
        """Workers, agents and their processes; a launcher still writes down how its job ended."""
        return [process for process in list_processes(run_uri) if "-m kftrain train" not in process]

    def list_left(self, run_uri):
        return list_processes(run_uri)

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
    store = ObjectStore()
    store.start()
    try:
        yield LocalSite(
            name="local",
            nodes=1,
            store=store,
            environment=store.environment,
            settings={
                "run.storage_root": f"s3://{BUCKET}/local",
                "launch.backend": "local",
                "launch.processes_per_node": 2,
            },
            dies_with_launcher=True,
            refused={
                "suspend": "a job of this machine cannot be suspended",
                "logs": "the job is at work, and its output is where it was started",
            },
            not_run={
                "waits": "processes of this machine start at once",
                "adopted": "processes of this machine die with their launcher",
                "request": "a command line has no scheduler that takes it",
                "controller away": "there is no controller",
                "node lost": "there is one node",
            },
        )
    finally:
        store.stop()
