"""Rows that go to other servers while they are updated: each is there once, with all its bits, whoever dies."""

import itertools
import threading
import time

import numpy as np
import pytest
from helpers import moving_servers
from helpers.moving_servers import LOAD, SAVE, MovingServers, wait_for
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain.core.frames import Frame, FrameKind
from kftrain.errors import KftrainError, RetryableError
from kftrain.remote_parameters.control import ask_all
from kftrain.run.commit import CheckpointName
from kftrain.server import moving
from kftrain.server.moving import RowMove, build_ring, drop_foreign_rows, pack_rows, take_clocks, unpack_rows
from kftrain.server.optimizers import RowAdagrad
from kftrain.server.state import ServerState
from kftrain.server.table import RowTable, TableSpec

pytestmark = pytest.mark.timeout(120)

NUM_WORKERS = 2


def draw_push(worker, step, num_keys=200):
    rng = np.random.default_rng([worker, step])
    keys = np.unique(rng.integers(0, num_keys, 30)) * 2_654_435_761
    return keys, rng.standard_normal((len(keys), 4)).astype(np.float32)


def build_state(folder, num_sightings=1, expiry_steps=0):
    spec = TableSpec("t", 4, 5, num_sightings=num_sightings, expiry_steps=expiry_steps)
    state = ServerState([RowTable(spec, RowAdagrad(0.05), folder)], 0)
    for worker in range(NUM_WORKERS):
        state.apply(Frame(FrameKind.JOIN, worker=worker))
    return state


def take_step(states, owners, step):
    """A step of all workers, of which each server gets its keys."""
    for worker in range(NUM_WORKERS):
        keys, gradients = draw_push(worker, step)
        of_keys = owners(keys)
        for number, state in enumerate(states):
            is_own = of_keys == number
            push = {"keys": keys[is_own], "values": gradients[is_own].ravel(), "worker": worker}
            state.apply(Frame(FrameKind.PUSH, sequence=state.sequences[worker] + 1, **push))
            frame = Frame(FrameKind.FINISH, worker=worker, sequence=state.sequences[worker] + 1)
            state.apply(frame)


def sort_rows(states, kind):
    rows = np.concatenate([state.tables[0].view()[kind] for state in states])
    return rows[np.argsort(rows["key"], kind="stable")]


class Wire:
    """A connection to a state of this process."""

    def __init__(self, state):
        self._state = state

    def send(self, frame):
        if frame.kind is FrameKind.ROWS:
            self._state.tables[0].put_rows(unpack_rows(frame), bool(frame.sequence))
        else:
            assert not take_clocks(self._state, frame)

    def receive(self):
        return Frame(FrameKind.POSITION)

    def close(self):
        pass


@settings(max_examples=20, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    passes=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    num_sightings=st.integers(1, 2),
    expiry_steps=st.sampled_from([0, 3, 40]),
)
def test_rows_that_moved_are_those_of_one_server(tmp_path_factory, sizes, passes, num_sightings, expiry_steps):
    """`passes`: steps that are taken before each pass."""
    folder = tmp_path_factory.mktemp("moving")
    kind = {"num_sightings": num_sightings, "expiry_steps": expiry_steps}
    states, whole, step = [build_state(folder, **kind) for _ in range(sizes[0])], build_state(folder, **kind), 0
    for before, after in itertools.pairwise(sizes):
        new = [ServerState([RowTable(whole.tables[0].spec, RowAdagrad(0.05), folder)], 0) for _ in range(after)]
        reached = [*states, *new[before:]]
        lock = threading.Condition()
        moves = [
            RowMove(state, lock, n, after, lambda n, reached=reached: Wire(reached[n]), 0)
            for n, state in enumerate(states)
        ]
        for num_steps in passes:
            for _ in range(num_steps):
                take_step(states, build_ring(before).find_owners, step)
                take_step([whole], lambda keys: np.zeros(len(keys), int), step)
                step += 1
            for move in moves:
                move.copy()
        for move in moves:
            move.finish()
            move.close()
        states = reached[:after]
        owners = build_ring(after).find_owners
        for number, state in enumerate(states):
            drop_foreign_rows(state.tables, lock, lambda keys, number=number, owners=owners: owners(keys) == number)
            assert state.clocks == whole.clocks
        for name in ("rows", "candidates"):
            assert sort_rows(states, name).tobytes() == sort_rows([whole], name).tobytes()
    for _ in range(3):
        take_step(states, build_ring(sizes[-1]).find_owners, step)
        take_step([whole], lambda keys: np.zeros(len(keys), int), step)
        step += 1
    for name in ("rows", "candidates"):
        assert sort_rows(states, name).tobytes() == sort_rows([whole], name).tobytes()


