"""The laws of scale: what the nodes of a job ask of an object store, counted and not timed.

    python benchmarks/scale.py [--nodes 1 8 64 1000] [--simulated 64] [--small]

Nodes are simulated one after the other: each runs what a process of a job runs, over a store that counts, and differs
from the others only in its rank. Of more than `--simulated` nodes so many are run, evenly spread, and stand for all.
`--small` takes lanes and windows of a 16th of the default size, and a bar's factor is of nodes over lanes as ever.

    bytes / dataset     bytes that all nodes read in an epoch, verified, over the size of the training split's shards
    requests / MB       of the same, whatever is asked for
    start               requests and bytes of a node before its first step, of a dataset of 100,000 shards; behind the
                        + those of a second process of the node
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from helpers import scale_laws, simulated_nodes
from helpers.fakes.counting_store import count, count_bytes
from helpers.simulated_nodes import Size

from kftrain import trust

MAX_FACTOR, MAX_REQUESTS, MAX_REQUESTS_OF_MANY = 1.1, 1.0, 4.0


def describe(name: str, nodes: int | str, value: str, bar: str, is_met: bool) -> str:
    return f"| {name} | {nodes} | {value} | {bar} | {'met' if is_met else 'MISSED'} |"


def count_epochs(size: Size, nodes: list[int], num_simulated: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        simulated_nodes.write_dataset(Path(folder), size)
        store = simulated_nodes.open_store(folder)
        for num_nodes in nodes:
            is_sampled = num_nodes > num_simulated
            epoch = scale_laws.count_epoch(store, size, num_nodes, num_simulated if is_sampled else 0)
            shown = f"{num_nodes:,}" + (f" ({epoch.num_simulated} simulated)" if is_sampled else "")
            most = MAX_FACTOR if num_nodes <= size.lanes else MAX_FACTOR * (num_nodes / size.lanes + 1)
            yield describe("bytes / dataset", shown, f"{epoch.factor:.3f}", f"≤ {most:.1f}", epoch.factor <= most)
            requests = epoch.requests_per_megabyte
            bar = MAX_REQUESTS if num_nodes <= size.lanes else MAX_REQUESTS_OF_MANY
            yield describe("requests / MB", shown, f"{requests:.2f}", f"≤ {bar:.0f}", requests <= bar)


def count_starts(nodes: list[int]) -> Iterator[str]:
    store, _, _ = scale_laws.open_large_store()
    for num_nodes in nodes:
        with tempfile.TemporaryDirectory() as cache:
            first, second = scale_laws.count_start(store, num_nodes - 1, num_nodes, cache)
        of_shards = count(second, below=store.uri("root", "shards"))
        value = f"{count(first)} + {count(second)} requests, {count_bytes(first) / 1e6:.2f} MB"
        is_met = count(first) <= 20 and count_bytes(first) <= 8e6 and not of_shards
        yield describe("start, the last node", f"{num_nodes:,}", value, "≤ 20 requests, 8 MB", is_met)


def count_stages() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        firing = scale_laws.count_unchanged_firing(folder)
    lists = [one for one in firing if one.kind == "list"]
    contents = [one for one in firing if one.uri.endswith((".tar", ".npy", ".blocks"))]
    value = f"{len(lists)} listing, {count(firing) - count(lists)} other requests, {len(contents)} of content"
    yield describe("unchanged firing", "any", value, "1 listing, no content", len(lists) == 1 and not contents)
    lists = [one for one in scale_laws.count_listing() if one.kind == "list"]
    yield describe("folders of parts", "any", f"{len(lists)} listing", "1 listing", len(lists) == 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", nargs="+", type=int, default=[1, 8, 64, 1000])
    parser.add_argument("--simulated", type=int, default=64)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    trust.permit_kinds({simulated_nodes.TASK})
    print("| law | nodes | counted | bar | |\n|---|---|---|---|---|")
    size = Size(lanes=4, batch=1024) if options.small else Size()
    rows = [count_epochs(size, options.nodes, options.simulated), count_starts(options.nodes), count_stages()]
    for row in (row for of_law in rows for row in of_law):
        print(row, flush=True)
    if not simulated_nodes.VERIFIES_RANGES:
        print("\nRanged reads do not verify themselves here: each node reads a shard whole, to hash it.")


if __name__ == "__main__":
    main()
