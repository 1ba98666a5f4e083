"""A loader on a virtual clock: what `TrainLoader` does with a recorded trace, in the order in which it does it.

A trace has for each step the seconds to read, to decode (by one worker) and to compute, and the bytes. Pieces of a step
are read and decoded as `Threads` and `DecodingProcesses` do: in the order in which they were asked for, by a
pool of threads of which so many decode at once, or by processes that do both. Threads share the GIL for
`trace.gil_share` of decoding, and all share the processors.
"""

import heapq
import json
from dataclasses import dataclass, replace
from pathlib import Path

from kftrain.data.counters import Counters
from kftrain.data.tuning import Limits, Tuner, Tuning

PROCESS_START_SECONDS = 1.0
"""Until a worker process has imported what it needs."""


@dataclass(frozen=True)
class Trace:
    name: str
    num_cpus: int
    gil_share: float
    step_bytes: int
    steps: list[tuple[float, float, float]]
    """Seconds to read, to decode, to compute."""

    @classmethod
    def read(cls, path: Path) -> "Trace":
        document = json.loads(path.read_text())
        return cls(**{**document, "steps": [tuple(ms / 1000 for ms in step) for step in document["steps"]]})


class Simulated:
    """The loader at work on a trace; `now` is the virtual clock."""

    def __init__(self, trace: Trace, first: Tuning, limits: Limits | None = None) -> None:
        self.now = 0.0
        self.counters = Counters()
        self.lines: list[str] = []
        self._trace = trace
        self._tuner = Tuner(first, limits or Limits(first, first.steps), self.counters, lambda: float("inf"))
        self._pool: list[float] = []
        """When each thread, or each process, is free."""
        self._readers: list[float] = []
        self._decoders: list[float] = []
        self._ready: list[float] = []
        self._costs: list[Counters] = []
        self._kind = first.kind
        self._resize()

    @property
    def tuning(self) -> Tuning:
        return self._tuner.now

    def run(self) -> float:
        """The seconds of all steps, but for the wait for the first one, which is the same for everybody."""
        steps = self._trace.steps
        self._begin(self.tuning.steps)
        for number, (_, _, compute) in enumerate(steps):
            wait = max(0.0, self._ready[number] - self.now)
            self.now += wait
            if number == 0:
                first_wait = wait
            self.counters.add(replace(self._costs[number], seconds=wait, stall_seconds=wait))
            line = self._tuner.take(self._trace.step_bytes)
            if line:
                self.lines.append(line)
                self._resize()
            self._begin(number + 1 + self.tuning.steps)
            self.counters.num_steps += 1
            self.now += compute
            self.counters.seconds += compute
            self._tuner.computed.append(compute)
        return self.now - first_wait

    def _begin(self, until: int) -> None:
        while len(self._ready) < min(until, len(self._trace.steps)):
            read, decode, _ = self._trace.steps[len(self._ready)]
            pieces = self.tuning.pieces
            cost, end = Counters(num_made=1), self._ready[-1] if self._ready else 0.0
            for _ in range(pieces):
                end = max(end, self._fill(read, decode / pieces, cost))
            self._ready.append(end)
            self._costs.append(cost)

    def _fill(self, read: float, decode: float, cost: Counters) -> float:
        """When a piece that is asked for now is done; adds what it costs."""
        free = max(heapq.heappop(self._pool), self.now)
        start = free if self.tuning.kind == "processes" else max(free, heapq.heappop(self._readers))
        decoding = start + read
        if self.tuning.kind == "threads":
            heapq.heappush(self._readers, decoding)
            decoding = max(decoding, heapq.heappop(self._decoders))
        workers = self._pool if self.tuning.kind == "processes" else self._decoders
        num_busy = 1 + sum(end > decoding for end in workers)
        gil = num_busy * self._trace.gil_share if self.tuning.kind == "threads" else 0.0
        busy = decode * max(1.0, num_busy / self._trace.num_cpus)
        taken = max(busy, decode * gil)
        cost.add(Counters(0, read, read, taken, busy))
        if self.tuning.kind == "threads":
            heapq.heappush(self._decoders, decoding + taken)
        heapq.heappush(self._pool, decoding + taken)
        return decoding + taken

    def _resize(self) -> None:
        tuning = self.tuning
        pool = tuning.workers if tuning.kind == "processes" else tuning.workers + tuning.requests
        for servers, count in ((self._pool, pool), (self._readers, tuning.requests), (self._decoders, tuning.workers)):
            starting = PROCESS_START_SECONDS if tuning.kind == "processes" else 0.0
            if starting and self._kind == "threads":
                servers.clear()
            servers += [self.now + starting] * (max(1, count) - len(servers))
            heapq.heapify(servers)
        self._kind = tuning.kind


def run_fixed(trace: Trace, tuning: Tuning) -> float:
    """The seconds of a trace with settings that stay."""
    return Simulated(trace, tuning).run()


def list_grid(trace: Trace, limits: Limits) -> list[Tuning]:
    """Every fixed setting that is allowed."""
    most = limits.most
    fits = min(most.steps, limits.max_bytes // trace.step_bytes)
    decodes = any(decode for _, decode, _ in trace.steps)
    workers = [count for count in (1, 2, 3, 4, 6, 8, 12, 16) if count <= most.workers] if decodes else [0]
    kinds = ["threads", "processes"] if decodes and most.kind == "processes" else ["threads"]
    steps = [count for count in (1, 2, 4, 8, 16, 32, 64, 128, 256) if count <= fits]
    requests = [count for count in (1, 2, 4, 8, 16, 32) if count <= most.requests]
    return [
        Tuning(depth, count, asked, kind)
        for depth in {*steps, fits}
        for count in workers
        for kind in kinds
        for asked in (requests if kind == "threads" else [1])
    ]


def fixed(tuning: Tuning, **changes: object) -> Tuning:
    return replace(tuning, **changes)
