"""What hashing costs a loop of one's own: the first sample and an epoch of `kftrain.open_dataset`, by `verify`.

    python benchmarks/data/own_loop.py [--images 1000]

The peer is the same loop without hashing. The first row warms the page cache and tells nothing.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

import kftrain
from kftrain.config import parse
from kftrain.sharding.shard_dataset import shard_dataset
from kftrain.tasks import build_task

CONFIG = """
data: {source: FOLDER/in, shard_size_bytes: 64000000}
task: {kind: image_classification, image_size: 512, num_channels: 3, num_classes: 2, storage: files}
run: {storage_root: FOLDER/root}
"""


def sharded(folder: Path, num_images: int) -> str:
    """The manifest of bitmaps of 0.8 MB each."""
    pixels = np.random.default_rng(0).integers(0, 256, (512, 512, 3), dtype=np.uint8)
    for number in range(num_images):
        path = folder / "in" / "ab"[number % 2] / f"{number:05d}.bmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels[0, 0] = number % 256, number // 256, 0
        Image.fromarray(pixels).save(path)
    config = parse(CONFIG.replace("FOLDER", str(folder)))
    return shard_dataset(config, build_task(config.task), lambda line: None).manifest_uri


def main() -> None:
    """Prints a row for each opening."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=1000)
    num_images = parser.parse_args().images
    with tempfile.TemporaryDirectory() as name:
        manifest_uri = sharded(Path(name), num_images)
        tempfile.tempdir = name  # nothing is remembered of other runs
        for verify in (False, False, True, True):
            dataset = kftrain.open_dataset(manifest_uri, verify=verify)
            start = time.perf_counter()
            dataset[0]
            first_seconds = time.perf_counter() - start
            num_bytes = sum(len(sample["image"]) for sample in dataset.in_training_order(batch_size=32))
            seconds = time.perf_counter() - start
            row = f"first sample {1e3 * first_seconds:5.1f} ms   epoch {seconds:5.2f} s"
            print(f"{'hashed' if verify else 'not hashed':12}{row}   {seconds / (num_bytes / 1e9):5.2f} s/GB")


if __name__ == "__main__":
    main()
