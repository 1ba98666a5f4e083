"""Steps whose gradients travel compressed against fp32's, over a link of 100 Mbit/s between two network namespaces.

    python benchmarks/train/compression.py [--rounds 5]

Each of two processes is in a network of its own; a queue of the kernel (`tc tbf`) limits what each of them sends. All
kinds stand in the same processes and take turns, a step each. Last line: `fp32` -> seconds of a step, each kind -> its
time over fp32's beside it; medians over the rounds. Or `problem` -> why there can be no such network here.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from processes import SETTLING_ROUNDS, Clock, build_engine, measure_as, sent, tokens

from kftrain import config
from kftrain.parallel.mesh import Mesh
from kftrain.parallel.world import World
from kftrain.tasks import build_task

RATE = "100mbit"
NAMES = tuple(f"kftrain-{os.getpid()}-{number}" for number in range(2))
"""Of the networks."""
ADDRESSES = ("10.99.0.1", "10.99.0.2")
PORT = 29400
LENGTH = 64
"""Tokens of a process and step: so few that the link is what counts."""
TEXT = """
task: {kind: language_modeling, sequence_length: 64, tokenizer: bytes}
model: {kind: transformer, dim: 384, num_layers: 4, num_heads: 6}
optimizer: {kind: sgd}
parallel: {strategy: ddp}
"""
KINDS = ("fp32", "int8", "topk")


def run(*command: str) -> None:
    """Run a command of iproute2; raise OSError where that is not allowed."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command[:3])}: {done.stderr.strip()}")


@contextmanager
def linked_networks() -> Iterator[None]:
    """Two networks with a link between them, within the block."""
    try:
        for name in NAMES:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", "eth0", "netns", NAMES[0], "type", "veth", "peer", "name", "eth0", "netns", NAMES[1])
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                run("ip", "-n", name, "link", "set", device, "up")
            limit = ("rate", RATE, "burst", "64kb", "latency", "50ms")
            run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", "tbf", *limit)
        yield
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def measure(world: World, arguments: argparse.Namespace) -> dict[str, float]:
    """Figures of all kinds; see above."""
    engines, clock = {}, Clock(world)
    task = build_task(config.parse(TEXT).task)
    batch = sent(task, tokens(world.rank, 1, LENGTH))
    for kind in KINDS:
        settings = [] if kind == "fp32" else [f"parallel.compression.kind={kind}"]
        resolved = config.parse(TEXT, settings)
        engines[kind] = build_engine(resolved, task, batch, Mesh(resolved.parallel.shape(world.size), world))
    for _ in range(arguments.rounds + SETTLING_ROUNDS):
        for kind, engine in engines.items():
            start = clock.begin()
            engine.set_learning_rate(1e-3)
            engine.step(batch, world.size * batch.num_terms, world.sum)
            clock.end(kind, start)
    counted = {kind: np.array(each[SETTLING_ROUNDS:]) for kind, each in clock.seconds.items()}
    ratios = {kind: statistics.median(each / counted["fp32"]) for kind, each in counted.items()}
    size = sum(parameter.numel() for parameter in engines["fp32"].model.parameters())
    return {**ratios, "fp32": statistics.median(counted["fp32"]), "parameters": size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", type=int, help="used by this script itself")
    arguments = parser.parse_args()
    if arguments.worker is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"  # of the network that this process is in
        measure_as(arguments.worker, 2, ADDRESSES[0], PORT, measure, arguments)
        return
    try:
        with linked_networks():
            script = [sys.executable, __file__, "--rounds", str(arguments.rounds), "--worker"]
            commands = [["ip", "netns", "exec", name, *script, str(rank)] for rank, name in enumerate(NAMES)]
            started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
            output = [process.communicate()[0] for process in started]
            assert not any(process.returncode for process in started), output
            print(output[0].splitlines()[-1])
    except OSError as error:
        print(json.dumps({"problem": str(error)}))


if __name__ == "__main__":
    main()
