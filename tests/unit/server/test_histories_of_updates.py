"""Seeded histories of deaths, lost connections and packets, joins, leaves: each finished step is in the table once.

Weights begin at zero and only grow, by whole numbers, so that a float32 sum shows one lost or repeated push whatever
the order, and an older row that is read after a newer one shows as a smaller number.
"""

import contextlib
import ctypes
import multiprocessing
import random
import subprocess
import threading
import time
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
from helpers.moving_servers import MovingServers, train

from kftrain.core.frames import Frame, FrameKind
from kftrain.errors import KftrainError
from kftrain.remote_parameters.client import RemoteTables
from kftrain.remote_parameters.link import ServerAddress
from kftrain.server.chain import Chain
from kftrain.server.optimizers import RowSgd
from kftrain.server.server import Server
from kftrain.server.state import ServerState
from kftrain.server.table import RowTable, TableSpec

pytestmark = pytest.mark.timeout(600)

SECRET = b"of the run"
KEYS = np.arange(30)
NUM_WORKERS = 3
NUM_STEPS = 5
RULES = [0, 1, None]

NUM_PROCESSES = 8
"""Histories at a time: they wait most of the time."""

CLONE_NEWNET = 0x40000000


class Network:
    """The network of this process, its own where that is allowed: then all packets can be lost for a while."""

    is_own = False

    def enter(self):
        self.is_own = ctypes.CDLL(None).unshare(CLONE_NEWNET) == 0
        self.set_link("up")

    def set_link(self, state):
        if self.is_own:
            subprocess.run(["ip", "link", "set", "lo", state], check=True)

    def lose_packets(self, seconds):
        self.set_link("down")
        time.sleep(seconds)
        self.set_link("up")


network = Network()


class Pair:
    """A server and its copy, one of which may die."""

    def __init__(self, folder, number, max_ahead):
        spec = TableSpec("t", 2, 1, initial="uniform", initial_scale=0.0)
        states = [ServerState([RowTable(spec, RowSgd(-1.0), folder)], max_ahead) for _ in range(2)]
        self._living = [Server(state, SECRET) for state in states]
        self._first, self._copy = self._living
        for server in (self._copy, self._first):
            server.start()
        self._first._copy = Chain(*self._copy.address, SECRET, self._first._hang_up)
        self.address = ServerAddress(f"s{number}", *self._first.address, ServerAddress("c", *self._copy.address))

    def kill(self, chance):
        """End the server, or its copy, in the middle of what it does."""
        if len(self._living) == 2 and not self._copy._has_taken_over:  # else one alone has it all
            self._living.remove(victim := chance.choice(self._living))
            victim.stop()

    def drop_connections(self, chance):
        """Drop what workers, or the two among themselves, have open."""
        for connection in list(chance.choice(self._living)._sockets):
            connection.close()

    def stop(self):
        for server in self._living:
            with contextlib.suppress(OSError):
                server.stop()


def draw_push(seed, worker, step):
    rng = np.random.default_rng([seed, worker, step])
    keys = np.unique(rng.integers(0, len(KEYS), 8))
    return keys, rng.integers(1, 9, (len(keys), 2)).astype(np.float32)


def work(servers, worker, seed, max_ahead, reads):
    """Train to the last step as a worker whose process may die anywhere in a step and begin again."""
    chance = random.Random(f"{seed} {worker}")

    def join():
        return RemoteTables([one.address for one in servers], {"t": 2}, worker, SECRET, 60.0, max_ahead)

    tables = join()
    while (step := tables.clock) < NUM_STEPS:
        reads.append(tables.pull("t", KEYS))
        tables.push("t", *draw_push(seed, worker, step))
        time.sleep(0.01 * chance.random())
        if chance.random() < 0.15:
            if len(servers) == 2 and chance.random() < 0.5:  # one server has acknowledged the step already
                link = tables._links[chance.randrange(2)]
                if link.clock == step:
                    link.push(Frame(FrameKind.FINISH, clock=step))
                    link.finish()
            tables.close()
            tables = join()
            continue
        tables.finish_step()
    return tables


