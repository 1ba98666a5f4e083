"""What tests of sources ask: the records, the shards made of them, and the memory that reading takes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from helpers.splits import open_split
from helpers.toy_data import toy_config

from kftrain.data.schema import Record, Source
from kftrain.data.settings import DataConfig
from kftrain.sharding.shard_dataset import shard_dataset
from kftrain.sharding.sources import resolve_source
from kftrain.tasks.base import Task


def resolve(source: object, **settings: Any) -> Source:
    return resolve_source.resolve(DataConfig(source=str(source), **settings))


def records(source: object, **settings: Any) -> list[Record]:
    """All records, with every field made, the pixels of images, too."""
    return [replace(record, fields=dict(record.fields)) for record in resolve(source, **settings).records()]


def texts(found: list[Record]) -> dict[str, bytes]:
    return {record.key: record.fields["text"] for record in found}


class Sharded:
    """The shards of a source under a task, read back."""

    def __init__(self, source: object, root: Path, task: Task, **data: object) -> None:
        self.result = shard_dataset(toy_config(str(source), root, **data), task, lambda line: None)
        self.reused = shard_dataset(toy_config(str(source), root, **data), task, lambda line: None).reused

    def blocks(self, split: str) -> dict[str, dict[str, np.ndarray]]:
        """Key of each block -> its arrays."""
        dataset = open_split(self.result.manifest_uri, split)
        arrays, groups = dataset.read_range(0, dataset.num_samples)
        return {
            key: {name: array[groups == number] for name, array in arrays.items()}
            for number, key in enumerate(dataset.group_keys())
        }

    def images(self, split: str) -> dict[str, tuple[np.ndarray, int]]:
        """Key -> pixels and label."""
        return {key: (block["image"][0], int(block["label"][0])) for key, block in self.blocks(split).items()}

    def documents(self) -> dict[str, bytes]:
        """Of the validation split of language modelling: key -> text."""
        return {key: bytes(block["text"][0]) for key, block in self.blocks("validation").items()}


_READ = """
import importlib, sys
for name in sys.argv[3:]:
    importlib.import_module(name)
from kftrain.data.settings import DataConfig
from kftrain.sharding.sources import resolve_source

def memory():
    status = open("/proc/self/status").read()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024

source = resolve_source.resolve(DataConfig(source=sys.argv[1]))
before, peak, kept, count = memory(), 0, [], 0
for count, record in enumerate(source.records(), start=1):
    dict(record.fields)
    if sys.argv[2] == "keep":
        kept.append(record)
    if count % 50 == 1:
        peak = max(peak, memory())
print("[%d, %d]" % (count, max(peak, memory()) - before))
"""


def reading_memory(source: object, *libraries: str, keep: bool = False) -> tuple[int, int]:
    """Records of a source, and the bytes by which a process that reads it grows at most.

    Mapped files do not count, nor do the `libraries`, which it imports first. With `keep` it holds all records.
    """
    done = subprocess.run(
        [sys.executable, "-c", _READ, str(source), "keep" if keep else "drop", *libraries],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    count, growth_bytes = json.loads(done.stdout)
    return count, growth_bytes
