"""Rows of Arrow tables as records: finding the columns of text, or of image and label, and converting rows.

Parquet files and Hugging Face's data sets are both read in batches of such rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from kftrain.data.file_content import load_library, with_text
from kftrain.data.images import decode_image, image_extension
from kftrain.data.schema import Lazy, LazyFields, Record
from kftrain.errors import DataError

BATCH_BYTES = 4 << 20
"""Bytes that a batch of rows is to take, judged by the mean of all rows."""

MAX_BATCH_ROWS = 1024


@dataclass(frozen=True)
class Columns:
    """Columns of a table that make a record: a text, or an image and its label."""

    text: str = ""
    image: str = ""
    label: str = ""
    class_names: tuple[str, ...] = ()
    """Names of the labels, where the table knows them."""

    def make_record(self, key: str, row: dict[str, Any], split: str, where: str) -> Record:
        """Return all columns of a row, with `text` as UTF-8 bytes, or `image` and `label`. Raises DataError.

        An image is decoded when its pixels are asked for.
        """
        if self.text:
            return Record(key, with_text(row, self.text, where), split)
        names = {"class_names": self.class_names} if self.class_names else {}
        content = _read_image_bytes(row[self.image], where)
        values = {name: value for name, value in row.items() if name != "image"}
        fields = LazyFields(
            {**values, "label": row[self.label], **names}, {"image": Lazy(content, partial(decode_image, where=where))}
        )
        extension = image_extension(content)
        return Record(key, fields, split, {extension: content} if extension else {})


def find_columns(schema: Any, text_field: str, where: str) -> Columns:
    """Find the columns of a `pyarrow.Schema`: `text_field` or, where there is no such column, an image and a label.

    A column counts as the image or the label by its name or, if it is the only one, by what Hugging Face's `datasets`
    noted in the schema. Raises DataError where there is neither.
    """
    if len(set(schema.names)) < len(schema.names):
        raise DataError("two columns have the same name", where=where, value=schema.names, fix="rename one")
    if text_field in schema.names:
        return _require_text_column(schema, text_field, where)
    features = _read_features(schema)
    image, label = (
        _find_column(schema, features, "image", "Image"),
        _find_column(schema, features, "label", "ClassLabel"),
    )
    if not image or not label or not _holds_images(schema.field(image).type):
        raise DataError(
            f"neither a column '{text_field}' of text nor columns 'image' and 'label'",
            where=where,
            value=", ".join(f"{field.name}: {field.type}" for field in schema),
            fix="set data.text_field",
        )
    return Columns(image=image, label=label, class_names=tuple(features.get(label, {}).get("names") or ()))


def count_batch_rows(num_bytes: int, num_rows: int) -> int:
    """Compute the rows of a batch of about `BATCH_BYTES`, for a table of that size."""
    return max(1, min(MAX_BATCH_ROWS, BATCH_BYTES * num_rows // max(1, num_bytes)))


def iterate_rows(batch: Any, first: int, where: Callable[[int], str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number and values of each row of a `pyarrow.RecordBatch` or table whose first row has the number `first`.

    Raises DataError at `where(number)` for a row with a value that Python cannot hold.
    """
    try:
        rows = batch.to_pylist()
    except (ValueError, OverflowError, load_library("pyarrow").ArrowException) as error:
        if batch.num_rows == 1:
            raise DataError(
                f"a value cannot be read: {error}", where=where(first), fix="correct or delete the row"
            ) from error
        half = batch.num_rows // 2
        yield from iterate_rows(batch.slice(0, half), first, where)
        yield from iterate_rows(batch.slice(half), first + half, where)
    else:
        yield from enumerate(rows, start=first)


def _require_text_column(schema: Any, name: str, where: str) -> Columns:
    kinds, kind = load_library("pyarrow").types, schema.field(name).type
    if kinds.is_dictionary(kind):
        kind = kind.value_type
    if not (kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_string_view(kind)):
        raise DataError(f"the column '{name}' is no text", where=where, value=str(kind), fix="set data.text_field")
    return Columns(text=name)


def _find_column(schema: Any, features: dict[str, dict[str, Any]], name: str, kind: str) -> str:
    """Return the column of that name, else the only one of a kind, else ''."""
    if name in schema.names:
        return name
    of_kind = [column for column in schema.names if features.get(column, {}).get("_type") == kind]
    return of_kind[0] if len(of_kind) == 1 else ""


def _read_features(schema: Any) -> dict[str, dict[str, Any]]:
    """Read what `datasets` noted about the columns; empty where a table comes from elsewhere."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, ValueError, TypeError):
        return {}
    return {name: feature for name, feature in features.items() if isinstance(feature, dict)}


def _holds_images(kind: Any) -> bool:
    kinds = load_library("pyarrow").types
    if kinds.is_struct(kind):
        return kind.get_field_index("bytes") >= 0 and _holds_images(kind.field("bytes").type)
    return bool(kinds.is_binary(kind) or kinds.is_large_binary(kind) or kinds.is_binary_view(kind))


def _read_image_bytes(value: Any, where: str) -> bytes:
    content = value["bytes"] if isinstance(value, dict) else value
    if not isinstance(content, bytes):
        raise DataError(
            "the row holds no image", where=where, value=value, fix="embed the image's bytes, or delete the row"
        )
    return content
