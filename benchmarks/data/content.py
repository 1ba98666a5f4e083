"""The samples of the data benchmarks: some hundred different ones in turn. Needs numpy alone, but to make images.

`images`: a JPEG of about 20 KB and a label. `tokens`: 2,048 of uint16, that is 4 KB. `packed`: 32 of these in a member.
"""

from __future__ import annotations

import io
import itertools
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

NUM_SAMPLES = {"images": 20_000, "tokens": 40_000, "packed": 40_000}
SEQUENCE_LENGTH = 2048
PACKED = 32
"""Sequences of a member: 64 Ki tokens, as kftrain packs them."""
NUM_DISTINCT = 200
IMAGE_SIZE = 224
"""Pixels of a side, decoded."""
SHARD_SIZE_BYTES = 64_000_000
BATCH_SIZE = 64


def make(folder: Path) -> None:
    """Writes the different images into the folder: made once, since another Pillow would make others."""
    images = [_jpeg(number) for number in range(NUM_DISTINCT)]
    (folder / "images.bin").write_bytes(b"".join(images))
    np.save(folder / "images.npy", np.cumsum([0, *map(len, images)]))


def make_image_folder(bench: Path, folder: Path, num_files: int) -> None:
    """A folder for each of ten classes; each file differs from all others in what follows the image."""
    found = images(bench)
    for number in range(num_files):
        path = folder / f"{number % 10}" / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(found[number % len(found)] + number.to_bytes(8, "big"))


def images(folder: Path) -> list[bytes]:
    """The different images; sample i is number i modulo their count, its label that modulo 10."""
    content = (folder / "images.bin").read_bytes()
    return [content[start:stop] for start, stop in itertools.pairwise(np.load(folder / "images.npy").tolist())]


def tokens() -> np.ndarray:
    """The different sequences, uint16 `[sequences, 2048]`."""
    shape = (4 * NUM_DISTINCT, SEQUENCE_LENGTH)
    return np.random.default_rng(0).integers(0, 50_000, shape).astype(np.uint16)


def packed_tokens(num_samples: int) -> Iterator[np.ndarray]:
    """The same, so many in all, packed: uint16 `[sequences * 2048]` each."""
    sequences = tokens()
    for start in range(0, num_samples, PACKED):
        first = start % len(sequences)
        yield sequences[first : first + min(PACKED, num_samples - start)].reshape(-1)


def key(number: int) -> str:
    """Of a sample."""
    return f"sample-{number:08d}"


def checksum(contents: Iterable[bytes | memoryview | np.ndarray]) -> int:
    """Of samples in any order."""
    return sum(map(zlib.crc32, contents))


def tar_checksum(folder: Path) -> int:
    """Of the samples in the folder's shards for training, as Python's own `tarfile` finds them."""
    return sum(map(_members_checksum, sorted(folder.glob("train-*.tar"))))


def _members_checksum(path: Path) -> int:
    total = 0
    with tarfile.open(path) as archive:
        for member in archive:
            stream = archive.extractfile(member)
            assert stream is not None, member.name
            if member.name.endswith(".jpg"):
                total += checksum([stream.read()])
            elif member.name.endswith("tokens.npy"):
                total += checksum(np.load(io.BytesIO(stream.read())).reshape(-1, SEQUENCE_LENGTH))
    return total


def _jpeg(number: int) -> bytes:
    """Clouds with some noise, of a size of its own."""
    from PIL import Image

    rng = np.random.default_rng(number)
    width, height = rng.integers(220, 300, 2).tolist()
    clouds = Image.fromarray(rng.integers(0, 256, (9, 12, 3)).astype(np.uint8)).resize((width, height), Image.BICUBIC)
    noisy = np.clip(np.asarray(clouds, np.int16) + rng.normal(0, 7, (height, width, 1)), 0, 255).astype(np.uint8)
    stream = io.BytesIO()
    Image.fromarray(noisy).save(stream, "JPEG", quality=84)
    return stream.getvalue()
