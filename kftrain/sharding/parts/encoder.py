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
from kftrain.data.assets import ASSETS, digest_assets
from kftrain.data.schema import CLUSTER, SPLITS, Block, Record, SampleSchema
from kftrain.data.settings import DataConfig
from kftrain.data.shards.manifest import Shard, check_schema
from kftrain.data.shards.verify import refuse_duplicate_keys
from kftrain.data.shards.writer import SplitWriter
from kftrain.errors import ConfigError, DataError
from kftrain.sharding.clusters import Clusters, name_cluster
from kftrain.sharding.parts.document import PartDocument, SplitStatistics, part_digest
from kftrain.sharding.parts.records import RecordLog
from kftrain.sharding.sources import resolve_source

if TYPE_CHECKING:
    from kftrain.tasks.base import EncodingTask

WAITING_BYTES = 32 << 20
"""Bytes of records waiting for their turn that stay in memory."""

MAX_CLASSES = 1000
"""Most values of a field with classes."""


@dataclass(frozen=True)
class Encoding:
    """Settings, schemas and task that decide how records become shards."""

    task: EncodingTask
    schemas: dict[str, SampleSchema]
    """Schema of each split."""
    settings: dict[str, Any]
    """Settings of the task, as JSON."""
    content_names: tuple[str, ...]
    """Fields of a record by which equal ones are known."""
    is_users: bool
    """True if the task is a user's own: what it raises is not our bug."""
    shard_size_bytes: int
    validation_fraction: float
    hash_in_line: bool = False
    """True if other processes need the processor that a thread of the writer would use."""

    @classmethod
    def of(cls, data: DataConfig, kind: str, task: EncodingTask, hash_in_line: bool = False) -> Encoding:
        """Combine what the configuration says of the data with the task.

        Raises DataError for a schema that no shard can hold.

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
        settings = {**settings, **({ASSETS: digest_assets(assets)} if assets else {})}
        size, fraction = data.shard_size_bytes, data.validation_fraction
        return cls(task, schemas, settings, content_names, is_users, size, fraction, hash_in_line)

    def dump_schemas(self) -> list[dict[str, Any]]:
        """Return the schemas of the splits, as JSON."""
        return [self.schemas[split].to_dict() for split in SPLITS]

    def run_task_code(self) -> contextlib.AbstractContextManager[None]:
        """Run the task's own code within the block. Raises UserCodeError."""
        return plugins.user_code("task") if self.is_users else contextlib.nullcontext()


def encode_part(encoding: Encoding, records: Iterator[Record], folder: Path, progress: Progress) -> PartDocument:
    """Write the shards of a part's records into an empty folder; return what its `part.json` is to say.

    Raises DataError for a record or a block that is wrong, and for two blocks of one key in a split; UserCodeError.
    """
    with (
        RecordLog(folder, encoding.content_names, encoding.shard_size_bytes) as log,
        tempfile.SpooledTemporaryFile(WAITING_BYTES, dir=str(folder.parent)) as waiting,
    ):
        training = _iterate_training_records(encoding, records, log, waiting)
        written = [_write_split(encoding, folder, "train", training, progress)]
        for _ in training:  # what the task has not asked for may still hold validation records
            pass
        waiting.seek(0)
        written.append(_write_split(encoding, folder, "validation", _read_waiting_records(waiting), progress))
        records_sha256 = log.finish()
    splits = {split: shards for split, (shards, _) in zip(SPLITS, written, strict=True)}
    return PartDocument(
        part_digest=part_digest(encoding.dump_schemas(), encoding.settings, splits, records_sha256),
        splits=splits,
        records_sha256=records_sha256,
        statistics={
            split: SplitStatistics(
                num_records=sum(log.size_counts[split]),
                content_bytes=log.num_bytes[split],
                size_counts={str(bits): count for bits, count in enumerate(log.size_counts[split]) if count},
                classes=classes,
            )
            for split, (_, classes) in zip(SPLITS, written, strict=True)
        },
        findings={"empty": log.empty, "oversized": log.oversized},
    )


def _iterate_training_records(
    encoding: Encoding, records: Iterator[Record], log: RecordLog, waiting: IO[bytes]
) -> Iterator[Record]:
    """Yield the records of the training split; put the others aside."""
    task, fraction = encoding.task, encoding.validation_fraction
    for record in records:
        split = resolve_source.choose_split(record, fraction, name_cluster(task, record))
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


def _read_waiting_records(waiting: IO[bytes]) -> Iterator[Record]:
    """Yield the records that this process has put aside."""
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
        for block in _encode_blocks(encoding, split, records):
            writer.write(block)
            classes.count(block)
            if len(writer.shards) > announced:
                announced = len(writer.shards)
                progress(describe_shard(writer.shards[-1]))
        shards = writer.finish()
    for shard in shards[announced:]:
        progress(describe_shard(shard))
    if writer.may_have_duplicate_keys():
        paths = [str(folder / shard.name) for shard in shards]
        refuse_duplicate_keys(paths, encoding.schemas[split], fix="give each record its own key")
    return shards, classes.to_dict()


def _encode_blocks(encoding: Encoding, split: str, records: Iterator[Record]) -> Iterator[Block]:
    task, latest = encoding.task, Record("", {})

    def remembered() -> Iterator[Record]:
        nonlocal latest
        for latest in records:  # noqa: UP028 - a generator's variable outlives it
            yield latest

    with encoding.run_task_code():
        has_cluster = any(field.name == CLUSTER for field in encoding.schemas[split].fields)
        clusters = Clusters(task, split) if has_cluster else None
        blocks = iter(task.encode(clusters.note_records(remembered()) if clusters else remembered(), split))
    while True:
        try:
            with encoding.run_task_code():
                block = next(blocks, None)
        except DataError as error:  # a key of content says nothing to people
            error.where = error.where.replace(latest.key, latest.place or latest.key)
            raise
        if block is None:
            return
        yield clusters.add_to_block(block) if clusters else block


def describe_shard(shard: Shard) -> str:
    """Describe a shard that is written, on one line."""
    return f"{shard.name}: {shard.num_samples:,} samples, {shard.bytes:,} bytes"


class _ClassCounts:
    """Counts of each value of the fields that are learned and are one whole number."""

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

    def to_dict(self) -> dict[str, dict[str, int]]:
        return {
            name: {str(int(value)): counts[value] for value in sorted(counts)} for name, counts in self._counts.items()
        }
