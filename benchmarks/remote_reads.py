"""Reading shards of an object store: verified and kept on the node, against what the store and sha256 allow.

    python benchmarks/remote_reads.py [--megabytes 1600] [--rounds 3] [--latency 0.1] [--connection 90]

The store is a server on this machine that answers ranges from memory, in a process of its own: after the latency, in
seconds, and at the speed, in MB/s, that Amazon names for a connection to S3 ("Performance design patterns": 100 to 200
ms, 85 to 90 MB/s). `--latency 0 --connection 1e6` answers at once: then both cores of a small machine are the limit.

    ranged reads        requests of 4 MiB, 16 at once as those ahead of steps, which are dropped: store and driver
    sha256              of the same bytes, in one thread
    cold epoch          images in training order from an empty node: read ahead, verified, kept on it, gathered
    warm epoch          the same from its cache, over the same from local files

What precedes an epoch, manifest and indexes, is not in it: `make scale` counts those requests.
Every ratio is of one round, and the median of the rounds is shown.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import mmap
import multiprocessing
import os
import re
import shutil
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from kftrain.core import storage
from kftrain.data.dataset import ShardedDataset
from kftrain.data.loader import TrainLoader
from kftrain.data.order import BatchPlan, TrainingOrder
from kftrain.data.read_ahead import NUM_REQUESTS, AheadPlan
from kftrain.data.schema import BYTES, Block, Field, SampleSchema
from kftrain.data.shards.cache import NodeCache
from kftrain.data.shards.manifest import Manifest, Split, content_digest, read_manifest
from kftrain.data.shards.verified import Opened
from kftrain.data.shards.writer import SplitWriter
from kftrain.data.tuning import Tuning

IMAGE_BYTES, BATCH, REQUEST_BYTES, PIECE_BYTES = 20_000, 64, 4 << 20, 1 << 20
SCHEMA = SampleSchema((Field("image", BYTES, extensions=("jpg",)),))


def serve(folder: str, port: Any, latency: float, bytes_per_second: float) -> None:
    """Answers HEAD and GET, with ranges, for the files of a folder, on connections that stay open."""
    files = {}
    for path in Path(folder).iterdir():
        with path.open("rb") as stream:
            files[f"/bucket/{path.name}"] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    listener = socket.create_server(("127.0.0.1", 0))
    port.value = listener.getsockname()[1]
    while True:
        threading.Thread(
            target=answer, args=(listener.accept()[0], files, latency, bytes_per_second), daemon=True
        ).start()


def answer(connection: socket.socket, files: dict[str, mmap.mmap], latency: float, bytes_per_second: float) -> None:
    """Answers the requests of one connection."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):  # the client has gone
        answer_requests(connection, files, latency, bytes_per_second)


def answer_requests(
    connection: socket.socket, files: dict[str, mmap.mmap], latency: float, bytes_per_second: float
) -> None:
    """Answers requests until the client closes its end."""
    received = b""
    while True:
        while b"\r\n\r\n" not in received:
            if not (chunk := connection.recv(65536)):
                return
            received += chunk
        request, _, received = received.partition(b"\r\n\r\n")
        method, path = request.split(b" ")[:2]
        content = memoryview(files[path.decode().partition("?")[0]])
        match = re.search(rb"(?i)range: bytes=(\d+)-(\d+)", request)
        body = content[int(match[1]) : int(match[2]) + 1] if match else content
        status = b"200 OK"
        if match:  # obstore takes no part that is not said to be one
            status = b"206 Partial Content\r\nContent-Range: bytes %s-%s/%d" % (match[1], match[2], len(content))
        time.sleep(latency)
        connection.sendall(b'HTTP/1.1 %s\r\nETag: "1"\r\nContent-Length: %d\r\n\r\n' % (status, len(body)))
        if method == b"GET":
            send(connection, body, bytes_per_second)


def send(connection: socket.socket, body: memoryview, bytes_per_second: float) -> None:
    """Sends a body in pieces, none before its time."""
    start = time.perf_counter()
    for place in range(0, len(body), PIECE_BYTES):
        time.sleep(max(0.0, start + place / bytes_per_second - time.perf_counter()))
        connection.sendall(body[place : place + PIECE_BYTES])


