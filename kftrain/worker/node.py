"""The specification of a job's node: what it runs, where it meets the others, what its ranks are told. No torch."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass

from kftrain.core import storage
from kftrain.launch.spec import ADDRESS_ENV, LAUNCHER_TIMEOUT_ENV, NODE_RANK_ENV, PORT_ENV, RENDEZVOUS_PORT
from kftrain.process import store_socket
from kftrain.process.machine import num_cpus
from kftrain.run.paths import RunPaths

ANSWER_SECONDS = 2.0
"""Seconds that the first node may take to answer."""


@dataclass(frozen=True)
class NodeSpec:
    """A node of a job, but for what changes from attempt to attempt: that is environment.

    The launcher describes it to the supervisor, and the supervisor hands it on to the agent.
    """

    task: str
    run_uri: str
    digest: str
    """Digest of the configuration that the job was started for."""
    processes: int
    nodes: int = 1
    node_rank: int = 0
    address: str = ""
    """Name of node 0, where the others meet; a single node needs none."""
    launcher_timeout_seconds: float | None = None
    """Seconds for which the launcher may be silent; None if nobody watches it."""
    port: int = RENDEZVOUS_PORT
    """Port of node 0 where the others meet."""

    @classmethod
    def from_environment(cls, task: str, run_uri: str, digest: str, processes: int, nodes: int) -> NodeSpec:
        """Build the node from the launcher's command line and environment variables."""
        timeout = os.environ.get(LAUNCHER_TIMEOUT_ENV)
        return cls(
            task=task,
            run_uri=run_uri,
            digest=digest,
            processes=processes,
            nodes=nodes,
            node_rank=int(os.environ.get(NODE_RANK_ENV, "0")),
            address=os.environ.get(ADDRESS_ENV, ""),
            launcher_timeout_seconds=float(timeout) if timeout else None,
            port=int(os.environ.get(PORT_ENV, RENDEZVOUS_PORT)),
        )

    def to_argument(self) -> str:
        """Serialize the node for the agent's command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_argument(cls, text: str) -> NodeSpec:
        """Parse a node from the agent's command line: the inverse of `to_argument`."""
        return cls(**json.loads(text))

    @property
    def paths(self) -> RunPaths:
        """Paths in the folder of the run."""
        return RunPaths(self.run_uri)

    @property
    def ranks(self) -> range:
        """The ranks of this node's processes."""
        first = self.node_rank * self.processes
        return range(first, first + self.processes)

    @property
    def world_size(self) -> int:
        """Number of processes of the whole job."""
        return self.nodes * self.processes

    @property
    def is_first(self) -> bool:
        """True if rank 0, which completes the job, is on this node."""
        return self.node_rank == 0

    def build_environment(self) -> dict[str, str]:
        """Return the environment that all ranks of this node inherit."""
        return {"OMP_NUM_THREADS": str(max(1, num_cpus() // self.processes)), **os.environ}

    def build_rank_environment(self, local_rank: int, address: str, port: int) -> dict[str, str]:
        """Return torchrun's variables for one rank, its place in the job and where to meet; and the job's name."""
        return {
            "RANK": str(self.ranks[local_rank]),
            "LOCAL_RANK": str(local_rank),
            "GROUP_RANK": str(self.node_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.processes),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            store_socket.JOB_ENV: storage.sha256_text(f"{self.task} {self.run_uri} {self.digest}"),
        }


def first_node_answers(node: NodeSpec) -> bool:
    """Tell whether rank 0 still runs on the first node: its port takes a connection."""
    try:
        socket.create_connection((node.address, node.port), timeout=ANSWER_SECONDS).close()
    except OSError:
        return False
    return True