def test_rows_keep_their_bits_on_the_wire(tmp_path):
    state = build_state(tmp_path)
    take_step([state], lambda keys: np.zeros(len(keys), int), 0)
    rows = state.tables[0].view()["rows"].copy()
    rows["numbers"].view(np.uint32)[0, 0] = 0x7F800001  # a signalling NaN
    frame = pack_rows(0, rows, False, 0)
    assert unpack_rows(frame).tobytes() == rows.tobytes()


def test_a_server_hands_nothing_over_in_the_middle_of_a_step(tmp_path):
    state = build_state(tmp_path)
    move = RowMove(state, threading.Condition(), 0, 1, lambda number: None, 0)
    state.apply(Frame(FrameKind.PUSH, sequence=1, keys=np.arange(2), values=np.ones(8, np.float32)))
    with pytest.raises(RetryableError, match="a step is not over"):
        move.finish()
    state.apply(Frame(FrameKind.FINISH, sequence=2))
    with pytest.raises(RetryableError, match="a step is not over"):  # of the other worker
        move.finish()


def test_clocks_that_are_not_those_of_the_receiver_are_refused(tmp_path):
    state = build_state(tmp_path)
    assert not take_clocks(state, Frame(FrameKind.CLOCKS, 1, keys=np.array([0, 0, 0, 1, 0])))
    assert "others are at {0: 0, 1: 1}" in take_clocks(
        state, Frame(FrameKind.CLOCKS, 1, keys=np.array([0, 0, 0, 1, 1]))
    )
    assert "[7]" in take_clocks(state, Frame(FrameKind.CLOCKS, 1, keys=np.array([7, 0, 0, 1, 0])))


TABLE = "name: t, dim: 4, optimizer: row_wise_adagrad"


@pytest.fixture
def start(tmp_path):
    begun = []

    def build(num_servers, table=TABLE):
        begun.append(MovingServers(tmp_path, num_servers, table))
        return begun[-1]

    yield build
    for servers in begun:
        servers.stop_all()


def push_and_finish(workers, worker, step):
    tables = workers[worker]
    keys, gradients = draw_push(worker, step)
    tables.pull("t", keys)
    tables.push("t", keys, gradients)
    tables.finish_step()


def expected_rows(folder, num_steps, kind="rows", **of_table):
    state = build_state(folder, **of_table)
    for step in range(num_steps):
        take_step([state], lambda keys: np.zeros(len(keys), int), step)
    return sort_rows([state], kind)


def test_a_message_of_a_change_that_has_ended_takes_nothing_from_the_next_one(start):
    """It comes late, has rows copied to a server that is replaced then, and those must be copied again."""
    servers = start(1)
    moving_servers.train(servers, NUM_WORKERS, 5, push_and_finish)
    num_copied = []
    for change in (1, 2):
        servers.start([1])
        (answer,) = ask_all(servers.addresses, moving_servers.SECRET, Frame(FrameKind.MOVE, 2, clock=change))
        num_copied.append((answer.clock, len(servers.servers[1]._state.tables[0].view()["rows"])))
    assert num_copied[0] == num_copied[1] and num_copied[0][0] == num_copied[0][1] > 0


