"""Frames between two sockets: what is sent arrives, and what is not a frame or not of this run does not."""

import gc
import os
import socket
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain.core.frames import HEADER, MAGIC, MAX_BODY_BYTES, Frame, FrameKind, FrameSocket
from kftrain.errors import ConfigError, LostPeerError

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def pair():
    sockets = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sockets.append(socket.create_connection(listener.getsockname()))
        sockets.append(listener.accept()[0])
    ends = [FrameSocket(one, "peer") for one in sockets]
    yield (*ends, sockets[0])
    for end in ends:
        end.close()


@settings(max_examples=30, deadline=None)
@given(
    numbers=st.tuples(st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1), *[st.integers(0, 2**64 - 1)] * 2),
    keys=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5),
    num_values=st.integers(0, 70),
)
def test_a_frame_arrives_as_it_was(numbers, keys, num_values):
    left, right = (FrameSocket(one, "peer") for one in socketpair())
    sent = Frame(FrameKind.PUSH, *numbers, np.array(keys, np.int64), np.arange(num_values, dtype=np.float32))
    for frame in (sent, Frame(FrameKind.JOIN), sent):
        left.send(frame)
        came = right.receive()
        assert (came.kind, came.table, came.worker, came.sequence, came.clock) == (
            frame.kind,
            frame.table,
            frame.worker,
            frame.sequence,
            frame.clock,
        )
        assert came.keys.tolist() == frame.keys.tolist() and came.values.tolist() == frame.values.tolist()
    left.close(), right.close()


def socketpair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return socket.create_connection(listener.getsockname()), listener.accept()[0]


def test_a_frame_larger_than_the_buffers_of_the_kernel_arrives(pair):
    left, right, _ = pair
    values = np.random.default_rng(0).standard_normal(3_000_000).astype(np.float32)
    thread = threading.Thread(target=left.send, args=(Frame(FrameKind.WEIGHTS, values=values),))
    thread.start()
    assert np.array_equal(right.receive().values, values)
    thread.join()


@pytest.mark.parametrize(
    "header",
    [
        HEADER.pack(b"GET ", 2, 8, 0, 0, 0, 0, 0, 0, 0),
        HEADER.pack(MAGIC, 77, 8, 0, 0, 0, 0, 0, 0, 0),
        HEADER.pack(MAGIC, 2, 0, 0, 0, 0, 0, 0, 1, 0),
        HEADER.pack(MAGIC, 2, 9, 0, 0, 0, 0, 0, 1, 0),
        HEADER.pack(MAGIC, 2, 8, 0, 0, 0, 0, 0, MAX_BODY_BYTES // 8, 1),
    ],
    ids=["magic", "kind", "no bytes of keys", "bytes of keys", "size"],
)
def test_what_is_no_frame_is_refused_before_memory_is_taken_for_it(pair, header):
    _, right, raw = pair
    raw.sendall(header)
    with pytest.raises(LostPeerError, match="something else than a frame"):
        right.receive()


def test_a_closed_connection_keeps_its_number_as_long_as_somebody_may_read_there():
    """The next connection of this process would have the number, and the reader would take what comes to that one."""
    left, right = (FrameSocket(one, "peer") for one in socketpair())
    number = left._connection.fileno()
    left.close()
    with pytest.raises(LostPeerError, match="closed"):
        left.receive()
    with pytest.raises(LostPeerError):
        right.receive()
    os.fstat(number)
    del left
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
    right.close()


def test_a_socket_that_is_connected_to_itself_has_found_nobody(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    connect = socket.create_connection
    monkeypatch.setattr(socket, "create_connection", lambda *where: connect(*where, source_address=address))
    with pytest.raises(LostPeerError, match="cannot be reached: nobody listens"):
        FrameSocket.connect(*address, b"secret", "peer", 5.0)


def test_an_end_in_the_middle_of_a_frame_is_a_lost_peer(pair):
    _, right, raw = pair
    raw.sendall(Frame(FrameKind.PULL, keys=np.arange(5)).encode()[0])
    raw.shutdown(socket.SHUT_WR)
    with pytest.raises(LostPeerError, match="closed"):
        right.receive()


@pytest.mark.parametrize(("secret", "is_allowed"), [(b"one", True), (b"two", False)])
def test_both_ends_must_know_the_secret(pair, secret, is_allowed):
    outcomes = []

    def authenticate(end, own, is_server):
        try:
            end.authenticate(own, is_server)
            outcomes.append(True)
        except (ConfigError, LostPeerError):
            outcomes.append(False)

    thread = threading.Thread(target=authenticate, args=(pair[0], b"one", True))
    thread.start()
    authenticate(pair[1], secret, False)
    thread.join()
    assert outcomes == [is_allowed] * 2


def test_an_end_that_sends_back_what_it_hears_knows_nothing(pair):
    left, right, _ = pair

    def mirror():
        heard = memoryview(bytearray(32))
        for _ in range(2):
            right._fill(heard)
            right._send_bytes(bytes(heard))

    thread = threading.Thread(target=mirror)
    thread.start()
    with pytest.raises(ConfigError, match="another secret"):
        left.authenticate(b"one", is_server=True)
    thread.join()
