"""Servers and workers over TCP: the bits of torch, the clock rule, and exactly once."""

import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

from kftrain.core import frames
from kftrain.errors import ConfigError, LostPeerError, RetryableError
from kftrain.models.sparse_embedding import SparseEmbedding, attach_tables, push_sparse_gradients
from kftrain.remote_parameters.client import RemoteTables
from kftrain.remote_parameters.link import ServerAddress
from kftrain.server.optimizers import RowAdagrad, RowAdam, RowSgd
from kftrain.server.server import Server
from kftrain.server.state import ServerState
from kftrain.server.table import RowTable, TableSpec, draw_initial_weights

pytestmark = pytest.mark.timeout(120)

SECRET = b"of the run"
SPEC = TableSpec("ids", 8, 5)
NUM_KEYS = 200
KEYS = np.arange(NUM_KEYS)


class Servers:
    """Some servers."""

    def __init__(self, folder, optimizer, max_ahead, count=1):
        self._folder = folder
        self._optimizer = optimizer
        self._max_ahead = max_ahead
        self.servers = [self._start() for _ in range(count)]
        self.addresses = [ServerAddress(f"s{number}", *one.address) for number, one in enumerate(self.servers)]

    def _start(self):
        state = ServerState([RowTable(SPEC, self._optimizer, self._folder)], self._max_ahead)
        server = Server(state, SECRET)
        server.start()
        return server

    def drop_connections(self):
        for server in self.servers:
            for connection in list(server._sockets):
                connection.close()

    def connect(self, worker=0, patience_seconds=20.0):
        return RemoteTables(self.addresses, {"ids": 8}, worker, SECRET, patience_seconds, self._max_ahead)

    def stop(self):
        for server in self.servers:
            server.stop()


@pytest.fixture
def start(tmp_path):
    begun = []

    def build(optimizer=RowSgd(0.1), max_ahead=0, count=1):  # noqa: B008
        begun.append(Servers(tmp_path, optimizer, max_ahead, count))
        return begun[-1]

    yield build
    for servers in begun:
        servers.stop()


CASES = {
    "sgd": (RowSgd(0.1), lambda weights: torch.optim.SGD(weights, lr=0.1), 1),
    "adagrad": (RowAdagrad(0.1, is_row_wise=False), lambda weights: torch.optim.Adagrad(weights, lr=0.1), 1),
    "adam": (RowAdam(0.01), lambda weights: torch.optim.SparseAdam(weights, lr=0.01), 1),
    "adam, three servers": (RowAdam(0.01), lambda weights: torch.optim.SparseAdam(weights, lr=0.01), 3),
}


@pytest.mark.parametrize("combiner", ["sum", "mean"])
@pytest.mark.parametrize("case", CASES)
def test_a_step_gives_the_bits_of_torch(start, case, combiner):
    ours, build, count = CASES[case]
    tables = start(ours, count=count).connect()
    model = nn.Sequential(SparseEmbedding("ids", 8, combiner))
    attach_tables(model, tables)
    initial = torch.from_numpy(draw_initial_weights(SPEC, KEYS))
    bag = nn.EmbeddingBag(NUM_KEYS, 8, sparse=True, mode=combiner, _weight=initial)
    optimizer, generator = build(bag.parameters()), torch.Generator().manual_seed(0)
    for _ in range(8):
        ids = torch.randint(0, NUM_KEYS, (90,), generator=generator)
        offsets, target = torch.tensor([0, 10, 10, 70]), torch.randn(4, 8, generator=generator)
        rows = model[0](ids, offsets)
        optimizer.zero_grad()
        expected = bag(ids, offsets)
        assert torch.equal(rows, expected)
        (rows - target).pow(2).sum().backward()
        (expected - target).pow(2).sum().backward()
        bag.weight.grad = bag.weight.grad.coalesce()  # SGD would else add one duplicate after the other
        optimizer.step()
        push_sparse_gradients(model)
        tables.finish_step()
        assert np.array_equal(tables.pull("ids", KEYS), bag.weight.detach().numpy())
    tables.close()


