"""Conversion of what a record or a data frame holds to the fields of a sample: checked, never silently changed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from kftrain.data.schema import Arrays, Field, Record
from kftrain.errors import DataError

if TYPE_CHECKING:
    import pandas

    from kftrain.tasks.base import Task


def as_field(record: Record, field: Field) -> np.ndarray:
    """Convert what the record has under the field's name to the field's shape and format.

    Raises DataError if it is missing, no number, of another shape or not finite, or if the format would change it
    beyond rounding.
    """
    if field.is_encoded:
        return as_object(_get_file(record, field))
    if record.fields.get(field.name) is None:
        raise _missing_error(record, field)
    array = as_array(record.fields[field.name])
    if array is None or array.dtype.kind not in "biuf":
        raise DataError(f"field '{field.name}' is not made of numbers", where=record.key, value=f"{array!r:.80}")
    if array.shape != field.shape:
        raise DataError(
            f"field '{field.name}' is not of shape {list(field.shape)}", where=record.key, value=list(array.shape)
        )
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is found below, and refused by name
        converted = array.astype(field.dtype)
    exact = converted.dtype.kind != "f"
    if not (np.array_equal(converted, array) if exact else np.isfinite(converted).all()):
        wanted = field.dtype if exact else f"finite as {field.dtype}"
        raise DataError(f"field '{field.name}' is not {wanted}", where=record.key, value=f"{array!r:.80}")
    return converted


def extensions_of(record: Record, fields: Iterable[Field]) -> dict[str, str]:
    """Map the encoded fields for which the record has a file to the file's extension."""
    extensions = {field.name: extension_of(record, field) for field in fields if field.is_encoded}
    return {name: extension for name, extension in extensions.items() if extension}


def extension_of(record: Record, field: Field) -> str:
    """Return the first of the field's extensions for which the record has a file; '' if there is none."""
    return next((extension for extension in field.extensions if extension in record.files), "")


def as_object(value: Any) -> np.ndarray:
    """Wrap a value in an array of `object` without dims."""
    array = np.empty((), object)
    array[()] = value
    return array


def _get_file(record: Record, field: Field) -> bytes:
    extension = extension_of(record, field)
    if extension:
        return record.files[extension]
    content = record.fields.get(field.name)
    if content is None:
        raise _missing_error(record, field)
    if not isinstance(content, bytes):
        raise DataError(f"field '{field.name}' is not the bytes of a file", where=record.key, value=f"{content!r:.80}")
    return content


def _missing_error(record: Record, field: Field) -> DataError:
    return DataError(f"the record has no field '{field.name}'", where=record.key, value=sorted(record.fields))


def as_array(value: Any) -> np.ndarray | None:
    """Convert a value, or arrays of arrays as data frames hold them, to one array; None if it is not rectangular."""
    try:
        return np.asarray(_as_lists(value))
    except ValueError:
        return None


def rows_of(task: Task, frame: pandas.DataFrame) -> Arrays:
    """Encode the rows of a data frame as records are encoded, with zeros for the targets; one row if it is empty.

    An encoded field without a file has None. Raises DataError if columns are missing, or a row cannot be encoded.
    """
    fields = task.schema().fields
    rows = {field.name: _make_blank(field, max(1, len(frame))) for field in fields}
    given = [field for field in fields if field.name not in task.targets]
    columns = _split_columns(given, frame.drop(columns=[name for name in task.targets if name in frame]))
    for number, index in enumerate(frame.index):
        record = Record(f"row {index}", {name: column[number] for name, column in columns.items()})
        for field in given:
            rows[field.name][number] = task.encode_field(record, field)[()]  # [()] unwraps the object of a file
    return rows


def _make_blank(field: Field, num_rows: int) -> np.ndarray:
    if field.is_encoded:
        return np.full(num_rows, None, object)
    return np.zeros((num_rows, *field.shape), field.dtype)


def _split_columns(fields: list[Field], frame: pandas.DataFrame) -> dict[str, Any]:
    """Return the values of each field, one per row. Raises DataError."""
    missing = [field.name for field in fields if field.name not in frame]
    if not missing:
        return {field.name: frame[field.name].tolist() for field in fields}
    (only, *more) = fields
    if not more and frame.shape[1] == np.prod(only.shape):
        return {only.name: frame.to_numpy().reshape(-1, *only.shape)}
    names = ", ".join(f"'{name}'" for name in missing)
    numbers = "" if more else f", or {np.prod(only.shape)} columns of its numbers"
    raise DataError(
        f"the input needs a column {names}{numbers}",
        where="predict",
        value=[str(name) for name in frame.columns[:5]],
    )


def _as_lists(value: Any) -> Any:
    """Turn arrays of arrays, as data frames hold them, into nested lists; return anything else as it is."""
    if isinstance(value, np.ndarray) and value.dtype == object:
        return [_as_lists(part) for part in value]
    return value
