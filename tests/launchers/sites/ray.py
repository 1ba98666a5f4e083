"""Ray: two nodes on this machine, in processes of their own; a shared folder is the storage root."""

import contextlib
import subprocess
import tempfile
from pathlib import Path

import psutil
import pytest
from launchers.ray_cluster import RayCluster, explain_absence
from launchers.site import Site

from kftrain.launch.ray_jobs import RayCluster as RayApi

NODE_RANK = "KFTRAIN_NODE_RANK"


def find_workers(run_uri, part="kftrain.worker.agent"):
    """Rank of a node -> its process whose command line holds `part`, among those that work on a run."""
    ranks = {}
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or ()
        if part in line and any(run_uri in word for word in line):
            with contextlib.suppress(psutil.NoSuchProcess):
                ranks[int(process.environ()[NODE_RANK])] = process
    return ranks


class RaySite(Site):
    """Processes are found by the run's URI in their command lines, as all nodes are this machine."""

    def __init__(self, cluster, **values):
        super().__init__(**values)
        self.cluster = cluster

    def list_alive(self, run_uri):
        return [
            f"{process.pid} {' '.join(process.info['cmdline'])[:80]}"
            for process in psutil.process_iter(["cmdline", "status"])
            if process.info["status"] != psutil.STATUS_ZOMBIE
            and any(run_uri in part for part in process.info["cmdline"] or ())
            and any(
                part in ("worker", "kftrain.worker.agent") or "ray_driver" in part for part in process.info["cmdline"]
            )
        ]

    def list_left(self, run_uri):
        """Processes, and jobs that have not ended: Ray itself keeps its list of those that have."""
        jobs = [job.name for job in RayApi(self.cluster.address).list_jobs() if job.belongs_to(run_uri)]
        active = [job.name for job in RayApi(self.cluster.address).list_jobs() if not job.has_ended]
        return [*self.list_alive(run_uri), *(name for name in jobs if name in active)]

    def kill_worker(self, run_uri, rank=0):
        find_workers(run_uri)[rank].children()[0].kill()

    def stop_worker(self, run_uri, rank=0):
        find_workers(run_uri)[rank].parent().terminate()

    def check_request(self, text):
        """Ray takes it, and starts its driver."""
        command = text[text.index("curl ") :]
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
        assert done.returncode == 0 and '"submission_id"' in done.stdout, done.stdout + done.stderr
        api = RayApi(self.cluster.address)
        (job,) = [job for job in api.list_jobs() if not job.has_ended]
        api.stop(job)


@contextlib.contextmanager
def open_site(request, folder):
    if explain_absence():
        pytest.skip(explain_absence())
    with tempfile.TemporaryDirectory(prefix="ray-") as short, RayCluster(Path(short, "r")) as cluster:
        yield RaySite(
            cluster,
            name="ray",
            settings={
                "run.storage_root": str(folder / "root"),
                "launch.backend": "ray",
                "launch.processes_per_node": 1,
                "launch.ray.address": cluster.address,
                "launch.ray.python": cluster.python,
                "launch.environment": f"{{PYTHONPATH: {Path(__file__).parents[2] / 'e2e'}}}",
            },
            refused={
                "suspend": "a job of Ray cannot be suspended",
                "servers": "the ray backend has workers alone",
            },
            not_run={
                "waits": "the suite's reasons to wait are those of pods",
                "storage away": "the storage root is a folder of this machine",
                "garbage": "kftrain gc looks at jobs of Kubernetes; a job of Ray ends by itself",
                "controller away": "nobody has stopped the dashboard for so long yet",
                "node lost": "there is no third node",
            },
        )
