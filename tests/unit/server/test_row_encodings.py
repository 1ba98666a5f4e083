"""Rows that travel as bf16 or int8: how they are rounded, and the bytes."""

import itertools
import socket
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kftrain.core.frames import Frame, FrameKind, decode_header
from kftrain.core.row_encodings import (
    RowEncoding,
    choose_key_bytes,
    count_bytes,
    count_keys_bytes,
    decode,
    decode_keys,
    encode,
    encode_keys,
    round_up_or_down,
)
from kftrain.remote_parameters.client import RemoteTables
from kftrain.remote_parameters.link import ServerAddress
from kftrain.server.optimizers import RowSgd
from kftrain.server.server import Server
from kftrain.server.state import ServerState
from kftrain.server.table import RowTable, TableSpec

pytestmark = pytest.mark.timeout(60)

SECRET = b"of the run"
DIM = 64
KEYS = np.unique(np.random.default_rng(2).integers(0, 10_000_000, 4000))
"""Of ten million, so that two bytes hold the difference of two neighbours."""


def travel(values, encoding, dim=DIM):
    """What is decoded of what is encoded."""
    wire, decoded = np.frombuffer(encode(values, encoding, dim), np.uint8), np.empty_like(values)
    assert wire.size == count_bytes(encoding, values.size, dim)
    decode(wire, encoding, dim, decoded)
    return decoded


def test_numbers_are_rounded_to_bf16_as_torch_rounds_them():
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, np.uint32)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, 1e-45, 1.00390625, 1.01171875], np.float32)
    values = np.concatenate([bits.view(np.float32), special, np.array([0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view("f4")])
    widened = travel(values, RowEncoding.BF16)
    expected = torch.from_numpy(values).to(torch.bfloat16).float().numpy()
    assert np.array_equal(np.isnan(widened), np.isnan(expected))
    is_number = ~np.isnan(expected)
    assert np.array_equal(widened[is_number].view(np.uint32), expected[is_number].view(np.uint32))


def draw_rows():
    """Rows of many sizes, of zeros, of one number, and with numbers that are exactly 127 steps."""
    random = np.random.default_rng(0)
    rows = random.standard_normal((3000, DIM)) * 10.0 ** random.integers(-30, 30, (3000, 1))
    rows[0] = 0
    rows[1, 1:] = 0
    rows[2] = np.arange(DIM) + 64.0
    return rows.astype(np.float32).reshape(-1)


def test_int8_is_half_a_step_off_at_most_and_the_same_the_second_time():
    values = draw_rows()
    decoded = travel(values, RowEncoding.INT8)
    steps = 2.0 ** np.ceil(np.log2(np.maximum(np.abs(values.reshape(-1, DIM)).max(1).astype(np.float64), 1e-35) / 127))
    errors = np.abs(decoded.reshape(-1, DIM).astype(np.float64) - values.reshape(-1, DIM))
    assert (errors <= 0.500001 * steps[:, None]).all() and errors.max() > 0
    assert np.array_equal(decoded[2 * DIM : 3 * DIM], values[2 * DIM : 3 * DIM])
    assert np.array_equal(travel(decoded, RowEncoding.INT8), decoded)
    values[70] = np.inf
    assert np.isnan(travel(values, RowEncoding.INT8)[DIM : 2 * DIM]).all()


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20, unique=True)
    | st.lists(st.integers(0, 2**17), max_size=20, unique=True),
    st.booleans(),
)
def test_keys_arrive_as_they_were_in_as_many_bytes_as_their_largest_difference(keys, is_sorted):
    keys = np.array(sorted(keys) if is_sorted else keys, np.int64)
    key_bytes = choose_key_bytes(keys)
    wire = np.frombuffer(encode_keys(keys, key_bytes), np.uint8)
    assert wire.size == count_keys_bytes(keys.size, key_bytes)
    assert np.array_equal(decode_keys(wire, key_bytes), keys)
    rises = [after - before for before, after in itertools.pairwise(keys.tolist())]
    if rises and min(rises) > 0:
        assert key_bytes == next(size for size in range(1, 9) if max(rises) < 256**size)