def ask(servers, number, frame):
    (answer,) = ask_all([servers.find(number + 1)[number]], moving_servers.SECRET, frame)
    return answer.clock


@pytest.fixture
def joined(start):
    """A server with rows, another one that is to have some of them, and the number of rows that it has."""
    servers = start(1)
    moving_servers.train(servers, NUM_WORKERS, 5, push_and_finish)
    servers.start([1])
    return servers, lambda: len(servers.servers[1]._state.tables[0])


def test_a_change_that_is_over_does_not_begin_again(joined):
    servers, count_copied = joined
    ask(servers, 0, Frame(FrameKind.SETTLE, clock=3))
    with pytest.raises(RetryableError):
        ask(servers, 0, Frame(FrameKind.MOVE, 2, clock=3))
    assert not count_copied()
    assert ask(servers, 0, Frame(FrameKind.MOVE, 2, clock=4)) == count_copied() > 0


def test_a_change_that_is_over_before_its_servers_are_connected_takes_nothing_from_the_next_one(joined):
    servers, count_copied = joined
    owner, connects, may_connect = servers.servers[0], threading.Event(), threading.Event()
    connect = owner._connect_to

    def connect_late(number):
        owner._connect_to = connect
        connects.set()
        assert may_connect.wait(60)
        return connect(number)

    owner._connect_to = connect_late
    errors = []
    late = threading.Thread(target=lambda: note_error(errors, servers, Frame(FrameKind.MOVE, 2, clock=1)))
    late.start()
    assert connects.wait(60)
    ask(servers, 0, Frame(FrameKind.SETTLE, clock=1))
    num_rows = ask(servers, 0, Frame(FrameKind.MOVE, 2, clock=2))
    assert num_rows == count_copied() > 0
    take_own_step(owner)
    may_connect.set()
    late.join(60)
    assert len(errors) == 1
    assert ask(servers, 0, Frame(FrameKind.MOVE, 2, clock=2)) > 0, "the late one has taken what was updated"


def note_error(errors, servers, frame):
    try:
        ask(servers, 0, frame)
    except RetryableError as error:
        errors.append(error)


def take_own_step(server):
    """Of a server that is alone, without workers."""
    with server._changed:
        keys, gradients = draw_push(0, 5)
        server._state.tables[0].update(keys, gradients)


def test_rows_of_an_earlier_change_do_not_take_the_place_of_newer_ones(joined):
    servers, _ = joined
    ask(servers, 0, Frame(FrameKind.MOVE, 2, clock=2))
    state = servers.servers[1]._state
    rows = state.tables[0].view()["rows"].copy()
    older = rows.copy()
    older["numbers"] -= 1
    for late in (pack_rows(0, older, False, 1), Frame(FrameKind.CLOCKS, 1, clock=1, keys=np.array([9, 0, 9]))):
        with pytest.raises(RetryableError):
            ask(servers, 1, late)
    assert state.tables[0].view()["rows"].copy().tobytes() == rows.tobytes() and not state.clocks


def test_rows_of_a_change_that_is_over_are_not_taken(joined):
    servers, count_copied = joined
    ask(servers, 0, Frame(FrameKind.MOVE, 2, clock=2))
    late = pack_rows(0, servers.servers[1]._state.tables[0].view()["rows"].copy(), False, 2)
    ask(servers, 1, Frame(FrameKind.SETTLE, clock=2))
    with pytest.raises(RetryableError):
        ask(servers, 1, late)
    wait_for(lambda: not servers.servers[1]._num_drops)
    assert not count_copied()


def test_the_end_of_an_earlier_change_drops_nothing(joined):
    servers, count_copied = joined
    num_rows = ask(servers, 0, Frame(FrameKind.MOVE, 2, clock=5))
    ask(servers, 1, Frame(FrameKind.SETTLE, clock=3))
    assert not servers.servers[1]._num_drops and count_copied() == num_rows


