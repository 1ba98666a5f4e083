"""Servers of a run in threads of this process, and workers that go on with others between two steps."""

import contextlib
import functools
import threading
import time
import unittest.mock

import numpy as np

from kftrain import config as configuration
from kftrain.core.frames import Frame, FrameKind
from kftrain.errors import KftrainError
from kftrain.remote_parameters.client import RemoteTables
from kftrain.remote_parameters.control import ask_all, find_servers
from kftrain.remote_parameters.moving import ServerChange
from kftrain.run.membership import Membership, agree_on_servers, read_membership
from kftrain.run.paths import RunPaths
from kftrain.server.process import RunServer

SECRET = b"only for this test"


class MovingServers:
    """The servers of a run, to which others are added.

    Args:
        folder: The run's folder.
        num_servers: Servers at the beginning.
        table: The table's settings, as text.
        consistency: The clock rule's settings, as text.
    """

    def __init__(self, folder, num_servers, table, consistency="bsp"):
        self.paths = RunPaths(str(folder / "runs" / "r"))
        self._folder = folder
        text = f"server: {{num_servers: {num_servers}, consistency: {consistency}, tables: [{{{table}}}]}}"
        self.config = configuration.parse(text + "\nparallel: {strategy: ddp}\nrun: {seed: 5}\n")
        self.servers = {}
        self._left = set()
        self.start(range(num_servers))
        self.addresses = self.find(num_servers)
        self.wanted = []

    def start(self, numbers):
        for number in numbers:
            self.stop(number)
            self.servers[number] = RunServer(self.paths, self.config, number, self._folder, SECRET)
            self._left.discard(number)
            self.servers[number].when_left = functools.partial(self._left.add, number)
            self.servers[number].start()
            self.servers[number].publish_address()

    def find(self, num_servers):
        return find_servers(self.paths.servers, num_servers, 1)

    def stop(self, number):
        if number in self.servers:
            with contextlib.suppress(OSError):
                self.servers.pop(number).stop()

    def stop_all(self):
        for number in list(self.servers):
            self.stop(number)

    def ask(self, num_servers):
        """Start what is missing or has left, as a launcher does, and ask for it."""
        numbers = range(len(self.addresses), num_servers)
        self.start([number for number in numbers if number not in self.servers or number in self._left])
        self.wanted.append(num_servers)

    def ask_servers(self, kind, step=0):
        ask_all(self.addresses, SECRET, Frame(kind, clock=step, sequence=1))

    def count(self):
        return read_membership(self.paths, self.config.digest(), self.config.server.num_servers)

    def agree(self, num_servers):
        agree_on_servers(self.paths, self.config.digest(), Membership(self.count().epoch + 1, num_servers))

    def connect(self, worker, dim, max_ahead=0):
        return RemoteTables(self.addresses, {"t": dim}, worker, SECRET, 20.0, max_ahead)

    def change(self):
        """Build what changes the servers, in a thread."""
        return ServerChange(
            self.addresses, SECRET, lambda: self.find(self.wanted.pop(0)) if self.wanted else None, self.agree
        )

    def collect(self, kind="rows"):
        """Return the rows of all servers, by key, once those that are not theirs are dropped."""
        self.ask_servers(SETTLE, LAST_CHANGE)  # a change may have been on its way when the training ended
        numbers = range(len(self.addresses))
        wait_for(lambda: not any(self.servers[number]._num_drops for number in numbers))
        rows = np.concatenate([self.servers[number]._state.tables[0].view()[kind] for number in numbers])
        return rows[np.argsort(rows["key"], kind="stable")]


def train(servers, num_workers, num_steps, take_step, between=lambda step: None, max_ahead=0, dim=4):
    """Workers in threads that do what those of a run do: each ends its step, then all go on with the servers there are.

    `between` is called by the first one between two steps. Raises what the first one raises.
    """
    change = servers.change()
    workers = {}
    meeting = threading.Barrier(num_workers, timeout=50)
    errors = []

    def work(worker):
        try:
            workers[worker] = servers.connect(worker, dim, max_ahead)
            meeting.wait()
            for step in range(num_steps):
                take_step(workers, worker, step)
                meeting.wait()
                if worker == 0:
                    between(step)
                    if change.is_ready:
                        servers.addresses = list(change.finish())
                meeting.wait()
                workers[worker].switch(servers.addresses)
        except (KftrainError, threading.BrokenBarrierError) as error:
            errors.append(error)
            meeting.abort()

    patch = unittest.mock.patch("kftrain.remote_parameters.moving.LOOK_SECONDS", 0.02)
    patch.start()
    change.start()
    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in range(num_workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    change.close()
    change._thread.join(30)
    patch.stop()
    for tables in workers.values():
        tables.close()
    assert not any(thread.is_alive() for thread in threads), "a worker waits for ever"
    for error in errors:
        if isinstance(error, KftrainError):
            raise error
    assert not errors
    return change


def wait_for(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.005)


LAST_CHANGE = 1 << 40
"""Number of a change after all of a test."""

SETTLE, SAVE, LOAD = FrameKind.SETTLE, FrameKind.SAVE, FrameKind.LOAD
