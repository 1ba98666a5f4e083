"""What the peers do in the data benchmarks, as their users call them: see table.py.

They have an environment of their own.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import itertools
import json
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import content
import fresh_process
import numpy as np
from fresh_process import Work

MODULES = {"webdataset": "webdataset", "litdata": "litdata", "MDS": "streaming.base"}


def imported(peer: str) -> Any:
    """Its module. That of mosaicml-streaming loads vision sets first, and these a torchvision of another build."""
    if peer == "MDS" and "streaming" not in sys.modules:
        spec = importlib.util.find_spec("streaming")
        assert spec is not None, "mosaicml-streaming is not installed"
        package = types.ModuleType("streaming")
        package.__path__ = list(spec.submodule_search_locations or [])
        sys.modules["streaming"] = package
    return importlib.import_module(MODULES[peer])


def samples(kind: str, folder: Path, num_samples: int) -> Iterator[Any]:
    """`(image, label)`, or an array of tokens."""
    if kind == "images":
        images = content.images(folder)
        return ((images[number % len(images)], number % 10) for number in range(num_samples))
    if kind == "packed":
        return content.packed_tokens(num_samples)
    tokens = content.tokens()
    return (tokens[number % len(tokens)] for number in range(num_samples))


def write(peer: str, kind: str, arguments: argparse.Namespace) -> Work:
    """All samples into a folder, in one process."""
    out, items = Path(arguments.out), list(samples(kind, Path(arguments.folder), arguments.samples))
    writer, module = WRITERS[peer], imported(peer)
    return Work(
        arguments.samples,
        lambda: writer(module, kind, out, items),
        lambda: READERS[peer](kind, out, False)[1](),
        lambda: float(sum(path.stat().st_size for path in out.rglob("*") if path.is_file())),
    )


def read(peer: str, kind: str, arguments: argparse.Namespace) -> Work:
    """All samples, each copied once; webdataset and MDS as they are stored, litdata in its training order."""
    imported(peer)
    run, checksum = READERS[peer](kind, Path(arguments.folder) / f"{peer}-{kind}", peer == "litdata")
    return Work(arguments.samples, run, checksum)


def write_webdataset(module: Any, kind: str, out: Path, items: list[Any]) -> None:
    """ShardWriter: tar only, no index, no digest."""
    with module.ShardWriter(str(out / "train-%06d.tar"), maxsize=content.SHARD_SIZE_BYTES, verbose=0) as writer:
        for number, item in enumerate(items):
            if kind == "images":
                writer.write({"__key__": content.key(number), "jpg": item[0], "cls": item[1]})
            else:
                writer.write({"__key__": content.key(number), "tokens.npy": item})


def write_litdata(module: Any, kind: str, out: Path, items: list[Any]) -> None:
    """Its Cache, which `optimize` uses in each of its processes."""
    cache = module.streaming.cache.Cache(str(out), chunk_bytes=content.SHARD_SIZE_BYTES)
    for number, item in enumerate(items):
        cache[number] = {"image": item[0], "label": item[1]} if kind == "images" else {"tokens": item}
    cache.done()
    cache.merge()


def write_mds(module: Any, kind: str, out: Path, items: list[Any]) -> None:
    """MDSWriter."""
    length = content.SEQUENCE_LENGTH * (content.PACKED if kind == "packed" else 1)
    columns = {"image": "bytes", "label": "int"} if kind == "images" else {"tokens": f"ndarray:uint16:{length}"}
    with module.MDSWriter(out=str(out), columns=columns, size_limit=content.SHARD_SIZE_BYTES) as writer:
        for item in items:
            writer.write({"image": item[0], "label": item[1]} if kind == "images" else {"tokens": item})


Reading = tuple[Callable[[], object], Callable[[], int]]
"""What is measured, and the checksum."""


def read_webdataset(kind: str, folder: Path, shuffle: bool) -> Reading:
    """WebDataset without decoding: its best case."""
    urls = sorted(map(str, folder.glob("train-*.tar")))
    extension = "jpg" if kind == "images" else "tokens.npy"

    def files() -> Iterator[bytes]:
        for sample in imported("webdataset").WebDataset(urls, shardshuffle=False):
            yield sample[extension]

    def checksum() -> int:
        return content.checksum(files()) if kind == "images" else content.tar_checksum(folder)

    return lambda: fresh_process.copy_all(files()), checksum


def read_other(peer: str, kind: str, folder: Path, shuffle: bool) -> Reading:
    """StreamingDataset of litdata or MDS."""

    def files() -> Iterator[Any]:
        module = imported(peer)
        if peer == "litdata":
            dataset = module.StreamingDataset(str(folder), shuffle=shuffle)
        else:
            dataset = module.StreamingDataset(local=str(folder), shuffle=shuffle, batch_size=content.BATCH_SIZE)
        for sample in dataset:
            if kind == "images":
                yield sample["image"]
            else:
                yield from np.asarray(sample["tokens"]).reshape(-1, content.SEQUENCE_LENGTH)

    return lambda: fresh_process.copy_all(files()), lambda: content.checksum(files())


def resume_webdataset(arguments: argparse.Namespace) -> Work:
    """To the first batch somewhere in the epoch: what comes before is read and dropped."""
    urls = sorted(map(str, (Path(arguments.folder) / "webdataset-images").glob("train-*.tar")))
    first = int(arguments.at * arguments.samples)
    rows = imported("webdataset").WebDataset(urls, shardshuffle=False)
    return Work(1, lambda: list(itertools.islice(rows, first, first + content.BATCH_SIZE)), lambda: 0)


def available() -> dict[str, str]:
    """Peer -> why it cannot be imported, or nothing."""
    found = {}
    for peer in MODULES:
        try:
            imported(peer)
            found[peer] = ""
        except (ImportError, AttributeError, RuntimeError, AssertionError) as error:
            found[peer] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return found


WRITERS = {"webdataset": write_webdataset, "litdata": write_litdata, "MDS": write_mds}
READERS: dict[str, Callable[[str, Path, bool], Reading]] = {
    "webdataset": read_webdataset,
    "litdata": functools.partial(read_other, "litdata"),
    "MDS": functools.partial(read_other, "MDS"),
}
WORKS: dict[str, Callable[[argparse.Namespace], Work]] = {
    **{
        f"{verb}-{kind}-{peer}": functools.partial(function, peer, kind)
        for verb, function in (("write", write), ("read", read))
        for kind in content.NUM_SAMPLES
        for peer in MODULES
    },
    "resume-webdataset": resume_webdataset,
}

if __name__ == "__main__":
    if sys.argv[1:] == ["available"]:
        print(json.dumps(available()))
    else:
        fresh_process.main(WORKS)
