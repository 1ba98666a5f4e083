"""Four processes on two nodes, each node in a network of its own: only what passes between nodes is on their link."""

import contextlib
import ctypes
import multiprocessing
import os
import subprocess
from pathlib import Path

import torch

from kftrain.parallel.world import join_world
from kftrain.process.machine import NODE_NAME_ENV

CLONE_NEWNET = 0x40000000
SPAWN = multiprocessing.get_context("spawn")
NUM_NODES, PER_NODE = 2, 2
NAMES = [f"kftrain-{os.getpid()}-node-{number}" for number in range(NUM_NODES)]
PORT = 29400
WAIT_SECONDS = 300.0


class NoNetworksError(Exception):
    """Networks cannot be made here."""


def run(function, *arguments):
    """What `function(world, *arguments)` returns on each process, in the order of the ranks."""
    with linked_networks():
        pipes, processes = [], []
        for rank in range(NUM_NODES * PER_NODE):
            receive, send = SPAWN.Pipe(duplex=False)
            network = f"/var/run/netns/{NAMES[rank // PER_NODE]}"
            processes.append(SPAWN.Process(target=_work, args=(send, network, rank, function, arguments), daemon=True))
            processes[-1].start()
            send.close()
            pipes.append(receive)
        try:
            assert all(pipe.poll(WAIT_SECONDS) for pipe in pipes), "no answer"
            return [pipe.recv() for pipe in pipes]
        finally:
            for process in processes:
                process.kill()


def count_between_nodes(world):
    """Bytes that all nodes have sent to one another so far, at a moment when all processes are here. Collective."""
    world.barrier()
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (line,) = (each for each in lines if each.strip().startswith("eth0:"))
    world.barrier()
    return world.sum([int(line.split(":")[1].split()[8]) / PER_NODE])[0]


@contextlib.contextmanager
def linked_networks():
    """The networks, with a link between them. Raises NoNetworksError where they are not allowed."""
    first, second = NAMES
    try:
        for name in NAMES:
            _ip("netns", "add", name)
        _ip("link", "add", "eth0", "netns", first, "type", "veth", "peer", "name", "eth0", "netns", second)
        for number, name in enumerate(NAMES):
            _ip("-n", name, "addr", "add", f"10.98.0.{number + 1}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", name, "link", "set", device, "up")
        yield
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _ip(*arguments):
    try:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise NoNetworksError("no ip") from error
    if done.returncode:
        raise NoNetworksError(done.stderr.strip())


def _work(pipe, network, rank, function, arguments):
    with open(network) as file:
        assert ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) == 0, os.strerror(
            ctypes.get_errno()
        )
    node, local_rank = divmod(rank, PER_NODE)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(NUM_NODES * PER_NODE)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(PER_NODE), NODE_NAME_ENV: f"node-{node}", "GLOO_SOCKET_IFNAME": "eth0"}
    os.environ |= {"MASTER_ADDR": "10.98.0.1", "MASTER_PORT": str(PORT)}
    torch.set_num_threads(1)
    with join_world(WAIT_SECONDS) as world:
        pipe.send(function(world, *arguments))
    pipe.close()