def write_dataset(folder: Path, num_samples: int) -> str:
    """Shards of 64 MB of images that no archive compresses."""
    folder.mkdir()
    shards = {}
    for split, count in (("train", num_samples), ("validation", 10)):
        with SplitWriter(folder, split, SCHEMA, 64_000_000) as writer:
            for number in range(count):
                image = np.empty(1, object)
                image[0] = os.urandom(IMAGE_BYTES)
                writer.write(Block(f"{number:07d}", {"image": image}))
            shards[split] = writer.finish()
    manifest = Manifest(
        dataset_digest=content_digest(SCHEMA, {}, shards),
        sample_schema=SCHEMA,
        task_kind="x",
        task_settings={},
        splits={split: Split(shards=of_split) for split, of_split in shards.items()},
        source="x",
        source_listing_digest="",
        baselines={},
    )
    (folder / "manifest.json").write_text(json.dumps(manifest.to_dict()))
    return str(folder / "manifest.json")


def time_epoch(uri: str, cache: NodeCache) -> float:
    """Opens a dataset, and returns the bytes per second of an epoch of it."""
    dataset = ShardedDataset(uri, read_manifest(uri), "train", Opened(cache))
    return speed(lambda: read_epoch(dataset))


def read_epoch(dataset: ShardedDataset) -> int:
    """Reads all samples in training order, as a training that computes nothing; returns their bytes."""
    order = TrainingOrder(dataset.num_samples, 0, 1024, 64)
    dataset.expect_window(order.window_ranges, order.range_samples)
    steps = dataset.num_samples // BATCH
    ahead = AheadPlan(dataset.plan_fetches, 1024) if dataset.is_remote else None
    loader = TrainLoader(dataset, order, BatchPlan(BATCH, 1), 0, Tuning(2), ahead=ahead)
    images = (batch.micro_batches[0].arrays["image"] for batch in loader.steps(0, steps))
    return sum(len(bytes(image)) for of_batch in images for image in of_batch)


def read_ranges(uri: str) -> int:
    """Reads the shards of the training split in requests, and drops them."""
    shards = read_manifest(uri).splits["train"].shards
    folder = uri.rpartition("/")[0]
    ranges = [
        (f"{folder}/{shard.name}", start, min(start + REQUEST_BYTES, shard.bytes))
        for shard in shards
        for start in range(0, shard.bytes, REQUEST_BYTES)
    ]
    with ThreadPoolExecutor(NUM_REQUESTS) as threads:
        return sum(len(content) for content in threads.map(lambda one: storage.read_range(*one), ranges))


def hash_files(folder: Path) -> int:
    """Hashes the shards of the training split."""
    contents = [path.read_bytes() for path in sorted(folder.glob("train-*.tar"))]
    start = time.perf_counter()
    for content in contents:
        hashlib.sha256(content).digest()
    return int(sum(map(len, contents)) / (time.perf_counter() - start))


def speed(work: Callable[[], int]) -> float:
    """Bytes per second."""
    start = time.perf_counter()
    return work() / (time.perf_counter() - start)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=1600)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latency", type=float, default=0.1)
    parser.add_argument("--connection", type=float, default=90)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="remote-reads-") as scratch:
        folder = Path(scratch, "bucket")
        local_uri = write_dataset(folder, arguments.megabytes * 10**6 // IMAGE_BYTES)
        port = multiprocessing.Value("i", 0)
        of_store = (str(folder), port, arguments.latency, arguments.connection * 1e6)
        server = multiprocessing.Process(target=serve, args=of_store, daemon=True)
        server.start()
        while not port.value:
            time.sleep(0.01)
        os.environ |= {
            **dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "test"),
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port.value}",
        }
        uri, rows = "s3://bucket/manifest.json", []
        time_epoch(local_uri, NodeCache(None, 0))
        for number in range(arguments.rounds):
            node = Path(scratch, "node")
            cache = NodeCache.of_node(str(node), 8 << 30)
            ranged, hashed = speed(lambda: read_ranges(uri)), hash_files(folder)
            cold, warm, local = time_epoch(uri, cache), time_epoch(uri, cache), time_epoch(local_uri, cache)
            rows.append((ranged, hashed, cold, warm, local, cold / min(ranged, hashed), warm / local))
            print(
                f"round {number + 1}: " + ", ".join(f"{value / 1e6:,.0f}" for value in rows[-1][:5]) + " MB/s",
                flush=True,
            )
            shutil.rmtree(node)
        server.terminate()
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    names = ("ranged reads", "sha256", "cold epoch", "warm epoch", "local epoch")
    for name, value in zip(names, medians, strict=False):
        print(f"{name:14}{value / 1e6:8,.0f} MB/s")
    print(f"cold epoch over the slower of ranged reads and sha256: {medians[5]:.2f} (bar 0.8)")
    print(f"warm epoch over local files: {medians[6]:.2f} (bar 1)")


if __name__ == "__main__":
    main()