def test_rows_wait_until_the_last_of_several_threads_has_dropped_what_is_foreign(joined, monkeypatch):
    servers, count_copied = joined
    gates = [threading.Event(), threading.Event()]
    waiting = list(gates)
    monkeypatch.setattr("kftrain.server.process.drop_foreign_rows", lambda *_: waiting.pop(0).wait(60))
    joiner = servers.servers[1]
    for _ in gates:
        ask(servers, 1, Frame(FrameKind.SETTLE, clock=1))
    gates[0].set()
    wait_for(lambda: joiner._num_drops == 1)
    wait, waits = joiner._wait_until_dropped, threading.Event()
    joiner._wait_until_dropped = lambda: waits.set() or wait()
    moves = threading.Thread(target=ask, args=(servers, 0, Frame(FrameKind.MOVE, 2, clock=2)))
    moves.start()
    assert waits.wait(60)
    assert moves.is_alive() and not count_copied()
    gates[1].set()
    moves.join(60)
    assert count_copied()


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (1, 4, 2)])
def test_servers_join_and_leave_a_training(start, tmp_path, sizes):
    """With a checkpoint while rows are copied, and one right after they have moved."""
    servers = start(sizes[0], TABLE + ", num_sightings: 2, expiry_steps: 60")
    targets, saved = list(sizes[1:]), []

    def take(workers, worker, step):
        push_and_finish(workers, worker, step)
        if worker == 0 and targets and not servers.wanted and len(servers.addresses) == asked[-1]:
            asked.append(targets.pop(0))
            servers.ask(asked[-1])

    asked = [sizes[0]]

    def between(step):
        if targets or len(servers.addresses) != asked[-1]:
            time.sleep(0.02)
        if step % 5 == 0:
            saved.append((step + 1, len(servers.addresses)))
            servers.ask_servers(SAVE, step + 1)

    total = 300
    moving_servers.train(servers, NUM_WORKERS, total, take, between)
    assert len(servers.addresses) == sizes[-1] and servers.count().num_servers == sizes[-1]
    kind = {"num_sightings": 2, "expiry_steps": 60}
    for name in ("rows", "candidates"):
        assert servers.collect(name).tobytes() == expected_rows(tmp_path, total, name, **kind).tobytes()
    for step, num_servers in [saved[0], saved[len(saved) // 2], saved[-1]]:
        saved_rows = read_checkpoint(tmp_path, step, num_servers)
        assert saved_rows.tobytes() == expected_rows(tmp_path, step, **kind).tobytes(), f"the checkpoint of step {step}"


def read_checkpoint(folder, step, num_servers):
    """The rows that all servers have saved, by key."""
    uri = folder / "runs/r/checkpoints" / str(CheckpointName(step, 1))
    rows = np.concatenate([np.load(uri / f"tables-{number}-t-rows.npy") for number in range(num_servers)])
    return rows[np.argsort(rows["key"], kind="stable")]


def test_a_checkpoint_leaves_out_copies_of_rows_that_are_on_their_way(start, tmp_path):
    servers = start(2)
    moving_servers.train(servers, NUM_WORKERS, 5, push_and_finish)
    ask_all(servers.addresses, moving_servers.SECRET, Frame(FrameKind.MOVE, 1, clock=1))
    assert len(servers.servers[0]._state.tables[0]) == len(expected_rows(tmp_path, 5)), "nothing is on its way"
    servers.ask_servers(SAVE, 5)
    assert read_checkpoint(tmp_path, 5, 2).tobytes() == expected_rows(tmp_path, 5).tobytes()


@pytest.mark.parametrize("when", ["copying", "ready"])
def test_a_joining_server_that_dies_changes_nothing_and_another_may_come(start, tmp_path, monkeypatch, when):
    servers = start(2)
    monkeypatch.setattr(moving, "PIECE_ROWS", 16)
    killed, again = threading.Event(), threading.Event()

    def between(step):
        if step == 3:
            servers.ask(3)
            joiner = servers.servers[2]
            if when == "copying":
                wait_for(lambda: len(joiner._state.tables[0]))
                servers.stop(2)
                killed.set()
        if when == "ready" and step == 20:
            servers.stop(2)
            killed.set()
        if killed.is_set() and step == 40:
            assert servers.count().epoch == 0 and len(servers.addresses) == 2
            servers.ask(3)
            again.set()
        if 4 <= step < 20 or step > 40:
            time.sleep(0.05)

    if when == "ready":
        monkeypatch.setattr("kftrain.remote_parameters.moving.ServerChange.finish", finish_late(killed))
    moving_servers.train(servers, NUM_WORKERS, 90, push_and_finish, between)
    assert again.is_set() and len(servers.addresses) == 3 and servers.count() == (1, 3)
    assert servers.collect().tobytes() == expected_rows(tmp_path, 90).tobytes()


def test_a_joining_server_that_was_started_again_is_not_agreed_on_at_its_old_address(start, tmp_path, monkeypatch):
    servers = start(2)
    copy, replaced = moving_servers.ServerChange._copy, threading.Event()

    def replace_and_copy(change):
        if not replaced.is_set():
            servers.start([2])
        copy(change)
        replaced.set()

    def between(step):
        if step == 3:
            servers.ask(3)
            wait_for(replaced.is_set)
        if step == 4:
            assert servers.count() == (0, 2)
            servers.ask(3)
        time.sleep(0.02)

    monkeypatch.setattr(moving_servers.ServerChange, "_copy", replace_and_copy)
    moving_servers.train(servers, NUM_WORKERS, 60, push_and_finish, between)
    assert len(servers.addresses) == 3 and servers.count() == (1, 3)
    assert servers.collect().tobytes() == expected_rows(tmp_path, 60).tobytes()


def finish_late(killed):
    """A change that waits until somebody is dead."""
    finish = moving_servers.ServerChange.finish
    return lambda change: finish(change) if killed.is_set() else change._servers


@pytest.mark.parametrize("when", ["copying", "last"])
def test_an_owner_that_dies_in_a_move_leaves_the_ring_and_the_checkpoint_of_before(start, tmp_path, monkeypatch, when):
    servers = start(2)
    monkeypatch.setattr(moving, "PIECE_ROWS", 16)
    monkeypatch.setattr("kftrain.remote_parameters.link.RETRY_SECONDS", 0.01)
    connect = servers.connect
    servers.connect = lambda *arguments: shorten_patience(connect(*arguments))

    def between(step):
        if step == 2:
            servers.ask_servers(SAVE, step + 1)
            if when == "last":
                finish = RowMove.finish

                def die(move):
                    if move._number == 1:
                        servers.servers[1]._hang_up()
                        raise RetryableError("killed")
                    return finish(move)

                monkeypatch.setattr(RowMove, "finish", die)
            servers.ask(3)
            if when == "copying":
                wait_for(lambda: len(servers.servers[2]._state.tables[0]))
                servers.stop(1)

    with pytest.raises(KftrainError):
        moving_servers.train(servers, NUM_WORKERS, 200, push_and_finish, between)
    monkeypatch.undo()
    assert servers.count() == (0, 2)
    servers.connect = connect
    servers.start(range(2))  # the next attempt
    servers.addresses = servers.find(2)
    servers.wanted.clear()
    servers.ask_servers(LOAD, 3)
    moving_servers.train(
        servers, NUM_WORKERS, 9, lambda workers, worker, step: push_and_finish(workers, worker, step + 3)
    )
    assert servers.collect().tobytes() == expected_rows(tmp_path, 12).tobytes()


def shorten_patience(tables):
    tables._patience_seconds = 0.2
    for link in tables._links:
        link._patience_seconds = 0.2
    return tables
