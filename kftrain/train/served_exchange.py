"""An exchange of islands through servers: an island sends its vector once, and takes each update that it has not seen.

To and from a server a number travels once each way, whatever the number of islands; in `CollectiveExchange` it travels
in a ring. Who is late does not hold up the others where `train.outer.quorum` says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from kftrain.config import Config
from kftrain.core.frames import Frame, FrameKind
from kftrain.core.row_encodings import RowEncoding, decode, encode
from kftrain.errors import KftrainError, error_from_dict
from kftrain.parallel.mesh import Mesh
from kftrain.parallel.outer_exchange import Feedback, Round, Share
from kftrain.parallel.shape import AXES
from kftrain.parallel.world import World
from kftrain.remote_parameters.control import START_SECONDS, find_servers, load_all
from kftrain.remote_parameters.link import ServerAddress
from kftrain.remote_parameters.rounds import ROW_NUMBERS, RemoteRounds, Update
from kftrain.run.commit import CheckpointManifest
from kftrain.run.paths import RunPaths
from kftrain.server.process import read_secret


class ServedExchange(Feedback):
    """An exchange through the servers of a run, of one vector, `[n]`: another one along `shard`."""

    def __init__(self, mesh: Mesh, config: Config, num_numbers: int, device: torch.device) -> None:
        encoding = config.train.outer.encoding
        super().__init__(mesh, encoding, num_numbers, ROW_NUMBERS, device)
        self._config = config
        self._mesh = mesh
        self._encoding = RowEncoding[encoding.upper()]
        self._within = mesh.group([axis for axis in AXES if axis != "islands"]) if mesh.shape.island_size > 1 else None
        self._rounds: RemoteRounds | None = None
        self._num_updates = 0

    def connect(self, paths: RunPaths, world: World, before: CheckpointManifest | None) -> None:
        """Have the servers begin after the checkpoint, and connect to them. Collective."""
        secret, servers = read_secret(), list[ServerAddress]()
        num_servers, num_steps = self._config.server.num_servers, before.step if before else 0
        world.agree(lambda: servers.extend(find_servers(paths.servers, num_servers, START_SECONDS)))
        load = Frame(FrameKind.LOAD, clock=num_steps)
        world.agree(lambda: load_all(servers, secret, load) if world.is_main else None)
        self._num_updates = num_steps // self._config.train.outer.steps
        island, part = divmod(world.rank, self._mesh.shape.island_size)
        self._rounds = RemoteRounds(servers, world.rank, island, part, secret, self._encoding)
        self._rounds.join()

    @torch.no_grad()
    def exchange(self, vector: torch.Tensor, number: Round) -> tuple[Iterable[Share], bool]:
        """Send a vector, `[n]` fp32; return the means of all updates that this island has not seen, and if all met.

        Collective within an island, as is asking for each mean; over all of them where all meet.
        """
        assert self._rounds is not None, "the servers are not connected"
        work = self.add_lost(vector)
        numbers = work.cpu().numpy()
        self._rounds.send(number.number, numbers)
        self.keep_lost(self._find_lost(numbers).to(work.device))
        updates, has_met = self._meet(number)
        self._num_updates += len(updates)
        # One after the other, since each is as large as the vector.
        return ((self.join(self._fetch(update, work)), self._find_share(update)) for update in updates), has_met

    def close(self) -> None:
        """Close the connections."""
        if self._rounds is not None:
            self._rounds.close()

    def _find_lost(self, numbers: np.ndarray) -> torch.Tensor:
        """Return what numbers lose on their way to a server."""
        if not self.has_feedback:
            return torch.empty(0)
        arrived = np.empty_like(numbers)
        wire = np.frombuffer(encode(numbers, self._encoding, ROW_NUMBERS), np.uint8)
        decode(wire, self._encoding, ROW_NUMBERS, arrived)
        return torch.from_numpy(numbers - arrived)

    def _meet(self, number: Round) -> tuple[list[Update], bool]:
        """Announce a round for the island once all its processes have sent their parts; return what came of it."""
        assert self._rounds is not None, "the servers are not connected"
        asked = number.number, self._num_updates, number.is_meeting, number.wants_meeting
        if self._within is None:
            return self._rounds.meet(*asked)
        dist.barrier(group=self._within)
        answer: list[Any] = [None, None]
        if self._within.rank() == 0:
            try:
                answer[0] = self._rounds.meet(*asked)
            except KftrainError as error:  # the others would wait for this process
                answer[1] = error.to_dict()
        dist.broadcast_object_list(answer, group=self._within, group_src=0, device=torch.device("cpu"))
        if answer[1] is not None:
            raise error_from_dict(answer[1])
        updates, has_met = answer[0]
        return updates, has_met

    def _find_share(self, update: Update) -> float:
        return len(update.members) / 2 / self._mesh.shape.islands

    def _fetch(self, update: Update, part: torch.Tensor) -> torch.Tensor:
        mean = np.empty(len(part), np.float32)
        assert self._rounds is not None, "the servers are not connected"
        self._rounds.fetch(update, mean)
        return torch.from_numpy(mean).to(part.device)
