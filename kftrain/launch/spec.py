"""A job as pure data: what a launcher turns into processes, pods or a batch script."""

from __future__ import annotations

from dataclasses import dataclass, field

from kftrain import storage
from kftrain.config import Config
from kftrain.process.lifecycle import num_local_gpus
from kftrain.run.completion import JobTask
from kftrain.run.paths import RunPaths

MLFLOW_RUN_ID_ENV = "KFTRAIN_MLFLOW_RUN_ID"
"""The MLflow run that rank 0 logs to."""

NODE_RANK_ENV = "KFTRAIN_NODE_RANK"
"""Which of a job's nodes a worker is, from 0."""

ADDRESS_ENV = "KFTRAIN_MASTER_ADDRESS"
"""Where the workers of several nodes meet: the name of node 0."""

NODE_NAME_ENV = "KFTRAIN_NODE_NAME"
"""The machine that a worker pod runs on; errors name it."""

LAUNCHER_TIMEOUT_ENV = "KFTRAIN_LAUNCHER_TIMEOUT_SECONDS"
"""A job whose launcher is silent for so long commits and ends; absent: nobody watches, a laptop may sleep."""

RENDEZVOUS_PORT = 23456
"""The port there; the training operator opens it on every pod."""

DEFAULT_CPU_PROCESSES = 2


@dataclass(frozen=True)
class JobSpec:
    """One job of a run: `nodes` workers, each starting `processes_per_node` processes of the same task."""

    task: JobTask
    run_uri: str
    config_digest: str
    """Digest of the run's config.yaml: a worker refuses to work on another."""
    nodes: int
    processes_per_node: int
    completion_uri: str
    """The file whose presence, verified, is the job's success."""
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """Processes of the whole job."""
        return self.nodes * self.processes_per_node

    def worker_arguments(self) -> list[str]:
        """Arguments of `kftrain` that start one node's share."""
        return [
            "worker",
            "--task",
            self.task,
            "--run-uri",
            self.run_uri,
            "--digest",
            self.config_digest,
            "--processes",
            str(self.processes_per_node),
            "--nodes",
            str(self.nodes),
        ]


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
    local = config.launch.backend == "local"
    return (num_local_gpus() if local else config.launch.kubernetes.gpus_per_node) or DEFAULT_CPU_PROCESSES


def _job(task: JobTask, paths: RunPaths, config: Config, completion_uri: str, environment: dict[str, str]) -> JobSpec:
    return JobSpec(
        task=task,
        run_uri=storage.absolute(paths.uri),
        config_digest=config.digest(),
        nodes=config.launch.nodes,
        processes_per_node=processes_per_node(config),
        completion_uri=completion_uri,
        environment=environment,
    )
