"""Samples in memory, one field encoded, and how they are decoded; also as a data worker's process."""

import ctypes
import json
import os
import signal
import sys
import time
from multiprocessing.connection import Connection

import numpy as np

from kftrain.core import traffic
from kftrain.data.decoding import Decoding
from kftrain.errors import DataError

NUM_SAMPLES = 37
SEED = 5


class InMemory:
    """Sample n holds the number n, once as an array and once as a file: JSON."""

    num_samples = NUM_SAMPLES

    def read(self, samples):
        files = np.empty(len(samples), object)
        files[:] = [json.dumps({"number": int(number)}).encode() for number in samples]
        return {"file": files, "number": np.asarray(samples, np.int64)}

    def place_of(self, sample):
        return f"train-000.tar, key-{sample}"


class Shuffled:
    """A training order that this module can compute by other means than the product."""

    num_samples = NUM_SAMPLES

    def locate(self, positions):
        epochs, offsets = np.divmod(positions, NUM_SAMPLES)
        return (offsets * (5 + epochs % 3) + epochs) % NUM_SAMPLES


def augment(sample, generator):
    """A row that tells which sample it is, and which random numbers it was given."""
    number = json.loads(bytes(sample["file"]))["number"]
    assert number == sample["number"]
    return {"row": np.r_[np.float64(number), generator.random(2), generator.normal(size=3)], "label": sample["number"]}


def bad_at_7_and_20(sample, generator):
    if sample["number"] in (7, 20):
        raise DataError("not an image", where="task.decode")
    return augment(sample, generator)


def dies_at_11(sample, generator):
    if sample["number"] == 11:
        os.kill(os.getpid(), signal.SIGKILL)
    return augment(sample, generator)


def asks_again(sample, generator):
    traffic.count(retries=1)
    return augment(sample, generator)


def holds_the_gil(sample, generator):
    ctypes.PyDLL(None).usleep(20_000)
    return augment(sample, generator)


def slow(sample, generator):
    time.sleep(0.2)
    return augment(sample, generator)


def decoding(name, max_bad_samples=0):
    return Decoding(globals()[name], SEED, max_bad_samples)


if __name__ == "__main__":
    from kftrain.data.worker_processes import decode_rows
    from kftrain.process.child import receive
    from kftrain.process.parent_death import die_with_parent

    descriptor, memory, parent = map(int, sys.argv[1:])
    die_with_parent(parent)
    connection = Connection(descriptor)
    decode_rows(connection, memory, InMemory(), decoding(**receive(connection)))
