"""Records what steps of a real loader cost, for `simulated_loader`: `python -m helpers.record_traces FOLDER`.

The loader reads JPEG images, one step at a time, from an S3 server, whose answers to ranged reads are delayed; it
decodes them by Pillow in one thread, and computes with them. A trace has the milliseconds of each step, the share of
decoding that holds the GIL, and the processors of the machine that is simulated.
"""

import asyncio
import contextlib
import io
import json
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import s3fs
from helpers.fakes.object_store import BUCKET, ObjectStore
from helpers.splits import open_split
from PIL import Image

from kftrain.core import storage
from kftrain.data import images
from kftrain.data.decoding import Decoding
from kftrain.data.loader import TrainLoader
from kftrain.data.order import BatchPlan, TrainingOrder
from kftrain.data.schema import BYTES, Block, Field, SampleSchema
from kftrain.data.shards.manifest import Manifest, Split, content_digest
from kftrain.data.shards.writer import SplitWriter
from kftrain.data.tuning import Tuning

NUM_STEPS = 800
NUM_CPUS = 16
SCHEMA = SampleSchema((Field("image", BYTES, (), ("jpg",)),))
CHANCE = random.Random(0)

TRACES = {
    "constant": (lambda read: 0.003, 16, 20),
    "bursty": (lambda read: 0.25 if read % 100 >= 92 else 0.003, 8, 20),
    "slow_start": (lambda read: 0.12 if read < 100 else 0.003, 8, 20),
    "slow_store": (lambda read: CHANCE.lognormvariate(-2.0, 0.4), 4, 20),
    "slow_decode": (lambda read: 0.003, 64, 12),
}
"""Name -> seconds by which the nth read is delayed, samples of a step, and milliseconds of computing."""


def decode(sample, generator):
    return {"image": images.decode_part(sample["image"], 224, 3, images.middle_square, "trace")}


def write_dataset(uri):
    with tempfile.TemporaryDirectory() as name:
        folder, splits = Path(name), {}
        for split, count in (("train", 2000), ("validation", 1)):
            with SplitWriter(folder, split, SCHEMA, 8_000_000) as writer:
                for number in range(count):
                    writer.write(Block(f"image-{number}", {"image": np.array([jpeg(number % 50)], object)}))
                splits[split] = writer.finish()
        manifest = Manifest(
            dataset_digest=content_digest(SCHEMA, {}, splits),
            sample_schema=SCHEMA,
            task_kind="trace",
            task_settings={},
            splits={split: Split(shards=shards) for split, shards in splits.items()},
            source="trace",
            source_listing_digest="",
            baselines={},
        )
        for path in folder.iterdir():
            storage.publish(f"{uri}/{path.name}", path.read_bytes())
        storage.publish_json(f"{uri}/manifest.json", manifest.to_dict())


def jpeg(seed):
    rng = np.random.default_rng(seed)
    clouds = Image.fromarray(rng.integers(0, 256, (9, 12, 3)).astype(np.uint8)).resize(
        (300, 260), Image.Resampling.BICUBIC
    )
    stream = io.BytesIO()
    clouds.save(stream, "JPEG", quality=84)
    return stream.getvalue()


@contextlib.contextmanager
def delayed(seconds_of):
    """Ranged reads of the driver, the nth of which waits so many seconds first."""
    real, reads = s3fs.S3FileSystem._cat_file, iter(range(1 << 30))

    async def late(self, path, *arguments, **options):
        if path.endswith(".tar"):
            await asyncio.sleep(seconds_of(next(reads)))
        return await real(self, path, *arguments, **options)

    s3fs.S3FileSystem._cat_file = late
    try:
        yield
    finally:
        s3fs.S3FileSystem._cat_file = real


def record(uri, batch_size, compute_ms):
    """Milliseconds to read, decode and compute of each step, and the bytes of one."""
    samples = open_split(f"{uri}/manifest.json", "train")
    # Shuffled in small ranges: a step of a shard's neighbours is one request.
    order = TrainingOrder(samples.num_samples, 0, batch_size, 1)
    plan = BatchPlan(batch_size, 1)
    loader = TrainLoader(samples, order, plan, 0, Tuning(1), decoding=Decoding(decode, 0))
    made, computed, matrix = [], [], np.random.default_rng(0).random((256, 256))
    loader.counters.add = lambda cost: made.append((cost.read_seconds, cost.decode_seconds))
    step_bytes = 0
    for batch in loader.steps(0, NUM_STEPS):
        step_bytes = batch.num_bytes
        start = time.perf_counter()
        while time.perf_counter() - start < compute_ms / 1000:
            matrix @ matrix
        computed.append(time.perf_counter() - start)
    costs = [[round(1000 * seconds, 1) for seconds in (*own, last)] for own, last in zip(made, computed, strict=True)]
    return costs, step_bytes


def measure_gil_share():
    """The share of decoding in which a thread of plain Python cannot run."""
    content, stop, counted = jpeg(0), threading.Event(), [0]

    def count():
        while not stop.is_set():
            counted[0] += 1

    def measure(work):
        before, start = counted[0], time.perf_counter()
        while time.perf_counter() - start < 5.0:
            work()
        return counted[0] - before

    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=count)
    thread.start()
    alone, beside = measure(lambda: time.sleep(0.1)), measure(lambda: decode({"image": content}, None))
    stop.set()
    thread.join()
    sys.setswitchinterval(0.005)
    return round(1 - min(1.0, beside / alone), 2)


def main(folder):
    share = measure_gil_share()
    store = ObjectStore()
    os.environ.update(store.environment)
    store.start()
    try:
        uri = f"s3://{BUCKET}/trace"
        write_dataset(uri)
        for name, (seconds_of, batch_size, compute_ms) in TRACES.items():
            with delayed(seconds_of):
                steps, step_bytes = record(uri, batch_size, compute_ms)
            about = {"name": name, "num_cpus": NUM_CPUS, "gil_share": share, "step_bytes": step_bytes}
            (folder / f"{name}.json").write_text(json.dumps({**about, "steps": steps}, separators=(",", ":")) + "\n")
            print(name, len(steps), np.array(steps).mean(axis=0).round(1).tolist(), flush=True)
    finally:
        store.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
