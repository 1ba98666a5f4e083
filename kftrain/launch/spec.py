"""A job as pure data: what a launcher turns into processes, pods or a batch script."""

from __future__ import annotations

from dataclasses import dataclass, field

from kftrain.config import Config
from kftrain.core import storage
from kftrain.errors import LaunchError
from kftrain.process.machine import NODE_NAME_ENV as NODE_NAME_ENV
from kftrain.process.machine import count_local_gpus
from kftrain.run.job_tasks import TRAINING, JobTask
from kftrain.run.paths import RunPaths

MLFLOW_RUN_ID_ENV = "KFTRAIN_MLFLOW_RUN_ID"
"""Variable with the id of the MLflow run that rank 0 logs to."""

NODE_RANK_ENV = "KFTRAIN_NODE_RANK"
"""Variable with the number of a worker's node within the job, from 0."""

ADDRESS_ENV = "KFTRAIN_MASTER_ADDRESS"
"""Variable with the host name of node 0, where the workers of several nodes meet."""

PORT_ENV = "KFTRAIN_MASTER_PORT"
"""Variable with the port of node 0 where the workers meet; absent: RENDEZVOUS_PORT."""

ERROR_FILE_ENV = "KFTRAIN_ERROR_FILE"
"""Variable with the file to which the first failing process of a node writes its error, in the form of `error.json`."""

LAUNCHER_TIMEOUT_ENV = "KFTRAIN_LAUNCHER_TIMEOUT_SECONDS"
"""Variable with the seconds of a launcher's silence after which its job commits and ends; absent: no limit."""

RENDEZVOUS_PORT = 23456
"""Port of node 0 where the workers meet; the training operator opens it on every pod."""

DEFAULT_CPU_PROCESSES = 2

WORKER = "worker"
"""The role that trains and evaluates."""

SERVER = "server"
"""The role that holds the tables of a training."""


@dataclass(frozen=True)
class Role:
    """A group of equal workers of a job, one per node."""

    name: str
    replicas: int
    """Number of nodes, with one worker each."""
    processes_per_node: int
    """Number of processes that each node starts."""
    arguments: tuple[str, ...]
    """Arguments of `kftrain` that start one node; the node learns its number from its environment.

    A node of another role than the first works until it is told to stop: the job is at its end when its workers are.
    One that ends with 0 before that had no more to do; one that fails, fails the job.
    """
    num_spare: int = 0
    """Nodes that may fail without failing the job; of a role beside the workers."""

    @property
    def num_processes(self) -> int:
        """Number of processes on all nodes together."""
        return self.replicas * self.processes_per_node


@dataclass(frozen=True)
class JobSpec:
    """A job of a run as data: its roles and their commands."""

    task: str
    """Name of the work that the job does, a key of `JOB_TASKS`."""
    run_uri: str
    config_digest: str
    """Digest of the run's config.yaml; a worker refuses to work on any other."""
    roles: tuple[Role, ...]
    """Roles with distinct names; the first is that of the workers."""
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse two roles of one name, which every launcher would take for one."""
        assert len({role.name for role in self.roles}) == len(self.roles) > 0

    @property
    def workers(self) -> Role:
        """The role that every job has; all meet at its first node, which also reports progress."""
        return self.roles[0]

    @property
    def others(self) -> tuple[Role, ...]:
        """The roles that run beside the workers."""
        return self.roles[1:]

    @property
    def num_pods(self) -> int:
        """Number of nodes of all roles: one pod each."""
        return sum(role.replicas for role in self.roles)

    @property
    def size(self) -> str:
        """The size of the job in words: `2 x 4 processes`."""
        return " and ".join(f"{role.replicas} x {role.processes_per_node}" for role in self.roles) + " processes"


def make_job(task: JobTask, paths: RunPaths, config: Config, mlflow_run_id: str = "") -> JobSpec:
    """Describe a job of a run; rank 0 logs to `mlflow_run_id`, if there is one and the task is tracked."""
    run_uri, digest = storage.absolute(paths.uri), config.digest()
    num_nodes, num_processes = _count_nodes(task, config)
    run = ("--run-uri", run_uri, "--digest", digest)
    job = ("worker", "--task", task.name, *run)
    size = ("--processes", str(num_processes), "--nodes", str(num_nodes))
    has_servers = task.name == TRAINING.name and config.server.num_servers > 0
    server = Role(SERVER, config.server.num_servers, 1, ("server", *run), num_spare=config.server.copies - 1)
    servers = [server] if has_servers else []
    tracking = {MLFLOW_RUN_ID_ENV: mlflow_run_id} if mlflow_run_id and task.is_tracked else {}
    return JobSpec(
        task=task.name,
        run_uri=run_uri,
        config_digest=digest,
        roles=(Role(WORKER, num_nodes, num_processes, (*job, *size)), *servers),
        environment={**config.launch.environment, **tracking},
    )


def require_workers_alone(spec: JobSpec, backend: str) -> None:
    """Raise LaunchError for a job with other roles, for a backend that has no place for them."""
    if spec.others:
        fix = "launch it with a backend that runs all of them: launch.backend=local, jobset or slurm"
        where, others = f"{spec.task} job of {spec.run_uri}", ", ".join(role.name for role in spec.others)
        raise LaunchError(f"{backend} has workers alone", where=where, value=others, fix=fix)


def _count_nodes(task: JobTask, config: Config) -> tuple[int, int]:
    """Return the number of nodes and of processes on each; workers that do not meet are as many as data.shard_pods."""
    if task.meets:
        return config.launch.nodes, count_processes_per_node(config)
    num_pods = max(1, config.data.shard_pods)
    return (num_pods, 1) if config.launch.is_remote else (1, num_pods)


def count_processes_per_node(config: Config) -> int:
    """Return the number of processes per node; `auto` is one per GPU, or 2 without any."""
    configured = config.launch.processes_per_node
    if configured != "auto":
        return configured
    num_gpus = config.launch.gpus_per_node if config.launch.is_remote else count_local_gpus()
    return num_gpus or DEFAULT_CPU_PROCESSES
