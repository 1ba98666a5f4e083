"""The tables of the parameter server against their bars: what a row costs, and pull + push against a bare socket.

    python benchmarks/parameter_server.py memory [millions of rows]
    python benchmarks/parameter_server.py traffic [rounds]

Rounds alternate between the server and a socket that sends the same bytes both ways and does nothing with them; the
ratio is of the medians.
"""

import multiprocessing
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from kftrain.remote_parameters.client import RemoteTables
from kftrain.remote_parameters.link import ServerAddress
from kftrain.server.optimizers import RowSgd
from kftrain.server.server import Server
from kftrain.server.state import ServerState
from kftrain.server.table import RowTable, TableSpec

DIM = 64
NUM_ROWS = 65_536
SECRET = b"benchmark"


def measure_memory(num_rows):
    """Worst bytes per live row over those of its numbers, from a tenth of the rows on, while the table grows."""
    worst, part = 0.0, 50_000
    with tempfile.TemporaryDirectory() as folder:
        table = RowTable(TableSpec("t", DIM, 0), RowSgd(0.1), Path(folder))
        start = time.monotonic()
        for first in range(0, num_rows, part):
            keys = np.arange(first, first + part, dtype=np.int64) * 2_654_435_761
            table.update(keys, np.zeros((part, DIM), np.float32))
            if len(table) >= num_rows // 10:
                worst = max(worst, table.num_bytes / len(table) / (4 * DIM))
        print(f"{len(table)} rows of {DIM} floats in {time.monotonic() - start:.1f} s, {worst:.3f} of their numbers")


def run_server(folder, pipe):
    torch.set_num_threads(1)  # a part of a push is too small for two
    state = ServerState([RowTable(TableSpec("t", DIM, 0), RowSgd(0.1), folder)], 0)
    server = Server(state, folder, SECRET)
    server.start()
    pipe.send(server.address)
    pipe.recv()
    server.stop()


def fill(connection, memory):
    while memory:
        memory = memory[connection.recv_into(memory) :]


def run_echo(pipe):
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send(listener.getsockname())
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keys, rows = bytearray(8 * NUM_ROWS), bytearray(4 * DIM * NUM_ROWS)
    while not pipe.poll():
        fill(connection, memoryview(keys))
        connection.sendall(rows)
        fill(connection, memoryview(keys))
        fill(connection, memoryview(rows))
        connection.sendall(b"k" * 40)


def start(work, *arguments):
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=work, args=(*arguments, theirs), daemon=True)
    process.start()
    return process, ours, ours.recv()


def measure_traffic(num_rounds):
    with tempfile.TemporaryDirectory() as folder:
        _, stop_server, address = start(run_server, Path(folder))
        _, stop_echo, echo_address = start(run_echo)
        tables = RemoteTables([ServerAddress("s0", *address)], {"t": DIM}, 0, SECRET)
        echo = socket.create_connection(echo_address)
        echo.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keys = np.unique(np.random.default_rng(0).integers(-(2**60), 2**60, NUM_ROWS))
        gradients = np.ones((NUM_ROWS, DIM), np.float32)
        received = bytearray(gradients.nbytes)
        ours, bare = [], []
        for _ in range(num_rounds):
            begin = time.monotonic()
            tables.pull("t", keys)
            tables.push("t", keys, gradients)
            tables.finish_step()
            middle = time.monotonic()
            echo.sendall(keys)
            fill(echo, memoryview(received))
            echo.sendall(keys)
            echo.sendall(gradients)
            fill(echo, memoryview(received)[:40])
            ours.append(middle - begin)
            bare.append(time.monotonic() - middle)
        ours, bare = statistics.median(ours[2:]), statistics.median(bare[2:])
        print(
            f"pull + push of {NUM_ROWS} rows: {ours * 1e3:.0f} ms, socket {bare * 1e3:.0f} ms: {bare / ours:.2f} of it"
        )
        tables.close()
        stop_server.send("stop")
        stop_echo.send("stop")


if __name__ == "__main__":
    what, number = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 0
    measure_memory(int(1e6 * (number or 1))) if what == "memory" else measure_traffic(int(number or 12))
