"""What kftrain does in the data benchmarks, and the physical limits: see table.py."""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import io
import multiprocessing
import os
import sys
import tarfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import content
import fresh_process
import numpy as np
from fresh_process import Work

from kftrain.core import storage
from kftrain.data import images
from kftrain.data.dataset import ShardedDataset
from kftrain.data.decoding import Decoding
from kftrain.data.lanes import Lanes
from kftrain.data.loader import TrainLoader
from kftrain.data.order import BatchPlan, TrainingOrder
from kftrain.data.schema import BYTES, Arrays, Block, Field, SampleSchema, Window
from kftrain.data.shards.manifest import Manifest, Split, content_digest, publish_manifest, read_manifest
from kftrain.data.shards.verified import FirstUse, Memory
from kftrain.data.shards.writer import SplitWriter
from kftrain.data.tuning import Kind, Tuning
from kftrain.data.windows import TokenWindows, cut_windows
from kftrain.data.worker_processes import WorkerCommand, decode_rows
from kftrain.process.child import receive

if TYPE_CHECKING:
    import torch

SCHEMAS = {
    "images": SampleSchema((Field("image", BYTES, (), ("jpg",)), Field("label", "int64"))),
    "tokens": SampleSchema((Field("tokens", "uint16"),)),
}
SETTINGS = {"shuffle_range_samples": 1024, "shuffle_window_ranges": 64, "prefetch_batches": 2}
"""As a configuration has them by default."""


def blocks(kind: str, folder: Path, num_samples: int) -> Iterator[Block]:
    """The samples, as a task yields them."""
    if kind == "images":
        images = [np.array([image], object) for image in content.images(folder)]
        labels = np.arange(10)
        for number in range(num_samples):
            arrays = {"image": images[number % len(images)], "label": labels[number % 10 :][:1]}
            yield Block(content.key(number), arrays)
        return
    for number, rows in enumerate(content.packed_tokens(num_samples)):
        yield Block(content.key(number * content.PACKED), {"tokens": rows})


def write(kind: str, arguments: argparse.Namespace) -> Work:
    """SplitWriter: tar, index, and sha256 of both."""
    out, made = Path(arguments.out), list(blocks(kind, Path(arguments.folder), arguments.samples))

    def run() -> None:
        with SplitWriter(out, "train", SCHEMAS[kind], content.SHARD_SIZE_BYTES) as writer:
            for block in made:
                writer.write(block)
            writer.finish()

    return Work(arguments.samples, run, lambda: content.tar_checksum(out), lambda: float(folder_bytes(out)))


