"""Ray: two nodes on this machine, in processes of their own; the storage root is an object store."""

import contextlib
import re
import subprocess
import tempfile
from pathlib import Path

import psutil
import pytest
from e2e.namespace import wait_until
from helpers.fakes.object_store import BUCKET, ObjectStore
from launchers.ray_cluster import ROOT, RayCluster, explain_absence
from launchers.site import Site

from kftrain.launch.ray_jobs import RayCluster as RayApi

NODE_RANK = "KFTRAIN_NODE_RANK"
AGENT = "kftrain.worker.agent"


def find_agents(run_uri):
    """Rank of a node -> its agent, among those that work on a run. The ranks below have its command line, too."""
    agents = {}
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or ()
        if AGENT in line and any(run_uri in word for word in line):
            with contextlib.suppress(psutil.NoSuchProcess):
                if AGENT not in process.parent().cmdline():
                    agents[int(process.environ()[NODE_RANK])] = process
    return agents


class RaySite(Site):
    """Processes are found by the run's URI in their command lines, as all nodes are this machine."""

    def __init__(self, cluster, **values):
        super().__init__(**values)
        self.cluster = cluster

    def mend(self):
        """A cluster whose dashboard, or the agent that takes jobs, has died on a busy machine does not come back."""
        self.cluster.restart()

    def list_alive(self, run_uri):
        return [
            f"{process.pid} {' '.join(process.info['cmdline'])[:80]}"
            for process in psutil.process_iter(["cmdline", "status"])
            if process.info["status"] != psutil.STATUS_ZOMBIE
            and any(run_uri in part for part in process.info["cmdline"] or ())
            and any(part in ("worker", AGENT) or "ray_driver" in part for part in process.info["cmdline"])
        ]

    def list_left(self, run_uri):
        """Processes, and jobs that have not ended: Ray itself keeps its list of those that have."""
        jobs = RayApi(self.cluster.address).list_jobs()
        active = [job.job_id for job in jobs if job.belongs_to(run_uri) and not job.has_ended]
        return [*self.list_alive(run_uri), *active]

    def kill_worker(self, run_uri, rank=0):
        find_agents(run_uri)[rank].children()[0].kill()

    def stop_worker(self, run_uri, rank=0):
        """Tells the worker of a node, whose child the agent is, to go."""
        find_agents(run_uri)[rank].parent().terminate()

    def disturb_controller(self):
        """The head's dashboard does not answer; a reader of its port waits in vain."""
        return self.cluster.frozen_dashboard()

    def lose_node(self, run_uri, rank, disturb):
        """Kills the raylet of the second node: that of the head is the end of the cluster. What ran there goes, too."""
        for agent in find_agents(run_uri).values():
            worker = agent.parent()
            raylet = worker.parent().parent()
            if raylet.parent().pid != self.cluster.head_pid:
                raylet.kill()
                psutil.wait_procs([agent, worker], timeout=30)
                assert not (agent.is_running() or worker.is_running()), "the worker outlived its node"
                break
        else:
            raise AssertionError("no worker on the second node")
        self.cluster.start_node()

    def check_request(self, text):
        """Ray takes it, and starts its driver."""
        command = text[text.index("curl ") :]
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
        assert done.returncode == 0 and '"submission_id"' in done.stdout, done.stdout + done.stderr
        for job_id in re.findall(r'"submission_id": *"([^"]+)"', done.stdout):  # training and evaluation
            wait_until(lambda job_id=job_id: self._stop_job(job_id), 120, "the end of the job")

    def _stop_job(self, job_id):
        """Stops a job, and says whether it has ended: one that is about to begin is told again."""
        api = RayApi(self.cluster.address)
        job = next((job for job in api.list_jobs() if job.job_id == job_id), None)
        if job is not None and not job.has_ended:
            api.stop(job)
        return job is not None and job.has_ended


@contextlib.contextmanager
def open_site(request, folder):
    if explain_absence():
        pytest.skip(explain_absence())
    with contextlib.ExitStack() as stack:
        store = ObjectStore()
        stack.callback(store.stop)
        store.start()
        short = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-"))
        cluster = stack.enter_context(RayCluster(Path(short, "r"), store.environment))
        yield RaySite(
            cluster,
            name="ray",
            store=store,
            environment=store.environment,
            settings={
                "run.storage_root": f"s3://{BUCKET}/ray",
                "launch.backend": "ray",
                "launch.processes_per_node": 1,
                "launch.ray.address": cluster.address,
                "launch.ray.python": cluster.python,
                "launch.environment": f"{{PYTHONPATH: '{ROOT}:{ROOT / 'tests' / 'e2e'}'}}",
            },
            refused={
                "suspend": "a job of Ray cannot be suspended",
                "servers": "the ray backend has workers alone",
            },
            not_run={
                "garbage": "kftrain gc looks at jobs of Kubernetes; a job of Ray that nobody follows goes on to its end"
            },
            started="of Ray: ",
            waits_for_ever=True,
            is_private=True,
            waiting={"node": ({"launch.ray.cpus_per_node": 64}, "INFEASIBLE: the job wants 2 nodes with CPU 64", 60)},
        )
