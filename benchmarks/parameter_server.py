"""The tables of the parameter server against their bars: what a row costs, and pull + push against a bare socket.

    python benchmarks/parameter_server.py memory [millions of rows]
    python benchmarks/parameter_server.py traffic [rounds]

Rounds alternate between the server, a socket that sends the same bytes both ways and does nothing with them, torch's
RPC on a dense table, and Redis where `redis-server` is installed; the ratios are of the medians.
"""

import functools
import multiprocessing
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.distributed import rpc

from kftrain.remote_parameters.client import RemoteTables
from kftrain.remote_parameters.link import ServerAddress
from kftrain.server.chain import Chain
from kftrain.server.optimizers import RowSgd
from kftrain.server.server import Server
from kftrain.server.state import ServerState
from kftrain.server.table import RowTable, TableSpec

DIM = 64
NUM_ROWS = 65_536
SECRET = b"benchmark"
RPC_ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29731", "GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
RPC_TABLE = torch.zeros(NUM_ROWS, DIM)


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


def run_server(folder, copy, pipe):
    """A server by itself, or with the copy at a port."""
    torch.set_num_threads(1)  # a part of a push is too small for two
    state = ServerState([RowTable(TableSpec("t", DIM, 0), RowSgd(0.1), folder)], 0)
    server = Server(state, SECRET)
    if copy:
        server._copy = Chain("127.0.0.1", copy, SECRET, server.stop)
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


def run_rpc(pipe):
    """The other end of torch's RPC: a dense table whose rows it indexes, without keys, a log or a clock."""
    os.environ |= RPC_ADDRESS
    pipe.send("starts")
    rpc.init_rpc("server", rank=0, world_size=2)
    rpc.shutdown()


def read_rows(rows):
    return RPC_TABLE[rows]


def add_rows(rows, gradients):
    RPC_TABLE.index_add_(0, rows, gradients, alpha=-0.1)


class RedisRows:
    """MGET and MSET of all rows, written and read as bytes of known lengths: nothing is parsed."""

    def __init__(self, folder):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = ["redis-server", "--port", str(port), "--save", "", "--dir", str(folder), "--daemonize", "no"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        for _ in range(100):
            try:
                self._connection = socket.create_connection(("127.0.0.1", port))
                break
            except ConnectionRefusedError:
                time.sleep(0.1)
        self._reply = bytearray(len(f"*{NUM_ROWS}\r\n") + NUM_ROWS * (len(f"${4 * DIM}\r\n") + 4 * DIM + 2))

    def exchange(self, keys, gradients):
        """Write all rows, then read them, as a push and a pull would."""
        row_bytes = 4 * DIM
        names = np.zeros(NUM_ROWS, [("start", "S4"), ("key", "<i8"), ("end", "S2")])
        names["start"], names["key"], names["end"] = b"$8\r\n", keys, b"\r\n"
        sizes = f"${row_bytes}\r\n".encode()
        rows = np.zeros(
            NUM_ROWS, [*names.dtype.descr, ("size", f"S{len(sizes)}"), ("row", f"V{row_bytes}"), ("last", "S2")]
        )
        for field in names.dtype.names:
            rows[field] = names[field]
        rows["size"], rows["row"], rows["last"] = sizes, gradients.view(f"V{row_bytes}")[:, 0], b"\r\n"
        self._connection.sendall(f"*{1 + 2 * NUM_ROWS}\r\n$4\r\nMSET\r\n".encode() + rows.tobytes())
        fill(self._connection, memoryview(self._reply)[: len("+OK\r\n")])
        self._connection.sendall(f"*{1 + NUM_ROWS}\r\n$4\r\nMGET\r\n".encode() + names.tobytes())
        fill(self._connection, memoryview(self._reply))

    def stop(self):
        self._connection.close()
        self._process.terminate()
        self._process.wait()


def measure_traffic(num_rounds):
    keys = np.unique(np.random.default_rng(0).integers(-(2**60), 2**60, NUM_ROWS))
    gradients = np.ones((NUM_ROWS, DIM), np.float32)
    with tempfile.TemporaryDirectory() as folder:
        ports = {"server": start(run_server, Path(folder), "")}
        copy = start(run_server, Path(folder), "")
        ports["server, copies: 2"] = start(run_server, Path(folder), copy[2][1])
        _, stop_echo, echo_address = start(run_echo)
        clients = {
            name: RemoteTables([ServerAddress("s0", *address)], {"t": DIM}, 0, SECRET)
            for name, (_, _, address) in ports.items()
        }
        echo = socket.create_connection(echo_address)
        echo.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        received = bytearray(gradients.nbytes)

        def exchange_with_server(tables):
            tables.pull("t", keys)
            tables.push("t", keys, gradients)
            tables.finish_step()

        def exchange_with_echo():
            echo.sendall(keys)
            fill(echo, memoryview(received))
            echo.sendall(keys)
            echo.sendall(gradients)
            fill(echo, memoryview(received)[:40])

        ways = {"socket": exchange_with_echo}
        ways |= {name: functools.partial(exchange_with_server, tables) for name, tables in clients.items()}
        redis = RedisRows(folder) if shutil.which("redis-server") else None
        if redis:
            ways["Redis, MGET and MSET"] = lambda: redis.exchange(keys, gradients)
        process, _, _ = start(run_rpc)
        os.environ |= RPC_ADDRESS
        rpc.init_rpc("worker", rank=1, world_size=2)
        rows = torch.randperm(NUM_ROWS)

        def exchange_with_rpc():
            rpc.rpc_sync("server", read_rows, (rows,))
            rpc.rpc_sync("server", add_rows, (rows, torch.from_numpy(gradients)))

        ways["torch RPC"] = exchange_with_rpc
        print_table(ways, num_rounds)
        rpc.shutdown()
        process.join()
        for tables in clients.values():
            tables.close()
        for _, stop_server, _ in (*ports.values(), copy):
            stop_server.send("stop")
        stop_echo.send("stop")
        if redis:
            redis.stop()


def print_table(ways, num_rounds):
    seconds = {name: [] for name in ways}
    for _ in range(num_rounds + 2):
        for name, exchange in ways.items():
            begin = time.monotonic()
            exchange()
            seconds[name].append(time.monotonic() - begin)
    medians = {name: statistics.median(values[2:]) for name, values in seconds.items()}
    print(f"pull + push of {NUM_ROWS} rows of {DIM} floats; medians of {num_rounds} alternating rounds")
    for name, median in medians.items():
        print(f"{name:22} {median * 1e3:7.0f} ms, {medians['socket'] / median:5.2f} of the socket's speed")


if __name__ == "__main__":
    what, number = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 0
    measure_memory(int(1e6 * (number or 1))) if what == "memory" else measure_traffic(int(number or 12))
