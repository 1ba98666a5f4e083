"""`kftrain bandwidth`: what it counts as bytes, and as a share of a link that the kernel limits."""

import functools
import json
import subprocess
import sys

import pytest
from helpers import ranks
from helpers.fakes import private_network
from helpers.wire_counts import read_counter

from kftrain.parallel.mesh import Mesh
from kftrain.parallel.shape import Shape
from kftrain.train import bandwidth

pytestmark = pytest.mark.timeout(300, func_only=True)

COLLECTIVES = ["all-reduce", "all-gather", "reduce-scatter", "all-to-all"]
SIZE_BYTES = 2**21
LINK_MBIT = 200
NUM_COUNTS = 3  # the least counts: TCP sends a segment again where a busy machine lets its receiver wait


@pytest.fixture
def network():
    problem = private_network.problem()
    if problem:
        pytest.skip(f"needs a network of its own: {problem}")


def measure_nodes(world, sizes):
    """Rows of two simulated nodes with half of the processes each."""
    return bandwidth.measure_axes(Mesh(Shape(replicate=2, shard=world.size // 2), world), sizes)


@pytest.mark.slow
def test_each_axis_and_collective_has_rows():
    rows = ranks.on(4, measure_nodes, [2**16, 2**18])[0]
    expected = [
        (axis, collective, size, processes)
        for axis, processes in (("within nodes", 2), ("between nodes", 2), ("all", 4))
        for collective in COLLECTIVES
        for size in (2**16, 2**18)
    ]
    assert [(row["axis"], row["collective"], row["bytes"], row["processes"]) for row in rows] == expected
    assert all(row["seconds"] > 0 and row["bus_bytes_per_second"] > 0 for row in rows)


def test_one_process_a_node_has_one_axis():
    rows = ranks.on(2, measure_nodes, [2**12])[0]
    assert {row["axis"] for row in rows} == {"between nodes"}


def count_collective_bytes(world, name):
    """(bytes that a process sends in one exchange by the kernel's counters, the same by the bus bandwidth)."""
    mesh = Mesh(Shape(replicate=2, shard=world.size // 2), world)
    exchange, num_passes = bandwidth._EXCHANGES[name]
    group = mesh.group(("replicate", "shard"))
    bandwidth._time_exchange(mesh, group, exchange, 2**12)  # connections are made
    num_exchanges, counts = bandwidth.NUM_WARM + bandwidth.NUM_TIMED, []
    for _ in range(NUM_COUNTS):
        before = read_counter(world)
        bandwidth._time_exchange(mesh, group, exchange, SIZE_BYTES)
        counts.append((read_counter(world) - before) / num_exchanges / world.size)
    return min(counts), num_passes * (world.size - 1) / world.size * SIZE_BYTES


def count_on(size):
    return [ranks.on(size, count_collective_bytes, name)[0] for name in COLLECTIVES]


def test_bus_bandwidth_counts_the_bytes_that_the_kernel_counts(network):
    counted = private_network.run(count_on, 2)
    assert isinstance(counted, list), counted
    for name, (sent, expected) in zip(COLLECTIVES, counted, strict=True):
        assert sent == pytest.approx(expected, rel=0.02), name


def limit_link():
    """Limits what all processes of this network send together."""
    command = f"tc qdisc add dev lo root tbf rate {LINK_MBIT}mbit burst 128kb latency 1s"
    try:
        return subprocess.run(command.split(), capture_output=True, text=True).stderr
    except FileNotFoundError:
        return "no tc"


def measure_limited(sizes):
    return limit_link() or ranks.on(2, measure_nodes, sizes)[0]


@pytest.mark.slow
def test_the_share_of_a_limited_link_is_near_one(network):
    rows = private_network.run(functools.partial(measure_limited, [SIZE_BYTES]))
    if not isinstance(rows, list):
        pytest.skip(f"the link cannot be limited: {rows}")
    of_a_process = LINK_MBIT * 1e6 / 8 / 2  # both send over the one loopback device
    for row in rows:
        assert 0.85 < row["bus_bytes_per_second"] / of_a_process < 1.1, row


@pytest.mark.slow
def test_the_command_starts_a_job_and_prints_shares(tmp_path):
    settings = [f"run.storage_root={tmp_path}", "launch.kubernetes.fabric.within_node_gbps=2"]
    command = [sys.executable, "-m", "kftrain", "bandwidth", "--set", settings[0], "--set", settings[1], "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout.splitlines()[-1])
    assert [row["collective"] for row in rows[:: len(bandwidth.SIZES_BYTES)]] == COLLECTIVES
    for row in rows:
        assert row["share"] == pytest.approx(row["bus_bytes_per_second"] * 8 / 2e9)
    (folder,) = (tmp_path / "bandwidth").iterdir()
    assert (folder / "bandwidth.json").is_file() and not (tmp_path / "runs").exists()
