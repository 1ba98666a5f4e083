"""A job as pure data: what a launcher turns into processes, pods or a batch script."""

from __future__ import annotations

from dataclasses import dataclass, field

from kftrain import storage
from kftrain.config import Config
from kftrain.process.machine import NODE_NAME_ENV as NODE_NAME_ENV
from kftrain.process.machine import num_local_gpus
from kftrain.run.completion import JobTask
from kftrain.run.paths import RunPaths

MLFLOW_RUN_ID_ENV = "KFTRAIN_MLFLOW_RUN_ID"
"""The MLflow run that rank 0 logs to."""

NODE_RANK_ENV = "KFTRAIN_NODE_RANK"
"""Which of a job's nodes a worker is, from 0."""

ADDRESS_ENV = "KFTRAIN_MASTER_ADDRESS"
"""Where the workers of several nodes meet: the name of node 0."""

ERROR_FILE_ENV = "KFTRAIN_ERROR_FILE"
"""Where the first failing process of a node writes its error, as `error.json` has it."""

LAUNCHER_TIMEOUT_ENV = "KFTRAIN_LAUNCHER_TIMEOUT_SECONDS"
"""A job whose launcher is silent for so long commits and ends; absent: nobody watches, a laptop may sleep."""

RENDEZVOUS_PORT = 23456
"""The port there; the training operator opens it on every pod."""

DEFAULT_CPU_PROCESSES = 2

WORKER = "worker"
"""The role that trains and evaluates."""


@dataclass(frozen=True)
class Role:
    """A group of equal workers of a job, one a node."""

    name: str
    replicas: int
    """Nodes."""
    processes_per_node: int
    """Processes that each of them starts."""
    arguments: tuple[str, ...]
    """Of `kftrain`: what starts one node, which learns from its environment which it is.

    A node of another role than the first works until it is told to stop: the job is at its end when its workers are.
    One that ends with 0 before that had no more to do; one that fails, fails the job.
    """

    @property
    def num_processes(self) -> int:
        """On all its nodes."""
        return self.replicas * self.processes_per_node


@dataclass(frozen=True)
class JobSpec:
    """One job of a run."""

    task: JobTask
    run_uri: str
    config_digest: str
    """Digest of the run's config.yaml: a worker refuses to work on another."""
    roles: tuple[Role, ...]
    """The workers first; no two of one name."""
    completion_uri: str
    """The file whose presence, verified, is the job's success."""
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Two roles of one name would be one to every launcher."""
        assert len({role.name for role in self.roles}) == len(self.roles) > 0

    @property
    def workers(self) -> Role:
        """The role that every job has: its first one is where all meet, and says what the job is at."""
        return self.roles[0]

    @property
    def others(self) -> tuple[Role, ...]:
        """The roles beside the workers."""
        return self.roles[1:]

    @property
    def num_pods(self) -> int:
        """Of all roles."""
        return sum(role.replicas for role in self.roles)

    @property
    def size(self) -> str:
        """In words: `2 x 4 processes`."""
        return " and ".join(f"{role.replicas} x {role.processes_per_node}" for role in self.roles) + " processes"


def train_job(paths: RunPaths, config: Config, mlflow_run_id: str) -> JobSpec:
    """The training of a run."""
    environment = {MLFLOW_RUN_ID_ENV: mlflow_run_id} if mlflow_run_id else {}
    return _job("train", paths, config, paths.complete, environment)


def evaluate_job(paths: RunPaths, config: Config, metrics_uri: str) -> JobSpec:
    """The evaluation of a run's export, and of the champion's where it is asked for."""
    return _job("evaluate", paths, config, metrics_uri, {})


def processes_per_node(config: Config) -> int:
    """The number asked for; `auto`: one per GPU of a node, or 2 without any."""
    asked = config.launch.processes_per_node
    if asked != "auto":
        return asked
    known = config.launch.kubernetes.gpus_per_node if config.launch.has_pods else num_local_gpus()
    return known or DEFAULT_CPU_PROCESSES


def _job(task: JobTask, paths: RunPaths, config: Config, completion_uri: str, environment: dict[str, str]) -> JobSpec:
    run_uri, digest = storage.absolute(paths.uri), config.digest()
    num_processes, num_nodes = processes_per_node(config), config.launch.nodes
    job = ("worker", "--task", task, "--run-uri", run_uri, "--digest", digest)
    size = ("--processes", str(num_processes), "--nodes", str(num_nodes))
    return JobSpec(
        task=task,
        run_uri=run_uri,
        config_digest=digest,
        roles=(Role(WORKER, num_nodes, num_processes, (*job, *size)),),
        completion_uri=completion_uri,
        environment={**config.launch.environment, **environment},
    )
