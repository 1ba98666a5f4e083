"""From the files of adopted samples to what a task reads, each time that they are read.

What the task takes as a file stays one, for its `decode`. For numbers the file is read by its extension, as sharding
would read it, and the task encodes the value as it does when shards are written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from kftrain.data.file_content import parse_json
from kftrain.data.sample_members import decode_members
from kftrain.data.schema import Arrays, Field, Record, SampleSchema
from kftrain.data.shards.manifest import Manifest
from kftrain.errors import DataError

if TYPE_CHECKING:
    from kftrain.tasks.base import EncodingTask

_JSON = "json"
"""The field whose entries stand for fields that have no file of their own."""


def find_conversion(manifest: Manifest, task: EncodingTask) -> Conversion | None:
    """Build what a task needs to read a dataset; None where its shards were written for it.

    Raises DataError where adopted samples have no file for a field of the task.
    """
    return Conversion(manifest.sample_schema, task) if manifest.is_adopted else None


class Conversion:
    """The fields of a task from those that are stored."""

    def __init__(self, stored: SampleSchema, task: EncodingTask) -> None:
        self.schema = task.sample_schema()
        self._task = task
        self._sources = {field.name: _find_source(field, stored) for field in self.schema.fields}

    def __call__(self, stored: Arrays, place_of: Callable[[int], str]) -> Arrays:
        """Convert rows as they are stored to rows as the task reads them.

        Args:
            stored: The same rows, as files.
            place_of: Names a row in errors.
        """
        return {
            field.name: stored[self._sources[field.name].name]
            if field.is_encoded
            else self._numbers(field, stored[self._sources[field.name].name], place_of)
            for field in self.schema.fields
        }

    def _numbers(self, field: Field, files: np.ndarray, place_of: Callable[[int], str]) -> np.ndarray:
        source, values = self._sources[field.name], np.empty((len(files), *field.shape), field.dtype)
        for row, content in enumerate(files):
            try:
                values[row] = self._task.encode_field(
                    Record("", _read_fields(source, bytes(content), field.name)), field
                )
            except DataError as error:
                raise DataError(error.what, where=place_of(row), value=error.value, fix=error.fix) from error
        return values


def _find_source(field: Field, stored: SampleSchema) -> Field:
    """Find the stored field that a field is made from."""
    by_name = {field.name: field for field in stored.fields}
    source = by_name.get(field.name) or (None if field.is_encoded else by_name.get(_JSON))
    if source is None:
        raise DataError(
            f"the adopted samples have no file for the field '{field.name}' that the task reads",
            where="data.source",
            value=sorted(by_name),
            fix="say in data.fields which extensions it has, or set data.shards=write",
        )
    if field.is_encoded and (unknown := sorted(set(source.extensions) - set(field.extensions))):
        raise DataError(f"the task reads no .{unknown[0]} as '{field.name}'", where="data.source", value=unknown)
    return source


def _read_fields(source: Field, content: bytes, name: str) -> dict[str, Any]:
    """Build the fields that a record has that was read from this file."""
    extension = source.extensions[0]
    if extension != _JSON:
        (value,) = dict(decode_members({extension: content}, "text", "")).values()
        return {name: value}
    described = parse_json(content, "")
    if not isinstance(described, dict):
        raise DataError("not a JSON object", value=type(described).__name__)
    return described
