"""The laws of scale, counted: what a fleet reads does not grow with its nodes, nor a start with the shards.

`make scale` prints them for more nodes than are simulated here.
"""

import dataclasses
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from helpers import scale_laws, simulated_nodes
from helpers.fakes.counting_store import Request, count, count_bytes, describe
from helpers.simulated_nodes import Size

TESTS = Path(__file__).parents[2]
SMALL = Size(lanes=4, batch=512)
"""Three windows of four ranges of 4 MiB: 50 MB."""

MAX_FACTOR, MAX_REQUESTS, MAX_REQUESTS_OF_MANY = 1.1, 1.0, 4.0
"""Bars: bytes read over the dataset's, up to as many nodes as lanes; requests per MB, up to there and beyond."""

pytestmark = pytest.mark.timeout(600)

verifies_ranges = pytest.mark.skipif(
    not simulated_nodes.VERIFIES_RANGES, reason="ranged reads do not verify themselves: nodes read shards whole"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    above = tmp_path_factory.mktemp("scale")
    (above / "root").mkdir()
    simulated_nodes.write_dataset(above / "root", SMALL)
    (above / "size.json").write_text(json.dumps(dataclasses.asdict(SMALL)))
    return above / "root"


@pytest.fixture
def store(folder):
    return simulated_nodes.open_store(folder)


def test_the_window_has_lanes_and_blocks_like_one_of_the_default_size():
    assert SMALL.range_samples * SMALL.row_bytes == Size().range_samples * Size().row_bytes == 4 << 20
    assert SMALL.batch % SMALL.lanes == Size().batch % Size().lanes == 0


@verifies_ranges
@pytest.mark.parametrize("num_nodes", [1, 2, 4])
def test_a_fleet_reads_the_dataset_once_while_it_has_as_many_lanes(store, num_nodes):
    epoch = scale_laws.count_epoch(store, SMALL, num_nodes)
    assert epoch.factor <= MAX_FACTOR and epoch.requests_per_megabyte <= MAX_REQUESTS, epoch


@verifies_ranges
def test_more_nodes_than_lanes_read_a_lane_each(store):
    epoch = scale_laws.count_epoch(store, SMALL, 12)
    assert epoch.factor <= MAX_FACTOR * 12 / SMALL.lanes + 1
    assert epoch.requests_per_megabyte <= MAX_REQUESTS_OF_MANY, epoch


def test_nodes_read_each_sample_once_whatever_their_number(store):
    scale_laws.count_epoch(store, SMALL, 3)


def tally(requests):
    """(Kind, URI) -> number and bytes."""
    numbers, sizes = Counter(), Counter()
    for one in requests:
        numbers[one.kind, one.uri] += one.num_requests
        sizes[one.kind, one.uri] += one.num_bytes
    return {key: (numbers[key], sizes[key]) for key in numbers}


def test_four_real_processes_ask_for_what_four_simulated_nodes_ask_for(folder, store, tmp_path):
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"}
    processes = []
    for rank in range(4):
        arguments = [str(folder), str(rank), "4", str(tmp_path / f"cache-{rank}"), str(tmp_path / f"{rank}.json")]
        command = [sys.executable, "-m", "helpers.simulated_nodes", *arguments]
        processes.append(subprocess.Popen(command, env=environment))
    try:
        assert [process.wait(500) for process in processes] == [0] * 4
    finally:
        for process in processes:
            process.kill()
    for rank in range(4):
        real = json.loads((tmp_path / f"{rank}.json").read_text())
        simulated = simulated_nodes.read_epoch(store, SMALL, rank, 4, tmp_path / f"again-{rank}")
        assert real["numbers"] == simulated.numbers
        ours, theirs = (tally(requests) for requests in (simulated.requests, [Request(*r) for r in real["requests"]]))
        assert ours == theirs


# Shards


@pytest.mark.slow
def test_a_node_starts_with_few_requests_and_parses_a_manifest_of_100_000_shards_once(tmp_path):
    store, _, _ = scale_laws.open_large_store()
    for rank in (0, 499, 999):
        first, second = scale_laws.count_start(store, rank, 1000, tmp_path / str(rank))
        assert count(first) <= 20 and count_bytes(first) <= 8_000_000, describe(first)
        assert count(second, below=store.uri("root", "shards")) == 0, describe(second)


@pytest.mark.slow
def test_an_unchanged_firing_over_100_000_shards_is_one_listing_and_no_content(tmp_path):
    requests = scale_laws.count_unchanged_firing(tmp_path)
    assert len([one for one in requests if one.kind == "list"]) == 1
    assert not [one for one in requests if one.uri.endswith((".tar", ".npy", ".blocks"))], describe(requests)


@pytest.mark.slow
def test_100_000_folders_of_parts_are_one_listing_of_what_is_above_them():
    requests = scale_laws.count_listing()
    assert [one.uri.rpartition("/")[2] for one in requests if one.kind == "list"] == ["parts"]
    assert count(requests, "get") <= 2 and count(requests, "head") == 0, describe(requests)  # pages, by split


@verifies_ranges
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("num_nodes", "most_bytes", "most_requests"),
    [(1, MAX_FACTOR, MAX_REQUESTS), (8, MAX_FACTOR, MAX_REQUESTS), (64, MAX_FACTOR, MAX_REQUESTS)],
)
def test_a_fleet_with_the_default_order_reads_the_dataset_once(tmp_path, num_nodes, most_bytes, most_requests):
    simulated_nodes.write_dataset(tmp_path, Size())
    epoch = scale_laws.count_epoch(simulated_nodes.open_store(tmp_path), Size(), num_nodes)
    assert epoch.factor <= most_bytes and epoch.requests_per_megabyte <= most_requests, epoch
