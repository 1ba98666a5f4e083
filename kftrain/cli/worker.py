"""`kftrain worker` and `kftrain server`: one node of a job; what a launcher starts."""

from __future__ import annotations

import os
import sys

import click

from kftrain.launch.spec import NODE_RANK_ENV
from kftrain.run.job_tasks import JOB_TASKS
from kftrain.run.paths import RunPaths
from kftrain.worker.node import NodeSpec
from kftrain.worker.supervisor import run_node


@click.command("worker")
@click.option("--task", type=click.Choice(list(JOB_TASKS)), required=True, help="What the job does.")
@click.option("--run-uri", required=True, help="Folder of the run.")
@click.option("--digest", required=True, help="Digest of the run's config.yaml.")
@click.option("--processes", type=click.IntRange(min=1), required=True, help="Processes on this node.")
@click.option("--nodes", type=click.IntRange(min=1), default=1, help="Nodes of the job.")
def worker_command(task: str, run_uri: str, digest: str, processes: int, nodes: int) -> None:
    """Run this node of a job; exits with the code of the process that failed first.

    A job that is complete already ends with 0 at once, however many nodes it has.
    """
    sys.exit(run_node(NodeSpec.from_environment(task, run_uri, digest, processes, nodes)))


@click.command("server")
@click.option("--run-uri", required=True, help="Folder of the run.")
@click.option("--digest", required=True, help="Digest of the run's config.yaml.")
def server_command(run_uri: str, digest: str) -> None:
    """Hold a share of the run's tables until told to stop; its number comes from the environment."""
    from kftrain.server.process import run_server

    sys.exit(run_server(RunPaths(run_uri), digest, int(os.environ.get(NODE_RANK_ENV, "0"))))
