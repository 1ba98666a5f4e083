"""Encodes one part of a source, reading it once.

A task turns the records of one split into blocks, and both splits come out of one reading. So the records of the
training split are encoded as they are read; those of the validation split wait in memory or, beyond `WAITING_BYTES`, in
a file without a name, and are encoded after them. What a split becomes depends on its own records and their order only.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from kftrain.core import plugins, storage
from kftrain.core.progress import Progress
from kftrain.data.assets import ASSETS, digests_of
from kftrain.data.schema import CLUSTER, SPLITS, Block, Record, SampleSchema
from kftrain.data.settings import DataConfig
from kftrain.data.shards.manifest import Shard, check_schema
from kftrain.data.shards.verify import refuse_duplicate_keys
from kftrain.data.shards.writer import SplitWriter
from kftrain.errors import ConfigError, DataError
from kftrain.sharding.clusters import Clusters, cluster_of
from kftrain.sharding.parts.document import PartDocument, SplitStatistics, part_digest
from kftrain.sharding.parts.records import RecordLog
from kftrain.sharding.sources import resolve_source

if TYPE_CHECKING:
    from kftrain.tasks.base import EncodingTask

WAITING_BYTES = 32 << 20
"""Of the records that wait for their turn: what stays in memory."""

MAX_CLASSES = 1000
"""A field with more values than that has no classes."""


@dataclass(frozen=True)
class Encoding:
    """How records become shards: all but the records."""

    task: EncodingTask
    schemas: dict[str, SampleSchema]
    """Of each split."""
    settings: dict[str, Any]
    """The task's, as JSON."""
    content_names: tuple[str, ...]
    """Fields of a record by which equal ones are known."""
    is_users: bool
    """Whether the task is a user's own: what it raises is not our bug."""
    shard_size_bytes: int
    validation_fraction: float
    hash_in_line: bool = False
    """Whether other processes need the processor that a thread of the writer would use."""

    @classmethod
    def of(cls, data: DataConfig, kind: str, task: EncodingTask, hash_in_line: bool = False) -> Encoding:
        """What the configuration says of the data, and the task. Raises DataError for a schema that no shard can hold.

        `kind`: of the task.
        """
        is_users = plugins.is_plugin(kind)
        with plugins.user_code("task") if is_users else contextlib.nullcontext():
            schemas = {split: task.sample_schema(split, bool(data.group)) for split in SPLITS}
            assets = task.assets()
            settings = json.loads(storage.dump_json(task.settings()))
            content_names = tuple(task.content_fields())
        if task.names_clusters and (named := data.columns.keys() - {"key"}):
            raise ConfigError("the task names clusters", where=f"data.{named.pop()}", fix="remove it")
        for schema in schemas.values():
            check_schema(schema, "task.schema()")
        settings = {**settings, **({ASSETS: digests_of(assets)} if assets else {})}
        size, fraction = data.shard_size_bytes, data.validation_fraction
        return cls(task, schemas, settings, content_names, is_users, size, fraction, hash_in_line)

    def schema_documents(self) -> list[dict[str, Any]]:
        """The schemas of the splits, as JSON."""
        return [self.schemas[split].to_dict() for split in SPLITS]

    def task_code(self) -> contextlib.AbstractContextManager[None]:
        """Within the block runs the task's own code. Raises UserCodeError."""
        return plugins.user_code("task") if self.is_users else contextlib.nullcontext()


def encode_part(encoding: Encoding, records: Iterator[Record], folder: Path, progress: Progress) -> PartDocument:
    """Writes the shards of a part's records into an empty folder; what its `part.json` is to say.

    Raises DataError for a record or a block that is wrong, and for two blocks of one key in a split; UserCodeError.
    """
    with (
        RecordLog(folder, encoding.content_names, encoding.shard_size_bytes) as log,
        tempfile.SpooledTemporaryFile(WAITING_BYTES, dir=str(folder.parent)) as waiting,
    ):
        training = _training_records(encoding, records, log, waiting)
        found = [_write_split(encoding, folder, "train", training, progress)]
        for _ in training:  # what the task has not asked for may still hold validation records
            pass
        waiting.seek(0)
        found.append(_write_split(encoding, folder, "validation", _waiting_records(waiting), progress))
        records_sha256 = log.finish()
    splits = {split: shards for split, (shards, _) in zip(SPLITS, found, strict=True)}
    return PartDocument(
        part_digest=part_digest(encoding.schema_documents(), encoding.settings, splits, records_sha256),
        splits=splits,
        records_sha256=records_sha256,
        statistics={
            split: SplitStatistics(
                num_records=sum(log.size_counts[split]),
                content_bytes=log.num_bytes[split],
                size_counts={str(bits): count for bits, count in enumerate(log.size_counts[split]) if count},
                classes=classes,
            )
            for split, (_, classes) in zip(SPLITS, found, strict=True)
        },
        findings={"empty": log.empty, "oversized": log.oversized},
    )