def write_limit(kind: str, is_hashed: bool, arguments: argparse.Namespace) -> Work:
    """One write() of bytes that exist, a chunk of them again and again; `is_hashed`: and their sha256."""
    one = b"".join(content.images(Path(arguments.folder))) if kind == "images" else content.tokens().tobytes()
    num_distinct = content.NUM_DISTINCT * (1 if kind == "images" else 4)
    path = Path(arguments.out) / "bytes"

    def run() -> None:
        digest = hashlib.sha256()
        with path.open("wb", buffering=0) as stream:
            for _ in range(arguments.samples // num_distinct):
                stream.write(one)
                if is_hashed:
                    digest.update(one)

    return Work(arguments.samples // num_distinct * num_distinct, run, lambda: path.stat().st_size)


def dataset(kind: str, folder: Path, num_samples: int, shard_size_bytes: int = content.SHARD_SIZE_BYTES) -> None:
    """The samples as a dataset in the folder; validation is there because a dataset has one."""
    shards = {}
    for split, count in (("train", num_samples), ("validation", 1)):
        with SplitWriter(folder, split, SCHEMAS[kind], shard_size_bytes) as writer:
            for block in blocks(kind, folder.parent, count):
                writer.write(block)
            shards[split] = writer.finish()
    manifest = Manifest(
        dataset_digest=content_digest(SCHEMAS[kind], {}, shards),
        sample_schema=SCHEMAS[kind],
        task_kind="benchmark",
        task_settings={},
        splits={split: Split(shards=found) for split, found in shards.items()},
        source="benchmark",
        source_listing_digest="",
        baselines={},
    )
    publish_manifest(str(folder / "manifest.json"), manifest)


def adopt(shards: Path, into: Path) -> None:
    """A dataset of the peer's shards, as they are, found at `into`; one more shard is held out."""
    from kftrain.config import Config
    from kftrain.sharding.adopted import adopting

    with tarfile.open(shards / "validation-000000.tar", "w") as archive:
        for extension, value in (("jpg", content.images(shards.parent)[0]), ("cls", b"0")):
            member = tarfile.TarInfo(f"{content.key(0)}.{extension}")
            member.size = len(value)
            archive.addfile(member, io.BytesIO(value))
    data = {"source": str(shards), "shards": "adopt"}
    root = {"storage_root": str(shards.parent / "adopting")}
    made = adopting.adopt(Config.model_validate({"run": root, "data": data}), None, lambda line: None)
    into.symlink_to(Path(made.manifest_uri).parent)


def opened(folder: Path, sha256: str = "") -> ShardedDataset | TokenWindows:
    """Its training split: images, or a stream of tokens cut into samples. `sha256`: of the manifest, as in a job."""
    window = Window(content.SEQUENCE_LENGTH, content.SEQUENCE_LENGTH, {"tokens": 0})
    uri = str(folder / "manifest.json")
    return cut_windows(ShardedDataset(uri, read_manifest(uri, sha256=sha256), "train"), window)


def order_of(samples: ShardedDataset | TokenWindows) -> TrainingOrder:
    """The training order with the default settings."""
    sizes = (SETTINGS["shuffle_range_samples"], SETTINGS["shuffle_window_ranges"])
    return TrainingOrder(samples.num_samples, 0, *sizes, lanes=Lanes(64, content.BATCH_SIZE, sizes[0]))


def loader_of(samples: ShardedDataset | TokenWindows, tuning: Tuning | None = None, **options: Any) -> TrainLoader:
    """One process, everything else as by default."""
    samples.expect_window(SETTINGS["shuffle_window_ranges"], SETTINGS["shuffle_range_samples"])
    plan = BatchPlan(content.BATCH_SIZE, 1)
    return TrainLoader(samples, order_of(samples), plan, 0, tuning or Tuning(SETTINGS["prefetch_batches"]), **options)


def read_images(name: str, arguments: argparse.Namespace) -> Work:
    """Encoded images in training order, each copied once as a decoder would."""
    samples = opened(Path(arguments.folder) / name)
    total, order = samples.num_samples, order_of(samples)
    (field,) = (each.name for each in samples.schema.fields if "jpg" in each.extensions)

    def files() -> Iterator[Any]:
        for start in range(0, total, content.BATCH_SIZE):
            rows = samples.read(order.locate(np.arange(start, min(start + content.BATCH_SIZE, total))))
            yield from rows[field]

    return Work(total, lambda: fresh_process.copy_all(files()), lambda: content.checksum(files()))


def read_limit(name: str, arguments: argparse.Namespace) -> Work:
    """read() of the same bytes."""
    folder = Path(arguments.folder) / name
    paths = sorted(folder.glob("train-*.tar"))
    buffer = bytearray(1 << 20)

    def run() -> None:
        for path in paths:
            with path.open("rb", buffering=0) as stream:
                while stream.readinto(buffer):
                    pass

    return Work(opened(folder).num_samples, run, lambda: content.tar_checksum(folder))


def token_batches(arguments: argparse.Namespace) -> Work:
    """Batches as int64 tensors, in training order, read ahead in a thread."""
    import torch

    samples = opened(Path(arguments.folder) / "ours-tokens")

    def batches() -> Iterator[torch.Tensor]:
        for step in loader_of(samples).steps(0, samples.num_samples // content.BATCH_SIZE):
            yield torch.from_numpy(step.micro_batches[0].arrays["tokens"]).to(torch.int64)

    return _batches(samples.num_samples, batches)


def token_batches_limit(arguments: argparse.Namespace) -> Work:
    """`memmap[indices]` in the same order, with the indices at hand."""
    import torch

    samples = opened(Path(arguments.folder) / "ours-tokens")
    num_samples = samples.num_samples // content.BATCH_SIZE * content.BATCH_SIZE
    indices = order_of(samples).locate(np.arange(num_samples)).reshape(-1, content.BATCH_SIZE)
    flat = np.memmap(Path(arguments.folder) / "tokens.bin", np.uint16, "r").reshape(-1, content.SEQUENCE_LENGTH)

    def batches() -> Iterator[torch.Tensor]:
        for chosen in indices:
            yield torch.from_numpy(flat[chosen]).to(torch.int64)

    return _batches(samples.num_samples, batches)


def flat_tokens(folder: Path, num_samples: int) -> None:
    """The token samples as one array in a file."""
    distinct = content.tokens()
    with (folder / "tokens.bin").open("wb") as stream:
        for start in range(0, num_samples, len(distinct)):
            stream.write(distinct[: num_samples - start].tobytes())


def decode_row(sample: Arrays, generator: np.random.Generator) -> Arrays:
    """As the task does, without anything random."""
    size = content.IMAGE_SIZE
    return {"image": images.decode_part(sample["image"], size, 3, images.middle_square, "benchmark")}


def decoded(num_workers: int, kind: Kind, arguments: argparse.Namespace) -> Work:
    """Decoded images in training order, from the second batch on: workers have started then."""
    samples = opened(Path(arguments.folder) / "ours-images")
    command = WorkerCommand([sys.executable, __file__, "worker", arguments.folder], {})
    tuning = Tuning(SETTINGS["prefetch_batches"], num_workers, max(1, num_workers), kind)
    loader = loader_of(samples, tuning, decoding=Decoding(decode_row, 0), command=command)

    def pixels() -> Iterator[np.ndarray]:
        with contextlib.closing(loader):
            for step in loader.steps(0, samples.num_samples // content.BATCH_SIZE):
                yield step.micro_batches[0].arrays["image"]

    return _later_batches(samples.num_samples, pixels)


def decode_in_worker(folder: str, descriptor: str, memory: str, parent: str) -> None:
    """A worker process of `decoded`."""
    connection = Connection(int(descriptor))
    receive(connection)
    decode_rows(connection, int(memory), opened(Path(folder) / "ours-images"), Decoding(decode_row, 0))


def _later_batches(num_samples: int, batches: Callable[[], Iterator[np.ndarray]]) -> Work:
    """All batches but the first, which comes before the clock."""
    left = batches()
    next(left)
    rows = lambda: (row for batch in batches() for row in batch)  # noqa: E731
    num_batches = num_samples // content.BATCH_SIZE
    return Work((num_batches - 1) * content.BATCH_SIZE, lambda: sum(1 for _ in left), lambda: content.checksum(rows()))


class PillowAlone:
    """The same images out of memory, decoded by Pillow; `torch`'s DataLoader takes it as a dataset."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        samples = opened(Path(arguments.folder) / "ours-images")
        count = samples.num_samples // content.BATCH_SIZE * content.BATCH_SIZE
        self._files = content.images(Path(arguments.folder))
        self._numbers = (order_of(samples).locate(np.arange(count)) % len(self._files)).tolist()

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, position: int) -> np.ndarray:
        from PIL import Image

        image = Image.open(io.BytesIO(self._files[self._numbers[position]]))
        side = min(image.size)
        left, top = (image.width - side) / 2, (image.height - side) / 2
        wanted = (content.IMAGE_SIZE, content.IMAGE_SIZE)
        box = (left, top, left + side, top + side)
        return np.array(image.convert("RGB").resize(wanted, Image.Resampling.BILINEAR, box))


def pillow(arguments: argparse.Namespace) -> Work:
    """One after the other."""
    alone = PillowAlone(arguments)

    def pixels() -> Iterator[np.ndarray]:
        for start in range(0, len(alone), content.BATCH_SIZE):
            yield np.stack([alone[number] for number in range(start, start + content.BATCH_SIZE)])

    return _later_batches(len(alone), pixels)


def torch_loader(arguments: argparse.Namespace) -> Work:
    """Through two worker processes and their pipes; a batch is copied once."""
    import torch.utils.data

    alone: Any = PillowAlone(arguments)
    loader = torch.utils.data.DataLoader(alone, content.BATCH_SIZE, num_workers=2)
    return _later_batches(len(alone), lambda: (batch.numpy() for batch in loader))


def drop_from_memory(folder: Path) -> None:
    """Let the kernel forget the content of all files below a folder on a disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_cold(arguments: argparse.Namespace) -> Work:
    """One epoch of the loader from a disk, with every shard hashed on its first use."""
    folder = Path(arguments.folder) / "ours-images"
    uri = str(folder / "manifest.json")
    manifest = read_manifest(uri)
    uses = FirstUse(Memory(None))
    samples = ShardedDataset(uri, manifest, "train", uses)
    drop_from_memory(folder)

    def run() -> None:
        for step in loader_of(samples).steps(0, samples.num_samples // content.BATCH_SIZE):
            fresh_process.copy_all(step.micro_batches[0].arrays["image"])
        uses.require_verified()

    return Work(folder_bytes(folder), run, lambda: 0)


def read_cold_limit(arguments: argparse.Namespace) -> Work:
    """sha256 of the same files, one after the other."""
    folder = Path(arguments.folder) / "ours-images"
    drop_from_memory(folder)

    def run() -> None:
        for path in sorted(folder.glob("*.tar")):
            with path.open("rb", buffering=0) as stream:
                hashlib.file_digest(stream, "sha256")

    return Work(folder_bytes(folder), run, lambda: 0)


def shard(num_processes: int, arguments: argparse.Namespace) -> Work:
    """The whole shard step: a folder of images, which stay the files that they are."""
    from kftrain.config import Config
    from kftrain.sharding.shard_dataset import shard_dataset
    from kftrain.tasks import build_task

    folder, results = Path(arguments.folder) / "photos", []
    data = {"source": str(folder), "processes": num_processes, "part_size_bytes": 8_000_000}
    task = {"kind": "image_classification", "storage": "files", "num_classes": 10, "num_channels": 3, "image_size": 224}
    document = {"run": {"storage_root": arguments.out}, "data": data, "task": task}
    config = Config.model_validate(document)

    def run() -> None:
        results.append(shard_dataset(config, build_task(config.task), lambda line: None))

    return Work(arguments.samples, run, lambda: int(results[0].dataset_digest[:12], 16))


def shard_twice(arguments: argparse.Namespace) -> Work:
    """What two processes can do here at all: each shards everything by itself."""
    works = [shard(1, argparse.Namespace(**{**vars(arguments), "out": f"{arguments.out}/{name}"})) for name in "ab"]

    def run() -> None:
        children = [multiprocessing.get_context("fork").Process(target=work.run) for work in works]
        for child in children:
            child.start()
        for child in children:
            child.join()

    return Work(2 * arguments.samples, run, lambda: 0)


def resume(arguments: argparse.Namespace) -> Work:
    """To the first batch somewhere in the epoch, of a dataset that was opened and not read yet."""
    samples = opened(Path(arguments.folder) / "ours-images")
    first = int(arguments.at * samples.num_samples) // content.BATCH_SIZE
    return Work(1, first_batch(lambda: samples, first), lambda: 0)


def first_batch(open_samples: Callable[[], ShardedDataset | TokenWindows], first: int) -> Callable[[], object]:
    """Read the first batch; what was opened stays open until the clock has stopped."""
    kept: list[object] = []

    def run() -> None:
        steps = loader_of(open_samples()).steps(first, 1)
        kept.extend([steps, next(steps)])

    return run


def start(name: str, arguments: argparse.Namespace) -> Work:
    """From a manifest to the first batch, with the manifest's digest, which the shard step leaves to a job."""
    folder = Path(arguments.folder) / name
    sha256 = storage.sha256_file(str(folder / "manifest.json"))
    return Work(1, first_batch(lambda: opened(folder, sha256), 0), lambda: 0)


def memory(name: str, arguments: argparse.Namespace) -> Work:
    """One epoch of the loader; the figure is what the process grew by, in MiB of its own memory."""
    samples = opened(Path(arguments.folder) / name)
    before = rss_anon_mib()

    def run() -> None:
        for step in loader_of(samples).steps(0, samples.num_samples // content.BATCH_SIZE):
            fresh_process.copy_all(step.micro_batches[0].arrays["image"])

    return Work(samples.num_samples, run, lambda: 0, lambda: rss_anon_mib() - before)


def rss_anon_mib() -> float:
    """Resident memory of this process that is no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def folder_bytes(folder: Path) -> int:
    """Of all files in it."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _batches(num_samples: int, batches: Callable[[], Iterator[torch.Tensor]]) -> Work:
    def run() -> None:
        for _ in batches():
            pass

    rows = lambda: (row.astype(np.uint16) for batch in batches() for row in batch.numpy())  # noqa: E731
    return Work(num_samples // content.BATCH_SIZE * content.BATCH_SIZE, run, lambda: content.checksum(rows()))


WORKS: dict[str, Callable[[argparse.Namespace], Work]] = {
    "write-images": functools.partial(write, "images"),
    "write-tokens": functools.partial(write, "tokens"),
    "write-packed": functools.partial(write, "tokens"),
    **{
        f"write-{kind}-{limit}": functools.partial(write_limit, source, limit == "hashed")
        for kind, source in (("images", "images"), ("tokens", "tokens"), ("packed", "tokens"))
        for limit in ("limit", "hashed")
    },
    "read-images": functools.partial(read_images, "ours-images"),
    "adopted": functools.partial(read_images, "adopted-images"),
    "read-images-limit": functools.partial(read_limit, "ours-images"),
    "read-cold": read_cold,
    "read-cold-limit": read_cold_limit,
    "token-batches": token_batches,
    "token-batches-limit": token_batches_limit,
    "decoded": functools.partial(decoded, 0, "threads"),
    **{f"decoded-{kind}-{n}": functools.partial(decoded, n, kind) for kind in ("threads", "processes") for n in (1, 2)},
    "decoded-Pillow": pillow,
    "decoded-DataLoader": torch_loader,
    "shard-1": functools.partial(shard, 1),
    "shard-2": functools.partial(shard, 2),
    "shard-twice": shard_twice,
    "resume": resume,
    **{f"start-{times}": functools.partial(start, f"shards-{times}") for times in (1, 10, 100)},
    **{f"memory-{times}": functools.partial(memory, f"memory-{times}") for times in (1, 4, 16)},
}

if __name__ == "__main__":
    if sys.argv[1] == "worker":
        decode_in_worker(*sys.argv[2:])
    else:
        fresh_process.main(WORKS)
