"""Processes that stay: each forms one gloo world with its peers, and does one job after the other."""

import collections
import contextlib
import multiprocessing
import os
import traceback
import unittest.mock
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from kftrain.errors import KftrainError
from kftrain.parallel.world import join_world
from kftrain.process import store_socket

SERVER = multiprocessing.get_context("forkserver")
"""It has imported torch once, and has no threads: what is forked from it starts in a moment."""

COLLECTIVE_SECONDS = 600.0
JOB_SECONDS = 300
"""Counted in slices, so that a pause of the whole machine is not taken for a hang."""
GRACE_SECONDS = 20


@dataclass(frozen=True)
class Answer:
    """What came of a job on one process."""

    kind: str
    """`done`; `refused`: it has raised one of kftrain's errors; `failed`: any other; `silent`."""
    value: object = None
    """What the job has returned, the line of the error, or the traceback."""


class Pool:
    """So many processes, started when the first job comes, and again after one that has left them apart."""

    def __init__(self, size, environments=None):
        self.size = size
        self._environments = environments or [{}] * size
        self._processes = []
        self._pipes = []

    def run(self, function, *arguments, seconds=JOB_SECONDS):
        """`function(world, *arguments)` on each process; the answers, by rank. It stands at the top of a module."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, arguments))
        answers = self._gather(seconds)
        if any(answer.kind not in ("done", "refused") for answer in answers):
            self.close()
        return answers

    def close(self):
        """Ends the processes; a next job starts them again."""
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()
        self._processes = []
        self._pipes = []

    def _start(self):
        SERVER.set_forkserver_preload(["torch", "kftrain.train.session", "torch._dynamo", "pytest"])
        with store_socket.open_listener(self.size) as listener:
            port = listener.getsockname()[1]
            for rank in range(self.size):
                pipe, theirs = SERVER.Pipe()
                arguments = (self._names(rank, port), theirs, None if rank else listener)
                process = SERVER.Process(target=_serve, args=arguments, daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(pipe)

    def _names(self, rank, port):
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.size, "MASTER_PORT": port}
        names |= {"MASTER_ADDR": "127.0.0.1", **self._environments[rank]}
        return {name: str(value) for name, value in names.items()}

    def _gather(self, seconds):
        """The answers of all; those that are still silent some seconds after another one has failed have none."""
        answers: list[Any] = [None] * self.size
        while seconds > 0 and None in answers:
            for rank, pipe in enumerate(self._pipes):
                if answers[rank] is None and pipe.poll(0.05):
                    try:
                        answers[rank] = pipe.recv()
                    except EOFError:
                        answers[rank] = Answer("failed", f"the process has ended: {self._processes[rank].exitcode}")
                    if answers[rank].kind != "done":
                        seconds = min(seconds, GRACE_SECONDS)
            seconds -= 0.05 * answers.count(None)
        return [answer or Answer("silent") for answer in answers]


class Pools:
    """One pool for each world size."""

    def __init__(self):
        self._pools = {}

    def run(self, size, function, *arguments, seconds=JOB_SECONDS):
        """See `Pool.run`."""
        return self._pools.setdefault(size, Pool(size)).run(function, *arguments, seconds=seconds)

    def close(self):
        """Ends all of them."""
        for pool in self._pools.values():
            pool.close()


def _serve(environment, pipe, listener):
    os.environ.update(environment)
    if listener is not None:
        os.environ[store_socket.STORE_ENV] = str(listener.detach())
    torch.set_num_threads(1)
    with join_world(COLLECTIVE_SECONDS) as world, contextlib.suppress(EOFError):
        dist.new_group = kept = KeptGroups()
        while True:
            function, arguments = pipe.recv()
            kept.begin_job()
            pipe.send(_answer(function, world, arguments))


class KeptGroups:
    """Gives the next job the groups of the one before, where it asks for the same ones in the same order.

    Each group has a thread that gloo wakes a hundred times a second: those of some hundred rows took half of a machine.
    torch's caches of DTensor hold the groups, so that they do not end with the job.
    """

    def __init__(self):
        self._make = dist.new_group
        self._groups = {}
        self._counts = collections.Counter()

    def begin_job(self):
        self._counts.clear()

    def __call__(self, ranks=None, **settings):
        ranks = None if ranks is None else tuple(ranks)
        key = ranks, self._counts[ranks]
        self._counts[ranks] += 1
        if key not in self._groups:
            # torch names a group by the number of groups so far, which differs where some processes kept more of them.
            with unittest.mock.patch.object(c10d, "_process_group_name", lambda *_, **__: "-".join(map(str, key))):
                self._groups[key] = self._make(ranks, **settings)
        return self._groups[key]


def _answer(function, world, arguments):
    try:
        return Answer("done", function(world, *arguments))
    except KftrainError as error:
        return Answer("refused", f"{type(error).__name__}: {error.line}")
    except Exception:  # noqa: BLE001 - whatever it is, the test is told
        return Answer("failed", traceback.format_exc())