def _training_records(
    encoding: Encoding, records: Iterator[Record], log: RecordLog, waiting: IO[bytes]
) -> Iterator[Record]:
    """Those of the training split; the others are put aside."""
    task, fraction = encoding.task, encoding.validation_fraction
    for record in records:
        split = resolve_source.split_of(record, fraction, cluster_of(task, record))
        log.note(record, split)
        if split == "train":
            yield record
        else:
            _put_aside(record, waiting)


def _put_aside(record: Record, waiting: IO[bytes]) -> None:
    try:
        pickle.dump(record, waiting, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise DataError(
            f"the record cannot be kept until its split is encoded: {error}",
            where=record.key,
            fix="let its fields be plain data: bytes, text, numbers, arrays",
        ) from error


def _waiting_records(waiting: IO[bytes]) -> Iterator[Record]:
    """The records that this process has put aside."""
    while True:
        try:
            yield pickle.load(waiting)
        except EOFError:
            return


def _write_split(
    encoding: Encoding, folder: Path, split: str, records: Iterator[Record], progress: Progress
) -> tuple[list[Shard], dict[str, dict[str, int]]]:
    classes = _ClassCounts(encoding.schemas[split], encoding.task)
    size = encoding.shard_size_bytes
    with SplitWriter(folder, split, encoding.schemas[split], size, encoding.hash_in_line) as writer:
        announced = 0
        for block in _blocks(encoding, split, records):
            writer.write(block)
            classes.count(block)
            if len(writer.shards) > announced:
                announced = len(writer.shards)
                progress(line_of(writer.shards[-1]))
        shards = writer.finish()
    for shard in shards[announced:]:
        progress(line_of(shard))
    if writer.may_have_duplicate_keys():
        paths = [str(folder / shard.name) for shard in shards]
        refuse_duplicate_keys(paths, encoding.schemas[split], fix="give each record its own key")
    return shards, classes.found()


def _blocks(encoding: Encoding, split: str, records: Iterator[Record]) -> Iterator[Block]:
    task, latest = encoding.task, Record("", {})

    def remembered() -> Iterator[Record]:
        nonlocal latest
        for latest in records:  # noqa: UP028 - a generator's variable outlives it
            yield latest

    with encoding.task_code():
        has_cluster = any(field.name == CLUSTER for field in encoding.schemas[split].fields)
        clusters = Clusters(task, split) if has_cluster else None
        blocks = iter(task.encode(clusters.noted(remembered()) if clusters else remembered(), split))
    while True:
        try:
            with encoding.task_code():
                block = next(blocks, None)
        except DataError as error:  # a key of content says nothing to people
            error.where = error.where.replace(latest.key, latest.place or latest.key)
            raise
        if block is None:
            return
        yield clusters.added_to(block) if clusters else block


def line_of(shard: Shard) -> str:
    """What is said of a shard that is written."""
    return f"{shard.name}: {shard.num_samples:,} samples, {shard.bytes:,} bytes"


class _ClassCounts:
    """How often each value of the fields comes that are learned and are one whole number."""

    def __init__(self, schema: SampleSchema, task: EncodingTask) -> None:
        self._counts: dict[str, Counter[int]] = {
            field.name: Counter()
            for field in schema.fields
            if field.name in task.targets and not field.shape and np.dtype(field.dtype).kind in "iub"
        }

    def count(self, block: Block) -> None:
        for name, counts in list(self._counts.items()):
            counts.update(np.asarray(block.arrays[name]).tolist())
            if len(counts) > MAX_CLASSES:
                del self._counts[name]

    def found(self) -> dict[str, dict[str, int]]:
        return {
            name: {str(int(value)): counts[value] for value in sorted(counts)} for name, counts in self._counts.items()
        }
