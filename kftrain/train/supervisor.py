"""The supervisor: one per node, PID 1 in a worker pod, a plain process on a laptop. Imports no torch.

It starts torchrun (without restarts of its own: a restart is a new attempt, from the last commit), passes SIGTERM on to
the workers alone, so that they commit a checkpoint and end by themselves, and exits with a code that says whether
another attempt makes sense.

torchrun is not told about the SIGTERM: it would give its workers 30 seconds and then kill them, in the middle of a
checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from kftrain import storage
from kftrain.contracts import RunPaths
from kftrain.errors import FIRST_RETRYABLE_CODE
from kftrain.launch.spec import ADDRESS_ENV, NODE_RANK_ENV, RENDEZVOUS_PORT
from kftrain.processes import die_with_parent, shell_code

RANK_MODULE = "kftrain.train.rank"
ERROR_FILE_ENV = "KFTRAIN_ERROR_FILE"
"""Where the first failing process of a node writes its error."""

RETRY_SECONDS = 0.2
"""Between two looks for workers that have not started yet when SIGTERM arrives."""


@dataclass(frozen=True)
class Rendezvous:
    """Where the nodes of a job meet, and which of them this is."""

    nodes: int = 1
    node_rank: int = 0
    address: str = ""
    """Name of node 0; a single node needs none."""

    @classmethod
    def from_environment(cls, nodes: int) -> Rendezvous:
        """Of a job with so many nodes, as the launcher described it in the environment."""
        return cls(nodes, int(os.environ.get(NODE_RANK_ENV, "0")), os.environ.get(ADDRESS_ENV, ""))


def torchrun_arguments(rendezvous: Rendezvous, processes: int, rank_arguments: list[str]) -> list[str]:
    """Arguments of torchrun for this node's share."""
    if rendezvous.nodes == 1:
        meeting = ["--standalone"]
    else:
        meeting = [
            f"--nnodes={rendezvous.nodes}",
            f"--node-rank={rendezvous.node_rank}",
            f"--master-addr={rendezvous.address}",
            f"--master-port={RENDEZVOUS_PORT}",
        ]
    return [*meeting, f"--nproc-per-node={processes}", "--max-restarts=0", "-m", RANK_MODULE, *rank_arguments]


class Supervisor:
    """Runs one node's share of a job."""

    def __init__(self, paths: RunPaths, arguments: list[str], processes: int) -> None:
        self._paths, self._arguments = paths, arguments
        self._num_threads = max(1, (os.cpu_count() or 1) // processes)
        self._agent: subprocess.Popen[bytes] | None = None
        self._stopping = False

    def run(self) -> int:
        """Returns the exit code of this node's share: that of the first failure, or 0."""
        die_with_parent()
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        with tempfile.TemporaryDirectory(prefix="kftrain-") as folder:
            error_file = Path(folder) / "error.json"
            environment = {"OMP_NUM_THREADS": str(self._num_threads), **os.environ, ERROR_FILE_ENV: str(error_file)}
            command = [sys.executable, "-m", "kftrain.train.agent", *self._arguments]
            self._agent = subprocess.Popen(command, env=environment)
            if self._stopping:
                self._stop_workers()
            code = shell_code(self._agent.wait())
            return self._explained(code, error_file) if code else 0

    def _explained(self, code: int, error_file: Path) -> int:
        """Publishes the first error of this node's processes; its code wins over those of its peers."""
        document = storage.read_json_if_exists(str(error_file))
        if document is None:
            name = signal.Signals(code - 128).name if 128 < code < 192 else f"exit code {code}"
            document = {"kind": "", "exit_code": code, "line": f"a process ended by {name} without a word"}
        self._publish(document)
        return int(document["exit_code"])

    def _publish(self, document: dict[str, Any]) -> None:
        """Leaves the job's error. Of several nodes' the first stays, unless that one only lost a peer."""
        try:
            storage.create_json(self._paths.error, document)
        except FileExistsError:
            existing = storage.read_json(self._paths.error)
            if existing["exit_code"] >= FIRST_RETRYABLE_CODE > document["exit_code"]:
                storage.publish_json(self._paths.error, document)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stopping = True
        self._stop_workers()

    def _stop_workers(self) -> None:
        """Sends SIGTERM to the workers; to those that are still starting, as soon as they can take it."""
        agent = self._agent
        if agent is None or agent.poll() is not None:
            return
        ranks = _ranks_below(agent.pid)
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.terminate()
        if not ranks:
            timer = threading.Timer(RETRY_SECONDS, self._stop_workers)
            timer.daemon = True
            timer.start()


def _ranks_below(pid: int) -> list[psutil.Process]:
    """The worker processes that torchrun, process `pid`, has started."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if RANK_MODULE in child.cmdline():
                    found.append(child)
    return found
