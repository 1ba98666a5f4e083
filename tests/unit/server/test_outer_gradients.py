"""Outer gradients through a real server: whatever breaks on the way, each is in one mean, and all get the same one."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kftrain import config
from kftrain.core.frames import Frame, FrameKind
from kftrain.core.row_encodings import RowEncoding
from kftrain.errors import LostPeerError, RetryableError
from kftrain.remote_parameters import rounds as remote
from kftrain.remote_parameters.control import ask_all
from kftrain.remote_parameters.link import ServerAddress
from kftrain.remote_parameters.rounds import RemoteRounds, Update
from kftrain.run.paths import RunPaths
from kftrain.server.process import RunServer

pytestmark = pytest.mark.timeout(120, func_only=True)

SECRET, LENGTH = b"only for this test", 64 * 7
QUORUM = ("train.outer.quorum=1", "train.outer.grace_seconds=0")
INTERVALS = [f"{key}=10" for key in ("train.log_interval_steps", "checkpoint.interval_steps", "train.outer.steps")]


class Servers:
    """Servers of a run with islands, and what connects to them."""

    def __init__(self, folder, num_islands, *settings):
        text = "evaluate: {interval_steps: 0}"
        sizes = [f"parallel.islands={num_islands}", "server.num_servers=2", f"launch.processes_per_node={num_islands}"]
        resolved = config.parse(text, [*sizes, *INTERVALS, *settings])
        paths = RunPaths.of(str(folder), "r")
        self.servers = [RunServer(paths, resolved, number, folder, SECRET) for number in range(2)]
        for server in self.servers:
            server.start()
        self.addresses = [ServerAddress(f"server-{n}", *one.address) for n, one in enumerate(self.servers)]
        self.clients = []
        self.begin()

    def begin(self, num_steps=0):
        """As the first worker of an attempt does."""
        ask_all(self.addresses, SECRET, Frame(FrameKind.LOAD, clock=num_steps))

    def connect(self, island, encoding=RowEncoding.FP32):
        self.clients.append(RemoteRounds(self.addresses, island, island, 0, SECRET, encoding))
        return self.clients[-1]

    def drop_connections(self):
        for server in self.servers:
            with server._changed:
                for connection in server._sockets:
                    connection.close()

    def close(self):
        for one in self.clients:
            one.close()
        for server in self.servers:
            server.stop()


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "BLOCK_NUMBERS", 64 * 2)
    opened = []

    def start(num_islands, *settings):
        opened.append(Servers(tmp_path, num_islands, *settings))
        return opened[-1]

    yield start
    for servers in opened:
        servers.close()


def draw(island, number):
    return np.random.default_rng([island, number]).integers(-9, 9, LENGTH).astype(np.float32)


def take_rounds(client, island, num_rounds, pause):
    """Each mean that an island gets; the last round is a meeting."""
    means = []
    for number in range(1, num_rounds + 1):
        pause(island, number)
        client.send(number, draw(island, number))
        updates, _ = client.meet(number, len(means), number == num_rounds, False)
        for update in updates:
            mean = np.empty(LENGTH, np.float32)
            client.fetch(update, mean)
            means.append((update.members, mean))
    return means


def run(servers, num_islands, num_rounds, pause=lambda island, number: None):
    clients = [servers.connect(island) for island in range(num_islands)]
    with ThreadPoolExecutor(num_islands) as pool:
        jobs = [pool.submit(take_rounds, client, n, num_rounds, pause) for n, client in enumerate(clients)]
        return [job.result() for job in jobs]


@pytest.mark.parametrize("settings", [(), QUORUM], ids=["all", "quorum"])
def test_each_gradient_is_in_one_mean_that_all_get_whatever_breaks(start, settings):
    servers, is_over, rng = start(3, *settings), threading.Event(), random.Random(0)

    def disturb():
        while not is_over.wait(0.05 * rng.random()):
            servers.drop_connections()

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        told = run(servers, 3, 12, lambda island, number: time.sleep(0.005 * island))
    finally:
        is_over.set()
        thread.join()
    merged = []
    for members, mean in told[0]:
        parts = list(zip(members[::2], members[1::2], strict=True))
        merged += parts
        np.testing.assert_allclose(mean, np.mean([draw(*part) for part in parts], axis=0), rtol=1e-6)
    assert sorted(merged) == [(island, number) for island in range(3) for number in range(1, 13)]
    for others in told[1:]:
        assert [members for members, _ in others] == [members for members, _ in told[0]]
        assert all(np.array_equal(one, other) for (_, one), (_, other) in zip(others, told[0], strict=True))
    # What all have taken is kept no longer.
    kept = [len(means) for server in servers.servers for means in server._outer._means.values()]
    assert max(kept) <= 1 and not any(server._outer._gradients for server in servers.servers)


def test_an_island_that_is_late_gets_what_it_has_missed(start):
    servers, gone = start(2, *QUORUM, "train.outer.max_rounds_ahead=9"), threading.Event()

    def wait(island, number):
        if island == 1 and number == 1:
            assert gone.wait(20), "the first island waits for the second one"
        if island == 0 and number == 4:
            gone.set()

    told = run(servers, 2, 6, wait)
    assert [members for members, _ in told[0][:3]] == [[0, 1], [0, 2], [0, 3]]
    assert [members for members, _ in told[1]] == [members for members, _ in told[0]]


def test_a_mean_of_int8_is_right_on_the_mean_and_the_same_for_all(start):
    servers = start(2)
    clients = [servers.connect(island, RowEncoding.INT8) for island in range(2)]
    vectors, means = np.zeros((2, LENGTH), np.float32), []
    vectors[0] = 1.0
    vectors[:, ::64] = 100.0  # beside it a unit is 1, and the mean of the others a half: to the nearest it would be 0
    with ThreadPoolExecutor(2) as pool:
        for number in range(1, 201):
            list(pool.map(lambda client, vector, number=number: client.send(number, vector), clients, vectors))
            told = list(pool.map(lambda client, number=number: client.meet(number, number - 1, True, False), clients))
            taken = [np.empty(LENGTH, np.float32) for _ in clients]
            for client, (updates, _), mean in zip(clients, told, taken, strict=True):
                client.fetch(updates[0], mean)
            assert np.array_equal(*taken)
            means.append(taken[0])
    assert set(np.unique(means)) == {0.0, 1.0, 100.0}
    assert np.abs(np.mean(means, axis=0)[1:64] - 0.5).max() < 0.15  # four standard deviations
    np.testing.assert_array_equal([mean[0] for mean in means], 100.0)


def test_an_attempt_before_is_out_and_waits_no_longer(start):
    servers = start(2)
    late = servers.connect(0)
    late.send(1, draw(0, 1))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(late.meet, 1, 0, False, False)
        while not servers.servers[0]._outer._rounds.announced[0]:
            time.sleep(0.01)
        servers.begin(num_steps=20)
        with pytest.raises((LostPeerError, RetryableError)):
            waiting.result(20)
    with pytest.raises(RetryableError, match="refused what an island sent"):
        late.send(3, draw(0, 3))
    told = run(servers, 2, 0)
    assert told == [[], []] and servers.servers[0]._outer._rounds.announced == [2, 2]


def test_of_a_vector_of_many_blocks_few_wait_for_an_answer(start, monkeypatch):
    """Else both ends could wait in a send, each for the other to read."""
    monkeypatch.setattr(remote, "BLOCK_NUMBERS", 64)
    asked, begin = [], remote.RoundLink.start

    def note(link, frames):
        asked.append(len(frames))
        begin(link, frames)

    monkeypatch.setattr(remote.RoundLink, "start", note)
    client, vector = start(2, *QUORUM).connect(0), np.arange(64 * 100, dtype=np.float32)
    client.send(1, vector)
    ((update,), _) = client.meet(1, 0, False, False)
    mean = np.empty_like(vector)
    client.fetch(update, mean)
    assert np.array_equal(mean, vector)
    assert sum(asked) == 100 + 1 + 100 and max(asked) <= remote.BLOCKS_AT_A_TIME


def test_a_server_may_be_away_once_more_after_a_long_wait(start, monkeypatch):
    """An island may wait for long, over a link that forgets connections that are silent."""
    monkeypatch.setattr(remote, "PATIENCE_SECONDS", 0.4)
    servers = start(2, *QUORUM)
    clients = [servers.connect(island) for island in range(2)]
    for island, client in enumerate(clients):
        client.send(1, draw(island, 1))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(clients[0].meet, 1, 0, True, False)
        for _ in range(3):
            time.sleep(0.6)
            servers.drop_connections()
        time.sleep(0.6)
        clients[1].meet(1, 0, True, False)
        assert waiting.result(20)[1]


GRADIENT, MEET, MEAN = FrameKind.GRADIENT, FrameKind.MEET, FrameKind.MEAN
ODD = [(GRADIENT, []), (GRADIENT, [2]), (GRADIENT, [-1]), (GRADIENT, [0, 0]), (MEET, []), (MEET, [0]), (MEET, [0, -1])]
ODD += [(MEET, [2**62, 0]), (MEAN, []), (MEAN, [0]), (MEAN, [0, 1]), (MEAN, [2, 0, 1]), (MEAN, [0, -1, 1])]


@pytest.mark.parametrize(("kind", "keys"), ODD)
def test_a_frame_that_means_nothing_is_refused_and_costs_nobody_anything(start, kind, keys):
    servers = start(2)
    client = servers.connect(0)
    client.send(1, draw(0, 1))
    link = client._links[0]
    link.start([Frame(kind, clock=1, keys=np.array(keys, np.int64), values=np.ones(64, np.float32))])
    with pytest.raises(RetryableError, match="refused"):
        link.finish()
    assert run(servers, 2, 1)[0][0][0] == [0, 1, 1, 1]


def test_a_mean_of_other_lengths_is_refused_and_takes_no_gradient(start):
    servers = start(2)
    clients = [servers.connect(island) for island in range(2)]
    clients[0].send(1, np.ones(64, np.float32))
    clients[1].send(1, np.ones(128, np.float32))
    for _ in range(2):
        with pytest.raises(RetryableError, match="a server refused"):
            servers.connect(0).fetch(Update(0, [0, 1, 1, 1]), np.empty(64, np.float32))
    assert sum(len(server._outer._gradients) for server in servers.servers) == 2


def test_a_server_waits_for_the_workers_that_it_has(start):
    servers = start(2)
    first, second = (servers.connect(island) for island in range(2))
    first.join()
    second.join()
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(servers.servers[0].wait_for_workers)
        first.close()
        time.sleep(0.2)
        assert not waiting.done()
        meeting = pool.submit(second.meet, 1, 0, True, False)  # for a worker that is gone
        while not servers.servers[0]._outer._rounds.announced[1]:
            time.sleep(0.01)
        assert not waiting.done()
        second.close()
        waiting.result(20)
        with pytest.raises(LostPeerError):
            meeting.result(20)


def test_a_grace_may_be_longer_than_a_thread_can_wait(start):
    servers = start(2, QUORUM[0], "train.outer.grace_seconds=1e10")
    assert [members for members, _ in run(servers, 2, 1)[0]] == [[0, 1, 1, 1]]


def test_what_no_island_has_sent_is_refused(start):
    servers = start(2)
    client = servers.connect(0)
    with pytest.raises(RetryableError, match="a server refused"):
        client.fetch(Update(0, [0, 1, 1, 1]), np.empty(LENGTH, np.float32))
    with pytest.raises(RetryableError, match="a server refused"):
        servers.connect(1).meet(7, 0, False, False)