def run_history(folder, seed):
    chance = random.Random(seed)
    max_ahead = RULES[seed % len(RULES)]
    servers = [Pair(folder, number, max_ahead) for number in range(1 + seed % 2)]
    reads = [[] for _ in range(NUM_WORKERS)]
    ends = [None] * NUM_WORKERS
    # All are there before any begins: a worker that comes later begins where the slowest is.
    for worker in range(NUM_WORKERS):
        RemoteTables([one.address for one in servers], {"t": 2}, worker, SECRET, 60.0).close()

    def train(worker):
        ends[worker] = work(servers, worker, seed, max_ahead, reads[worker])

    threads = [threading.Thread(target=train, args=(worker,), daemon=True) for worker in range(NUM_WORKERS)]
    for thread in threads:
        thread.start()
    for _ in range(4):
        time.sleep(0.03 * chance.random())
        if network.is_own and chance.random() < 0.1:
            network.lose_packets(0.2 * chance.random())
        getattr(chance.choice(servers), chance.choice(["kill", "drop_connections"]))(chance)
    for thread in threads:
        thread.join(60)
    assert None not in ends, f"seed {seed}: a worker waits for ever, or failed"
    expected = np.zeros((len(KEYS), 2), np.float32)
    for worker in range(NUM_WORKERS):
        for step in range(NUM_STEPS):
            keys, gradients = draw_push(seed, worker, step)
            expected[keys] += gradients
    reads[0].append(ends[0].pull("t", KEYS))
    for tables in ends:
        tables.close()
    for server in servers:
        server.stop()
    assert np.array_equal(reads[0][-1], expected), f"seed {seed}: a push is lost, or there twice"
    assert all((np.diff(of_worker, axis=0) >= 0).all() for of_worker in reads), f"seed {seed}: a row got older"


def run_history_of_moves(folder, seed):
    """Servers join and leave, also by dying on the way, connections break, and workers begin anew."""
    chance = random.Random(f"moves {seed}")
    table = "name: t, dim: 2, optimizer: sgd, learning_rate: 1.0, initial_scale: 0.0"
    rule = ["bsp", "ssp, max_steps_ahead: 1", "asp"][seed % 3]
    servers = MovingServers(folder, chance.randint(1, 3), table, rule)
    reads = [[] for _ in range(NUM_WORKERS)]
    chances = [random.Random(f"{seed} {worker}") for worker in range(NUM_WORKERS)]

    def take_step(workers, worker, step):
        chance = chances[worker]
        assert workers[worker].clock == step
        while True:
            tables = workers[worker]
            reads[worker].append(-tables.pull("t", KEYS))
            tables.push("t", *draw_push(seed, worker, step))
            if chance.random() > 0.1:
                tables.finish_step()
                return
            tables.close()  # its process died, and another one takes its place
            workers[worker] = servers.connect(worker, 2, RULES[seed % 3])

    def disturb(step):
        time.sleep(0.004 * chance.random())
        what = chance.choice(["ask", "ask", "kill", "drop", "nothing", "nothing"])
        if what == "ask" and not servers.wanted:
            servers.ask(chance.randint(1, 4))
        elif what == "kill":
            joining = [number for number in servers.servers if number >= len(servers.addresses)]
            servers.stop(chance.choice(joining)) if joining else None
        elif what == "drop" and network.is_own and chance.random() < 0.1:
            network.lose_packets(0.1 * chance.random())
        elif what == "drop":
            for connection in list(servers.servers[chance.randrange(len(servers.addresses))]._sockets):
                connection.close()

    num_steps = 24
    train(servers, NUM_WORKERS, num_steps, take_step, disturb, RULES[seed % 3], 2)
    expected = np.zeros((len(KEYS), 2), np.float32)
    for worker in range(NUM_WORKERS):
        for step in range(num_steps):
            keys, gradients = draw_push(seed, worker, step)
            expected[keys] += gradients
    rows = servers.collect()
    epoch = servers.count().epoch
    servers.stop_all()
    assert np.array_equal(rows["key"], np.unique(rows["key"])), f"seed {seed}: a row is on two servers"
    assert np.array_equal(-rows["numbers"], expected[rows["key"]]), f"seed {seed}: a push is lost, or there twice"
    assert np.count_nonzero(expected.any(1)) == len(rows), f"seed {seed}: a row is lost"
    assert all((np.diff(of_worker, axis=0) >= 0).all() for of_worker in reads), f"seed {seed}: a row got older"
    return epoch


def make_folder(tmp_path, seed):
    folder = tmp_path / str(seed)
    folder.mkdir()
    return folder


def test_every_finished_step_is_in_the_table_once_and_no_row_gets_older(tmp_path):
    for seed in range(12):
        run_history(make_folder(tmp_path, seed), seed)


def test_no_push_is_lost_or_done_twice_where_servers_join_and_leave(tmp_path):
    assert sum(run_history_of_moves(make_folder(tmp_path, seed), seed) for seed in range(8)) >= 8


def run_both(folder, seed):
    run_history(make_folder(folder, seed), seed)
    try:
        run_history_of_moves(make_folder(folder, f"moves-{seed}"), seed)
    except KftrainError as error:
        raise AssertionError(f"seed {seed}: {error.line}") from error


@pytest.mark.slow
def test_a_thousand_more_histories(tmp_path):
    seeds = range(12, 512)
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(NUM_PROCESSES, context, initializer=network.enter) as processes:
        for _ in processes.map(run_both, [tmp_path] * len(seeds), seeds):
            pass
