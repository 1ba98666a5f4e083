"""How fast shards are written: ours against webdataset's own ShardWriter, equal samples in, equal members out.

    python benchmarks/shard_write.py [--rounds 5] [--scale 1.0] [--folder /dev/shm]

    ours                    SplitWriter: tar, index and sha256 of both
    webdataset              ShardWriter given arrays, as a user calls it: tar only, no index, no digest
    webdataset, bytes       ShardWriter given `.npy` bytes made beforehand: its best case
    limit                   one write() of all payload bytes

`images`: 20,000 bytes and a label per sample. `tokens`: 2,048 uint16 per sample. `packed tokens`: 64 samples to a
block, as language modelling writes them; webdataset has no rows and gets one sample per member.
"""

from __future__ import annotations

import argparse
import io
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fresh_process
import numpy as np
import webdataset

from kftrain.data.schema import Arrays, Block, Field, SampleSchema
from kftrain.data.shards.writer import SplitWriter

SHARD_SIZE_BYTES = 64_000_000
ROWS_PER_BLOCK = 64
NUM_SAMPLES = {"images": 20_000, "tokens": 40_000, "packed tokens": 40_000}
VARIANTS = [fresh_process.OURS, "webdataset", "webdataset, bytes", "limit"]


def samples(kind: str, num_samples: int) -> tuple[SampleSchema, list[Arrays]]:
    """The schema and the samples, one row each; a few hundred different ones in turn, so that memory stays small."""
    rng = np.random.default_rng(0)
    if kind == "images":
        schema = SampleSchema((Field("image", "uint8", (20_000,)), Field("label", "int64")))
        distinct = [
            {"image": rng.integers(0, 256, 20_000).astype(np.uint8), "label": rng.integers(0, 10, ())}
            for _ in range(200)
        ]
    else:
        schema = SampleSchema((Field("tokens", "uint16", (2048,)),))
        distinct = [{"tokens": rng.integers(0, 50_000, 2048).astype(np.uint16)} for _ in range(800)]
    return schema, [distinct[number % len(distinct)] for number in range(num_samples)]


def write_ours(folder: Path, schema: SampleSchema, items: list[Arrays], rows_per_block: int) -> None:
    with SplitWriter(folder, "train", schema, SHARD_SIZE_BYTES) as writer:
        fill(writer, items, rows_per_block)
        writer.finish()


def fill(writer: SplitWriter, items: list[Arrays], rows_per_block: int) -> None:
    for start in range(0, len(items), rows_per_block):
        writer.write(Block(f"sample-{start:08d}", stacked(items[start : start + rows_per_block])))


def stacked(rows: list[Arrays]) -> Arrays:
    if len(rows) == 1:
        return {name: array[None] for name, array in rows[0].items()}
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def write_peer(folder: Path, items: list[dict[str, Any]]) -> None:
    pattern = str(folder / "train-%06d.tar")
    with webdataset.ShardWriter(pattern, maxsize=SHARD_SIZE_BYTES, maxcount=10**9, mtime=0, verbose=0) as writer:
        for number, item in enumerate(items):
            writer.write({"__key__": f"sample-{number:08d}", **item})


def write_limit(folder: Path, items: list[Arrays]) -> None:
    payload = b"".join(array.tobytes() for item in items for array in item.values())
    with (folder / "train-000000.tar").open("wb", buffering=0) as stream:
        stream.write(payload)


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def prepared(variant: str, kind: str, num_samples: int, folder: Path) -> Callable[[], None]:
    """The work of a variant, with everything made that is not its own work."""
    schema, items = samples(kind, num_samples)
    if variant == fresh_process.OURS:
        return lambda: write_ours(folder, schema, items, ROWS_PER_BLOCK if kind == "packed tokens" else 1)
    if variant == "limit":
        return lambda: write_limit(folder, items)
    if variant == "webdataset":
        named: list[dict[str, Any]] = [{f"{name}.npy": array for name, array in item.items()} for item in items]
    else:
        made: dict[int, dict[str, Any]] = {}
        for item in items:
            made.setdefault(id(item), {f"{name}.npy": npy(array) for name, array in item.items()})
        named = [made[id(item)] for item in items]
    return lambda: write_peer(folder, named)


def run_variant(variant: str, kind: str, num_samples: int, parent: str) -> None:
    folder = Path(tempfile.mkdtemp(dir=parent))
    try:
        work = prepared(variant, kind, num_samples, folder)
        _, items = samples(kind, 1)
        payload_bytes = num_samples * sum(array.nbytes for array in items[0].values())

        def timed() -> tuple[int, float]:
            work()
            return num_samples, sum(path.stat().st_size for path in folder.iterdir()) / payload_bytes

        fresh_process.measure(timed)
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the samples to write")
    parser.add_argument("--folder", default="/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir())
    parser.add_argument("--kind", choices=NUM_SAMPLES, help=argparse.SUPPRESS)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.variant:
        num_samples = int(NUM_SAMPLES[arguments.kind] * arguments.scale)
        run_variant(arguments.variant, arguments.kind, num_samples, arguments.folder)
        return
    for kind in NUM_SAMPLES:
        options = ["--kind", kind, "--scale", str(arguments.scale), "--folder", arguments.folder]
        found = fresh_process.compare(__file__, VARIANTS, options, arguments.rounds)
        fresh_process.report(f"write {kind} (samples)", found, "bytes / payload")


if __name__ == "__main__":
    main()
