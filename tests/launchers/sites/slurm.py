"""A real Slurm of two nodes on this machine, and the processes of its jobs."""

import contextlib
import signal
import subprocess

import psutil
import pytest
from launchers.site import Site
from launchers.sites.local import list_processes
from launchers.slurm_cluster import SlurmCluster, explain_absence

from kftrain.launch import slurm_queue


class SlurmSite(Site):
    """A storage root in a folder that both nodes share."""

    def __init__(self, cluster, **values):
        super().__init__(environment={**cluster.environment, "OMP_NUM_THREADS": "1"}, **values)
        self._cluster = cluster

    def list_alive(self, run_uri):
        return list_processes(run_uri, "kftrain.worker")

    def list_left(self, run_uri):
        return [*self.list_alive(run_uri), *(job.job_id for job in self._list_jobs(run_uri))]

    def kill_worker(self, run_uri, rank=0):
        """Kills the agent of a node: its processes end with it."""
        self._find_agent(run_uri, rank).kill()

    def stop_worker(self, run_uri, rank=0):
        """Requeues the job, as a preemption does: all its nodes are told to go."""
        (job,) = self._list_jobs(run_uri)
        self._cluster.run("scontrol", "requeue", job.job_id)

    @contextlib.contextmanager
    def disturb_controller(self):
        self._cluster.stop("slurmctld", signal.SIGKILL)
        try:
            yield
        finally:
            self._cluster.start_controller()

    def lose_node(self, run_uri, rank, disturb):
        """Kills the node's slurmd and all processes of the job there, and tells Slurm what it would find out later."""
        node = f"node{rank + 1}"
        self._cluster.stop(node, signal.SIGKILL)
        agent = self._find_agent(run_uri, rank)
        for process in (agent, agent.parent()):  # slurmstepd
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._cluster.run("scontrol", "update", f"nodename={node}", "state=down", "reason=dead")
        self._cluster.start_node(node)
        self._cluster.run("scontrol", "update", f"nodename={node}", "state=resume")

    def check_request(self, text):
        """Hands the command that is shown to a shell, as a reader would, with a job that is held."""
        command = text[text.index("sbatch ") :].replace("sbatch ", "sbatch --test-only ", 1)
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
        assert done.returncode == 0 and "to start at" in done.stderr, done.stdout + done.stderr

    def _list_jobs(self, run_uri):
        return [job for job in slurm_queue.list_jobs() if job.run_uri == run_uri and not job.has_ended]

    def _find_agent(self, run_uri, rank):
        for process in psutil.process_iter(["cmdline"]):
            line = process.info["cmdline"] or ()
            if "kftrain.worker.agent" in line and any(run_uri in part for part in line):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if process.environ().get("KFTRAIN_NODE_RANK") == str(rank):
                        return process
        raise AssertionError(f"no agent of node {rank} of {run_uri}")


@contextlib.contextmanager
def open_site(request, folder):
    if explain_absence():
        pytest.skip(explain_absence())
    with SlurmCluster(folder / "cluster") as cluster, pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.environment.items():
            patch.setenv(name, value)
        yield SlurmSite(
            cluster,
            name="slurm",
            settings={
                "run.storage_root": str(folder / "root"),
                "launch.backend": "slurm",
                "launch.processes_per_node": 1,
            },
            started="of Slurm: ",
            suspended="waits: ",
            waits_for_ever=True,
            is_private=True,
            waiting={"node": ({"launch.slurm.partition": "closed"}, "PartitionDown", 15)},
            not_run={
                "storage away": "the storage root is a folder of this machine",
                "garbage": "a job of Slurm goes on by itself, and ends by itself: its time limit is Slurm's",
            },
        )
