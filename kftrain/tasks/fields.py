"""From what a record or a data frame holds to the fields of a sample: checked, never silently changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kftrain.data.schema import Arrays, Field, Record
from kftrain.errors import DataError

if TYPE_CHECKING:
    import pandas

    from kftrain.tasks.base import Task


def as_field(record: Record, field: Field) -> np.ndarray:
    """What the record has under the field's name, in the field's shape and format.

    Raises DataError where it is missing, no number, of another shape or not finite, and where the format would change
    it beyond rounding.
    """
    if record.fields.get(field.name) is None:
        raise DataError(f"the record has no field '{field.name}'", where=record.key, value=sorted(record.fields))
    found = as_array(record.fields[field.name])
    if found is None or found.dtype.kind not in "biuf":
        raise DataError(f"field '{field.name}' is not made of numbers", where=record.key, value=f"{found!r:.80}")
    if found.shape != field.shape:
        raise DataError(
            f"field '{field.name}' is not of shape {list(field.shape)}", where=record.key, value=list(found.shape)
        )
    with np.errstate(over="ignore", invalid="ignore"):
        converted = found.astype(field.dtype)
    exact = converted.dtype.kind != "f"
    if not (np.array_equal(converted, found) if exact else np.isfinite(converted).all()):
        wanted = field.dtype if exact else f"finite as {field.dtype}"
        raise DataError(f"field '{field.name}' is not {wanted}", where=record.key, value=f"{found!r:.80}")
    return converted


def as_array(value: Any) -> np.ndarray | None:
    """A value as an array, also where a data frame holds arrays of arrays; None where it is not rectangular."""
    try:
        return np.asarray(_as_lists(value))
    except ValueError:
        return None


def rows_of(task: Task, frame: pandas.DataFrame) -> Arrays:
    """The samples of a data frame, encoded as records are; zeros in the place of targets, and one row if it is empty.

    Raises DataError where columns are missing, or a row cannot be encoded.
    """
    fields = task.schema().fields
    rows = {field.name: np.zeros((max(1, len(frame)), *field.shape), field.dtype) for field in fields}
    given = [field for field in fields if field.name not in task.targets]
    columns = _columns(given, frame.drop(columns=[name for name in task.targets if name in frame]))
    for number, index in enumerate(frame.index):
        record = Record(f"row {index}", {name: column[number] for name, column in columns.items()})
        for field in given:
            rows[field.name][number] = task.encode_field(record, field)
    return rows


def _columns(fields: list[Field], frame: pandas.DataFrame) -> dict[str, Any]:
    """Field name -> its value in each row. Raises DataError."""
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
    """Arrays of arrays, as data frames hold them, as nested lists; anything else as it is."""
    if isinstance(value, np.ndarray) and value.dtype == object:
        return [_as_lists(part) for part in value]
    return value
