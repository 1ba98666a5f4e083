"""Tables on servers, as a worker sees them: read rows by key, push gradients, end the step."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from kftrain.core.frames import Frame, FrameKeys, FrameKind, FrameValues, split_rows
from kftrain.core.ring import Ring
from kftrain.core.row_encodings import RowEncoding, round_up_or_down
from kftrain.remote_parameters.link import Link, ServerAddress

PATIENCE_SECONDS = 60.0


class RemoteTables:
    """The tables of all servers.

    Args:
        servers: The servers, the same for every worker.
        dims: Name of a table -> weights of a row, in the order of the servers' own tables.
        worker: The number of this worker.
        secret: What all processes of the run know.
        patience_seconds: How long a server may be away before LostPeerError is raised.
        max_ahead: The servers' clock rule, which every read is held against; None where there is none.
        encoding: How weights and gradients travel.
        noise_seed: What the noise that rounds gradients to int8 follows from, with table, worker and step.
        first_step: Steps that were done before the servers began to count.

    Attributes:
        staleness: How many steps the slowest worker was behind the step that was read for -> reads.
    """

    def __init__(
        self,
        servers: Sequence[ServerAddress],
        dims: Mapping[str, int],
        worker: int,
        secret: bytes,
        patience_seconds: float = PATIENCE_SECONDS,
        max_ahead: int | None = None,
        encoding: RowEncoding = RowEncoding.FP32,
        noise_seed: int = 0,
        first_step: int = 0,
    ) -> None:
        self._encoding = encoding
        self._noise_seed = noise_seed
        self._first_step = first_step
        self.staleness: Counter[int] = Counter()
        self._max_ahead = max_ahead
        self._dims = dict(dims)
        self._numbers = {name: number for number, name in enumerate(dims)}
        self._worker = worker
        self._secret = secret
        self._patience_seconds = patience_seconds
        self._links: list[Link] = []
        self.switch(servers)

    @property
    def clock(self) -> int:
        """Steps that this worker has finished on all servers."""
        return min(link.clock for link in self._links)

    @property
    def servers(self) -> list[ServerAddress]:
        """The address of each server, or of its copy where that has taken over."""
        return [link.address for link in self._links]

    def switch(self, servers: Sequence[ServerAddress]) -> None:
        """Go on with these servers: all workers have finished the same step, and none has begun another one."""
        known = {link.address.name: link for link in self._links}
        ours = (self._worker, self._secret, self._patience_seconds)
        self._links = [known.pop(server.name) if server.name in known else Link(server, *ours) for server in servers]
        self._ring = Ring([server.name for server in servers])
        for link in known.values():
            link.close()

    def pull(self, table: str, keys: FrameKeys) -> FrameValues:
        """Read the weights (keys, dim) for this step; waits where the clock rule says so."""
        clock, dim = self.clock, self._dims[table]
        weights = np.empty((len(keys), dim), np.float32)
        requests = []
        for link, places in self._split_by_owner(keys):
            frame = dataclasses.replace(self._build_frame(FrameKind.PULL, table), clock=clock, keys=keys[places])
            if frame.keys.size:
                link.start_read(frame)
                requests.append((link, places, frame))
        for link, places, frame in requests:
            is_whole = isinstance(places, slice)
            owned_weights = weights if is_whole else np.empty((frame.keys.size, dim), np.float32)
            self._note_staleness(clock, link.finish_read(frame, owned_weights))
            if not is_whole:
                weights[places] = owned_weights
        return weights

    def push(self, table: str, keys: FrameKeys, gradients: FrameValues) -> None:
        """Send gradients (keys, dim) of distinct keys, to be applied once; leave both alone until `finish_step`."""
        if self._encoding is RowEncoding.INT8:
            gradients = self._round(table, gradients)
        for link, places in self._split_by_owner(keys):
            if link.clock > self.clock:
                continue  # a process of this worker died in `finish_step`, when this server had acknowledged it
            owned_keys, owned_gradients = keys[places], np.ascontiguousarray(gradients[places])
            # Without keys too: a table counts its updates, and the step of Adam is the same on all servers.
            for part in split_rows(len(owned_keys), self._dims[table]):
                values = owned_gradients[part].reshape(-1)
                empty = self._build_frame(FrameKind.PUSH, table)
                link.push(dataclasses.replace(empty, keys=owned_keys[part], values=values))

    def finish_step(self) -> None:
        """End the step on all servers, and wait until they have acknowledged what was pushed."""
        links = [link for link in self._links if link.clock == self.clock]
        for link in links:
            link.push(Frame(FrameKind.FINISH, clock=link.clock))
        for link in links:
            link.finish()

    def close(self) -> None:
        """Close the connections; the servers still count on this worker."""
        for link in self._links:
            link.close()

    def take_staleness(self) -> Counter[int]:
        """Return `staleness` since the last time that somebody asked."""
        counts, self.staleness = self.staleness, Counter()
        return counts

    def _build_frame(self, kind: FrameKind, table: str) -> Frame:
        number, dim = self._numbers[table], self._dims[table]
        return Frame(kind, number, self._worker, encoding=self._encoding, dim=dim)

    def _round(self, table: str, gradients: FrameValues) -> FrameValues:
        step = self._first_step + self.clock
        random = np.random.default_rng([self._noise_seed, self._numbers[table], self._worker, step])
        noise = random.random(gradients.shape, np.float32)
        return round_up_or_down(np.ascontiguousarray(gradients), self._dims[table], noise)

    def _note_staleness(self, clock: int, finished: int) -> None:
        staleness = max(0, clock - finished)
        assert self._max_ahead is None or staleness <= self._max_ahead, f"a read is {staleness} steps behind"
        self.staleness[staleness] += 1

    def _split_by_owner(self, keys: FrameKeys) -> list[tuple[Link, FrameKeys | slice]]:
        if len(self._links) == 1:
            return [(self._links[0], slice(None))]
        owners = self._ring.find_owners(keys)
        return [(link, np.flatnonzero(owners == number)) for number, link in enumerate(self._links)]
