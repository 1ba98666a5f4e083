"""A dataset of a few MB in fsspec's memory, whose requests are counted, and the bytes that it should have."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from kftrain.data.schema import BYTES, Block, Field, SampleSchema
from kftrain.data.shards.manifest import Manifest, Split, content_digest, read_manifest
from kftrain.data.shards.writer import SplitWriter

FOLDER = "/remote-shards"
URI = "memory://remote-shards/manifest.json"
SCHEMA = SampleSchema((Field("image", BYTES, extensions=("jpg",)), Field("rows", "int32", (3,))))


def make_block(number: int) -> Block:
    """An image of up to 60 kB, seldom an empty one, and three numbers."""
    rng = np.random.default_rng(number)
    image = np.empty(1, object)
    image[0] = b"" if number % 50 == 7 else rng.bytes(int(rng.integers(1, 60_000)))
    return Block(f"dir/{number:04d}", {"image": image, "rows": rng.integers(0, 1 << 30, (1, 3), np.int32)})


def write_dataset(folder: Path, num_samples: int = 300, shard_size_bytes: int = 3_000_000) -> Path:
    """About 9 MB in three shards of the training split, and a small validation split; all in one folder."""
    folder.mkdir(parents=True)
    shards = {}
    for split, numbers in (("train", range(num_samples)), ("validation", range(num_samples, num_samples + 10))):
        with SplitWriter(folder, split, SCHEMA, shard_size_bytes) as writer:
            for number in numbers:
                writer.write(make_block(number))
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
    return folder


@dataclass
class Requests:
    """What was asked of the store, in order: (kind, path, bytes)."""

    all: list[tuple[str, str, int]] = field(default_factory=list)

    def of(self, suffix: str, kind: str = "GET") -> list[int]:
        """Bytes of each request for files whose names end so."""
        return [num_bytes for name, path, num_bytes in self.all if name == kind and path.endswith(suffix)]


@contextmanager
def counted_requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[Requests]:
    """Count what is asked of fsspec's memory."""
    requests, cat_file, info = Requests(), MemoryFileSystem.cat_file, MemoryFileSystem.info

    def cat(self, path, start=None, end=None, **options):
        content = cat_file(self, path, start=start, end=end, **options)
        requests.all.append(("GET", path, len(content)))
        return content

    def head(self, path, **options):
        requests.all.append(("HEAD", path, 0))
        return info(self, path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "cat_file", cat)
        patch.setattr(MemoryFileSystem, "info", head)
        yield requests


def upload(folder: Path) -> str:
    """Put all files of a folder into the store; return the URI of the manifest."""
    store = fsspec.filesystem("memory")
    for path in folder.iterdir():
        store.pipe_file(f"{FOLDER}/{path.name}", path.read_bytes())
    return URI


def forget_tables(folder: Path) -> None:
    """Make of a dataset what a release before has written."""
    document = json.loads((folder / "manifest.json").read_text())
    for split in document["splits"].values():
        for shard in split["shards"]:
            del shard["blocks_sha256"]
    (folder / "manifest.json").write_text(json.dumps(document))
    for table in folder.glob("*.blocks"):
        table.unlink()


def assert_rows(arrays, numbers) -> None:
    """Compare what was read with what `make_block` makes of these numbers, which shares no code with a reader."""
    for row, number in enumerate(np.asarray(numbers).tolist()):
        expected = make_block(number).arrays
        assert bytes(arrays["image"][row]) == expected["image"][0], number
        assert np.array_equal(arrays["rows"][row], expected["rows"][0]), number


def read(uri: str = URI):
    """The manifest in the store."""
    return read_manifest(uri)