def test_an_embedding_in_evaluation_reads_unknown_keys_and_pushes_nothing(start):
    tables = start().connect()
    embedding = SparseEmbedding("ids", 8).eval()
    embedding.attach(tables)
    ids = torch.tensor([[5, -(2**63)], [2**63 - 1, 5]])
    rows = draw_initial_weights(SPEC, ids.numpy().reshape(-1)).reshape(2, 2, 8)
    torch.testing.assert_close(embedding(ids), torch.from_numpy(rows.sum(1)))
    embedding.push_gradients()
    tables.finish_step()
    assert np.array_equal(tables.pull("ids", np.array([5])), rows[:1, 0])
    tables.close()


def test_micro_batches_are_summed(start):
    tables = start(RowSgd(1.0)).connect()
    embedding = SparseEmbedding("ids", 8)
    embedding.attach(tables)
    for ids in ([1, 2, 2], [2, 3]):
        embedding(torch.tensor([ids])).sum().backward()
    embedding.push_gradients()
    tables.finish_step()
    moved = draw_initial_weights(SPEC, KEYS[:5]) - tables.pull("ids", KEYS[:5])
    np.testing.assert_allclose(moved.mean(1), [0, 1, 3, 1, 0], atol=1e-6)
    tables.close()


def draw_gradient(worker, step):
    rng = np.random.default_rng([worker, step])
    keys = np.unique(rng.integers(0, NUM_KEYS, 40))
    return keys, rng.standard_normal((len(keys), 8)).astype(np.float32)


def sum_steps(num_workers, num_steps):
    """Bulk-synchronous SGD in twelve lines: gradients of a step summed over workers in their order."""
    weights = torch.from_numpy(draw_initial_weights(SPEC, KEYS))
    for step in range(num_steps):
        total, is_touched = torch.zeros(NUM_KEYS, 8), torch.zeros(NUM_KEYS, dtype=torch.bool)
        for worker in range(num_workers):
            keys, gradient = draw_gradient(worker, step)
            total[keys] += torch.from_numpy(gradient)
            is_touched[keys] = True
        weights[is_touched] = weights[is_touched].add(total[is_touched], alpha=-0.1)
    return weights.numpy()