def test_the_mean_of_what_is_rounded_at_random_is_right_and_it_travels_unchanged():
    values = np.random.default_rng(0).standard_normal(20 * DIM).astype(np.float32)
    values[::DIM] = 100.0  # beside these the others are small
    random, total = np.random.default_rng(1), np.zeros(values.size)
    for _ in range(2000):
        rounded = round_up_or_down(values, DIM, random.random(values.shape, np.float32))
        total += rounded
    assert np.array_equal(travel(rounded, RowEncoding.INT8), rounded)
    # A step is 1; the standard deviation of a mean of 2,000 is at most 0.5 / sqrt(2000).
    assert np.abs(total / 2000 - values).max() < 5 * 0.5 / 2000**0.5


@pytest.mark.parametrize("broken", [3, 2])
def test_a_header_with_another_encoding_or_no_width_is_none(broken):
    header = bytearray(Frame(FrameKind.PUSH, encoding=RowEncoding.BF16).encode()[0])
    assert decode_header(header).frame.encoding is RowEncoding.BF16
    assert header[12] == 1
    header[12] = broken
    assert decode_header(header) is None


@pytest.fixture
def connect(tmp_path):
    servers, clients = [], []

    def build(encoding):
        folder = tmp_path / str(len(servers))
        folder.mkdir()
        server = Server(ServerState([RowTable(TableSpec("t", DIM, 0), RowSgd(1.0), folder)], 0), SECRET)
        server.start()
        servers.append(server)
        clients.append(RemoteTables([ServerAddress("s", *server.address)], {"t": DIM}, 0, SECRET, encoding=encoding))
        return clients[-1]

    yield build
    for one in clients:
        one.close()
    for server in servers:
        server.stop()


def train(tables, num_steps):
    """Steps whose gradients are drawn; returns what is read at the end."""
    random = np.random.default_rng(1)
    for _ in range(num_steps):
        tables.pull("t", KEYS)
        tables.push("t", KEYS, random.standard_normal((len(KEYS), DIM)).astype(np.float32))
        tables.finish_step()
    return tables.pull("t", KEYS)


def count_tcp_bytes(tables):
    """Bytes that the kernel has sent and received over all connections: tcpi_bytes_acked and tcpi_bytes_received."""
    connections = [tables._links[0]._changes, tables._links[0]._reads]
    infos = [one._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256) for one in connections if one]
    return sum(sum(struct.unpack_from("<QQ", info, 120)) for info in infos)


def test_bytes_are_those_of_the_formula_by_the_counters_of_the_kernel(connect):
    num_bytes = {}
    formula = {RowEncoding.FP32: 8 + 4 * DIM, RowEncoding.BF16: 8 + 2 * DIM, RowEncoding.INT8: 2 + DIM + 1}
    for encoding, row_bytes in formula.items():
        tables = connect(encoding)
        train(tables, 3)
        num_bytes[encoding] = count_tcp_bytes(tables)
        assert num_bytes[encoding] == pytest.approx(7 * len(KEYS) * row_bytes, rel=0.02)
    shares = [num_bytes[encoding] / num_bytes[RowEncoding.FP32] for encoding in (RowEncoding.BF16, RowEncoding.INT8)]
    print(f"bf16 {shares[0]:.3f}, int8 {shares[1]:.3f} of the bytes of fp32")
    assert shares[0] < 0.52 and shares[1] < 0.26, shares


def test_weights_and_gradients_are_rounded_once_and_sums_are_not(connect):
    """The rows of a bare loop whose gradients are rounded by torch; a read rounds, and the table does not."""
    read = train(connect(RowEncoding.BF16), 5)
    plain = connect(RowEncoding.FP32)
    expected = torch.from_numpy(plain.pull("t", KEYS).copy())
    random = np.random.default_rng(1)
    for _ in range(5):
        gradients = torch.from_numpy(random.standard_normal((len(KEYS), DIM)).astype(np.float32))
        expected.sub_(gradients.to(torch.bfloat16).float())
    assert np.array_equal(read, expected.to(torch.bfloat16).float().numpy())
    assert not np.array_equal(read, expected.numpy())
