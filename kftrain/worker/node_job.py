"""What a node's agent is started with. No torch here."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class NodeJob:
    """What the ranks of a node are started with, but for what changes from attempt to attempt: that is environment."""

    task: str
    run_uri: str
    digest: str
    """Of the configuration that the job was started for."""
    processes: int
    nodes: int = 1
    node_rank: int = 0
    address: str = ""
    """Name of node 0; a single node needs none."""
    port: int = 0

    def to_argument(self) -> str:
        """As it stands on the agent's command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_argument(cls, text: str) -> NodeJob:
        """The inverse of `to_argument`."""
        return cls(**json.loads(text))

    def environment(self, local_rank: int, address: str, port: int) -> dict[str, str]:
        """What tells a rank its place, in torchrun's variables."""
        return {
            "RANK": str(self.node_rank * self.processes + local_rank),
            "LOCAL_RANK": str(local_rank),
            "GROUP_RANK": str(self.node_rank),
            "WORLD_SIZE": str(self.nodes * self.processes),
            "LOCAL_WORLD_SIZE": str(self.processes),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