def run_workers(servers, num_workers, num_steps, pause=lambda worker, step: None):
    """Train in threads; return what each worker pulled in each step, and clients that are still connected."""
    clients = [servers.connect(worker) for worker in range(num_workers)]
    pulled = [[] for _ in clients]

    def work(worker):
        for step in range(num_steps):
            pulled[worker].append(clients[worker].pull("ids", KEYS))
            clients[worker].push("ids", *draw_gradient(worker, step))
            pause(worker, step)
            clients[worker].finish_step()

    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in range(num_workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a worker waits for ever"
    return pulled, clients


def test_bulk_synchronous_workers_read_the_same_bits_whoever_is_first(start):
    pulled, clients = run_workers(start(count=2), 3, 6, lambda worker, step: time.sleep(0.01 * ((worker + step) % 3)))
    for step in range(6):
        assert all(np.array_equal(weights[step], sum_steps(3, step)) for weights in pulled)
    for client in clients:
        client.close()


@pytest.mark.parametrize("max_ahead", [0, 2])
def test_a_worker_waits_for_the_slowest(start, max_ahead):
    servers = start(max_ahead=max_ahead)
    fast, slow = servers.connect(0), servers.connect(1)
    for step in range(max_ahead + 1):
        fast.pull("ids", KEYS)
        fast.push("ids", *draw_gradient(0, step))
        fast.finish_step()
    waits = ThreadPoolExecutor(1).submit(fast.pull, "ids", KEYS)
    time.sleep(0.2)
    assert not waits.done()
    slow.finish_step()
    assert np.allclose(waits.result(20), sum_steps(1, max_ahead + 1), atol=1e-5)
    fast.close()
    slow.close()


def test_asynchronous_workers_wait_for_nobody_and_lose_nothing(start):
    servers = start(max_ahead=None)
    idle = servers.connect(7)
    _, clients = run_workers(servers, 3, 10)
    weights = idle.pull("ids", KEYS)
    np.testing.assert_allclose(weights, sum_steps(3, 10), atol=1e-4)
    for client in (*clients, idle):
        client.close()


@pytest.mark.parametrize("max_ahead", [0, 2])
def test_no_read_is_staler_than_the_rule_allows(start, max_ahead):
    servers = start(max_ahead=max_ahead, count=2)
    _, clients = run_workers(servers, 3, 12, lambda worker, step: time.sleep(0.01 * (worker == 2)))
    observed = sum((client.staleness for client in clients), Counter())
    assert max(observed) == max_ahead and observed.total() == 3 * 12 * 2  # a read of each server
    for client in clients:
        client.close()


def test_a_stale_read_is_a_bug(start):
    servers = start(max_ahead=None)
    slow, fast = servers.connect(1), servers.connect(0)
    fast._max_ahead = 1  # stricter than the servers
    for _ in range(2):
        fast.pull("ids", KEYS)
        fast.finish_step()
    with pytest.raises(AssertionError, match="2 steps behind"):
        fast.pull("ids", KEYS)
    fast.close()
    slow.close()


def test_a_push_of_several_parts_is_one_update(start, monkeypatch):
    monkeypatch.setattr(frames, "PART_BYTES", 8 * 4 * 7)  # seven rows
    tables = start(RowAdam(0.01), count=2).connect()
    weights = nn.Embedding(NUM_KEYS, 8, sparse=True, _weight=torch.from_numpy(draw_initial_weights(SPEC, KEYS)))
    optimizer = torch.optim.SparseAdam(weights.parameters(), lr=0.01)
    for step in range(3):
        keys, gradient = draw_gradient(0, step)
        weights.weight.grad = torch.sparse_coo_tensor(keys[None], gradient, (NUM_KEYS, 8)).coalesce()
        optimizer.step()
        tables.push("ids", keys, gradient)
        tables.finish_step()
        assert np.array_equal(tables.pull("ids", KEYS), weights.weight.detach().numpy())
    tables.close()


def test_what_a_dead_process_left_in_the_network_is_not_its_successors(start):
    servers = start(RowSgd(-1.0), max_ahead=None)
    dead, successor = servers.connect(), servers.connect()
    before = successor.pull("ids", KEYS)
    dead.push("ids", KEYS, np.full((NUM_KEYS, 8), 5, np.float32))
    connection = dead._links[0]._changes._connection
    connection.settimeout(5)
    while connection.recv(1):  # the refusal, then the end
        pass
    successor.push("ids", KEYS, np.ones((NUM_KEYS, 8), np.float32))
    successor.finish_step()
    np.testing.assert_allclose(successor.pull("ids", KEYS) - before, 1, atol=1e-6)
    dead.close()
    successor.close()


def test_every_update_is_in_the_table_once_whatever_connection_breaks(start):
    servers, is_over = start(count=2), threading.Event()

    def disturb():
        rng = random.Random(0)
        while not is_over.wait(0.02 + 0.1 * rng.random()):
            servers.drop_connections()

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        pulled, clients = run_workers(servers, 2, 15, lambda worker, step: time.sleep(0.01))
    finally:
        is_over.set()
        thread.join()
    for step in range(15):
        assert all(np.array_equal(weights[step], sum_steps(2, step)) for weights in pulled)
    assert np.array_equal(clients[0].pull("ids", KEYS), sum_steps(2, 15))
    for client in clients:
        client.close()


def test_a_server_whose_process_is_gone_is_not_waited_for(start):
    servers = start(count=2)
    tables = servers.connect(patience_seconds=3600)
    servers.servers[1].stop()
    tables.push("ids", *draw_gradient(0, 0))
    with pytest.raises(LostPeerError, match="cannot be reached"):
        tables.finish_step()
    tables.close()


def test_another_secret_and_nonsense_are_refused(start):
    servers = start()
    with pytest.raises(ConfigError, match="another secret"):
        RemoteTables(servers.addresses, {"ids": 8}, 0, b"guessed", 1.0)
    tables = servers.connect()
    tables.push("ids", np.array([1, 1]), np.zeros((2, 8), np.float32))
    with pytest.raises(RetryableError, match="refused"):
        tables.finish_step()
    tables.close()
