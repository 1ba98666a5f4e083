"""Chains of two servers: whoever dies, and whenever, each acknowledged update is in the tables once."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers.moving_servers import wait_for

from kftrain.core.frames import Frame, FrameKind, FrameSocket
from kftrain.errors import RetryableError
from kftrain.remote_parameters.client import RemoteTables
from kftrain.remote_parameters.link import ServerAddress
from kftrain.server.chain import Chain
from kftrain.server.optimizers import RowAdagrad
from kftrain.server.server import Server
from kftrain.server.state import ServerState
from kftrain.server.table import RowTable, TableSpec

pytestmark = pytest.mark.timeout(60)

SECRET = b"of the run"
SPEC = TableSpec("ids", 4, 5)
NUM_STEPS, NUM_WORKERS = 12, 2


def build_state(folder):
    return ServerState([RowTable(SPEC, RowAdagrad(0.1), folder)], 0)


class Pair:
    """A server and its copy."""

    def __init__(self, folder):
        self.servers = [Server(build_state(folder), SECRET) for _ in range(2)]
        self.first, self.copy = self.servers
        for server in (self.copy, self.first):
            server.start()
        self.first._copy = Chain(*self.copy.address, SECRET, self.first._hang_up)
        self.address = ServerAddress("s", *self.first.address, ServerAddress("s", *self.copy.address))

    def connect(self, worker):
        return RemoteTables([self.address], {"ids": 4}, worker, SECRET, 20.0, 0)


@pytest.fixture
def pair(tmp_path):
    pair = Pair(tmp_path)
    yield pair
    for server in pair.servers:
        with contextlib.suppress(OSError):
            server.stop()


def draw_push(worker, step):
    random = np.random.default_rng([worker, step])
    keys = np.unique(random.integers(0, 40, 12))
    return keys, random.standard_normal((len(keys), 4)).astype(np.float32)


def expected_rows(folder):
    """The rows that the same frames give to a state without any network."""
    state = build_state(folder)
    for worker in range(NUM_WORKERS):
        state.apply(Frame(FrameKind.JOIN, worker=worker))
    for step in range(NUM_STEPS):
        for worker in range(NUM_WORKERS):
            keys, gradients = draw_push(worker, step)
            push = {"worker": worker, "keys": keys, "values": gradients.reshape(-1)}
            state.apply(Frame(FrameKind.PUSH, sequence=2 * step + 1, **push))
            state.apply(Frame(FrameKind.FINISH, worker=worker, sequence=2 * step + 2, clock=step))
    return sort_rows(state)


def sort_rows(state):
    rows = state.tables[0].view()["rows"]
    return rows[np.argsort(rows["key"])]


def train(pair, during=lambda worker, step: None):
    """Two workers, each in a thread; `during` is called between the push and the end of each step."""
    workers = [pair.connect(worker) for worker in range(NUM_WORKERS)]
    errors = []

    def work(worker):
        try:
            for step in range(NUM_STEPS):
                keys, gradients = draw_push(worker, step)
                workers[worker].pull("ids", keys)
                workers[worker].push("ids", keys, gradients)
                during(worker, step)
                workers[worker].finish_step()
        except BaseException as error:  # noqa: BLE001 - shown by the caller
            errors.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(NUM_WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert not errors and not any(thread.is_alive() for thread in threads), errors
    for worker in workers:
        worker.close()


def test_both_have_what_is_acknowledged(pair, tmp_path):
    train(pair)
    assert sort_rows(pair.first._state).tobytes() == sort_rows(pair.copy._state).tobytes()
    assert sort_rows(pair.copy._state).tobytes() == expected_rows(tmp_path).tobytes()


@pytest.mark.parametrize("seed", range(6))
def test_a_server_that_dies_at_any_time_costs_nothing(pair, tmp_path, seed):
    delay = np.random.default_rng(seed).uniform(0, 0.03)
    killer = threading.Thread(target=lambda: (time.sleep(delay), pair.first.stop()))

    def during(worker, step):
        if (worker, step) == (0, 2):
            killer.start()
        time.sleep(0.002)

    train(pair, during)
    killer.join()
    assert pair.copy._has_taken_over
    assert sort_rows(pair.copy._state).tobytes() == expected_rows(tmp_path).tobytes()


def test_a_server_goes_on_without_its_copy(pair, tmp_path):
    train(pair, lambda worker, step: pair.copy.stop() if (worker, step) == (1, 3) else None)
    assert sort_rows(pair.first._state).tobytes() == expected_rows(tmp_path).tobytes()


def test_a_server_whose_copy_has_taken_over_acknowledges_nothing(pair, tmp_path):
    """One worker alone loses its way to a server that lives: all go to the copy, and nothing is lost between them."""
    moved = threading.Event()

    def during(worker, step):
        if (worker, step) == (0, 4) and not moved.is_set():
            moved.set()
            connection = pair.first._connections[0]
            for link in links_of_worker_0:
                link.address = pair.address.copy
            connection.close()

    links_of_worker_0 = []
    connect = pair.connect

    def remember(worker):
        tables = connect(worker)
        if worker == 0:
            links_of_worker_0.extend(tables._links)
        return tables

    pair.connect = remember
    train(pair, during)
    assert pair.first._is_stopped
    assert sort_rows(pair.copy._state).tobytes() == expected_rows(tmp_path).tobytes()


def test_a_copy_that_lacks_acknowledged_steps_is_not_trained_on(pair):
    tables = pair.connect(0)
    keys, gradients = draw_push(0, 0)
    tables.push("ids", keys, gradients)
    tables.finish_step()
    pair.copy._state.sequences[0] -= 1
    pair.first.stop()
    with pytest.raises(RetryableError, match="lacks what was acknowledged"):
        tables.finish_step()
    tables.close()


def test_nobody_reads_what_a_servers_end_may_take_back(pair, monkeypatch):
    writer, reader = pair.connect(0), pair.connect(1)
    keys, gradients = draw_push(0, 0)
    before = reader.pull("ids", keys)
    may_apply, record = threading.Event(), pair.copy._record

    def record_late(frame, connection):
        may_apply.wait(20)
        return record(frame, connection)

    monkeypatch.setattr(pair.copy, "_record", record_late)
    for worker in (reader, writer):
        worker.push("ids", keys, gradients)
    threads = [threading.Thread(target=one.finish_step) for one in (writer, reader)]
    for thread in threads:
        thread.start()
    wait_for(lambda: min(pair.first._state.clocks.values()) == 1)
    read = ThreadPoolExecutor(1).submit(reader.pull, "ids", keys)
    time.sleep(0.2)
    assert not read.done() and all(thread.is_alive() for thread in threads)
    may_apply.set()
    assert (read.result(20) != before).all()
    for thread in threads:
        thread.join(20)
    for worker in (writer, reader):
        worker.close()


def test_what_comes_late_over_a_broken_connection_of_a_server_is_no_workers(pair):
    """A server has made its connection anew; a JOIN that it sent over the one before arrives after that."""
    where = (*pair.copy.address, SECRET, "the copy", 5.0)
    before, now = FrameSocket.connect(*where), FrameSocket.connect(*where)
    for connection in (before, now):
        connection.send(Frame(FrameKind.FOLLOW))
        assert connection.receive().kind is FrameKind.POSITION
    before.send(Frame(FrameKind.JOIN, worker=0))
    assert before.receive().kind is FrameKind.REFUSAL and not pair.copy._has_taken_over
    now.send(Frame(FrameKind.JOIN, worker=0))
    assert now.receive().kind is FrameKind.POSITION
    for connection in (before, now):
        connection.close()
