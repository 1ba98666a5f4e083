"""The longest pause of a training to which a parameter server joins, and from which it leaves again.

    python benchmarks/server_join.py [thousands of rows]

Servers are processes of their own; one worker reads and updates 4,096 rows of 16 floats in each step, without a rest.
"""

import multiprocessing
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch

from kftrain import config as configuration
from kftrain.core.frames import Frame, FrameKind
from kftrain.remote_parameters.client import RemoteTables
from kftrain.remote_parameters.control import find_servers, load_all
from kftrain.remote_parameters.moving import ServerChange
from kftrain.run.membership import Membership, agree_on_servers, read_membership
from kftrain.run.paths import RunPaths
from kftrain.server.process import RunServer

SECRET = b"benchmark"
DIM, KEYS_OF_STEP = 16, 4_096
TEXT = """
server: {num_servers: 2, tables: [{name: t, dim: 16, optimizer: row_wise_adagrad}]}
parallel: {strategy: ddp}
"""
NO_CHANGE_SECONDS = 5.0


def run_server(uri, number):
    torch.set_num_threads(1)
    config = configuration.parse(TEXT)
    with tempfile.TemporaryDirectory() as folder:
        server = RunServer(RunPaths(uri), config, number, Path(folder), SECRET)
        has_left = threading.Event()
        server.when_left = has_left.set
        server.start()
        server.publish_address()
        has_left.wait()
        server.stop()


def measure(num_rows, folder):
    paths, config = RunPaths(f"{folder}/runs/r"), configuration.parse(TEXT)
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=run_server, args=(paths.uri, number), daemon=True) for number in range(3)]
    for process in processes:
        process.start()
    everybody = find_servers(paths.servers, 3, 300)
    load_all(everybody[:2], SECRET, Frame(FrameKind.LOAD))
    asked = []

    def agree(num_servers):
        epoch = read_membership(paths, config.digest(), 2).epoch + 1
        agree_on_servers(paths, config.digest(), Membership(epoch, num_servers))

    change = ServerChange(everybody[:2], SECRET, lambda: asked.pop() if asked else None, agree)
    tables = RemoteTables(everybody[:2], {"t": DIM}, 0, SECRET)
    for start in range(0, num_rows, 65_536):
        keys = np.arange(start, min(start + 65_536, num_rows)) * 2_654_435_761
        tables.push("t", keys, np.ones((len(keys), DIM), np.float32))
        tables.finish_step()
    change.start()
    print(f"{num_rows} rows of {DIM} floats, {KEYS_OF_STEP} in each step")
    for what, servers in (("nobody joins", None), ("2 servers, one joins", everybody), ("one leaves", everybody[:2])):
        seconds, switch_seconds = train(tables, change, num_rows, asked, servers)
        steps = np.array(seconds)
        line = f"{what:22} {len(steps):5} steps, median {np.median(steps) * 1e3:4.0f} ms, longest {steps.max():.2f} s"
        print(line + (f", of which the change took {switch_seconds:.2f} s" if servers else ""), flush=True)
    change.close()
    tables.close()


def train(tables, change, num_rows, asked, servers):
    """Take steps until the servers have changed, or for some seconds; the seconds of each, and those of the change."""
    rng, seconds, switch_seconds, start = np.random.default_rng(0), [], 0.0, time.monotonic()
    if servers:
        asked.append(servers)
    while not switch_seconds if servers else time.monotonic() - start < NO_CHANGE_SECONDS:
        begin = time.monotonic()
        keys = np.unique(rng.integers(0, num_rows, KEYS_OF_STEP)) * 2_654_435_761
        tables.push("t", keys, tables.pull("t", keys))
        tables.finish_step()
        if change.is_ready:
            begin_switch = time.monotonic()
            tables.switch(change.finish())
            switch_seconds = time.monotonic() - begin_switch
        seconds.append(time.monotonic() - begin)
    return seconds, switch_seconds


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as root:
        measure(1_000 * int(sys.argv[1] if len(sys.argv) > 1 else 1_000), root)
