"""How `mlflow.pyfunc.load_model("models:/<name>@champion")` becomes a model: through the reference, without a pickle.

MLflow calls `_load_pyfunc` with the path of `reference.json`. The export is fetched and every byte of it checked
against the digest before a tensor is loaded. What it may be made of, and where it may lie, says the environment of who
loads it (`kftrain.trust`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kftrain.errors import CheckpointError, DataError
from kftrain.registry.reference import Reference
from kftrain.run import documents

if TYPE_CHECKING:
    import pandas


class ExportedModel:
    """What MLflow wraps: a model with the task that knows how to ask it."""

    def __init__(self, model: Any, task: Any) -> None:
        self._model = model
        self._task = task

    def predict(self, model_input: Any) -> pandas.DataFrame:
        """One row per input row, equal to what evaluation computes.

        `model_input`: a data frame, or what `as_frame` makes one of. Raises DataError.
        """
        frame = as_frame(model_input, self._task.input_column)
        answer: pandas.DataFrame = self._task.predict(self._model, frame)
        return answer


def as_frame(inputs: Any, column: str | None) -> pandas.DataFrame:
    """A data frame of what people pass to `predict`, one row per sample.

    That is a frame, columns by name, a list of such rows, a table of numbers `[rows, columns]`, one value, or a list,
    array or series of values. `column`: what a column of values is called; None: the task does not look at names.

    Raises DataError for anything else.
    """
    import pandas

    if isinstance(inputs, pandas.DataFrame):
        return inputs if column is None else _as_given(inputs, column)
    if isinstance(inputs, pandas.Series):
        return inputs.to_frame(inputs.name if column is None else column)
    rows = [inputs] if isinstance(inputs, str | bytes) else inputs
    if not isinstance(rows, Mapping | list | tuple | np.ndarray) or (isinstance(rows, np.ndarray) and not rows.shape):
        raise _not_understood(inputs)
    try:
        if column is None or isinstance(rows, Mapping) or _is_table(rows):
            return pandas.DataFrame(rows)
        return pandas.DataFrame({column: pandas.Series(list(rows), dtype=object)})
    except (ValueError, TypeError) as error:
        raise _not_understood(inputs) from error


def _as_given(frame: pandas.DataFrame, column: str) -> pandas.DataFrame:
    """What was meant by a frame that MLflow has made, of a model with a signature.

    A list becomes a column 0, and columns by name become one row of lists: of texts, which are never lists themselves.
    """
    if list(frame.columns) == [0]:
        return frame.rename(columns={0: column})
    if column in frame and len(frame) and all(_are_texts(cell) for cell in frame[column]):
        return frame[[column]].explode(column, ignore_index=True)
    return frame


def _are_texts(cell: Any) -> bool:
    return isinstance(cell, list | np.ndarray) and len(cell) > 0 and all(isinstance(each, str) for each in cell)


def _is_table(rows: Any) -> bool:
    """Whether it has columns of its own: rows by name, or of numbers."""
    if len(rows) and all(isinstance(row, Mapping) for row in rows):
        return True
    if not isinstance(rows, np.ndarray) and not (len(rows) and all(isinstance(row, list | tuple) for row in rows)):
        return False
    try:
        table = np.asarray(rows)
    except ValueError:  # rows of different lengths
        return False
    return table.ndim == 2 and table.dtype.kind in "biuf"


def _not_understood(inputs: Any) -> DataError:
    what, value = "the input cannot be understood", f"{type(inputs).__name__}: {inputs!r:.80}"
    fix = "pass a pandas DataFrame, columns by name, a list of samples, or an array [rows, ...]"
    return DataError(what, where="predict", value=value, fix=fix)


def _load_pyfunc(path: str) -> ExportedModel:
    from kftrain.checkpoint.export import load_export

    reference = documents.read(Reference, path, CheckpointError)
    loaded = load_export(reference.export_uri, reference.export_digest)
    return ExportedModel(loaded.model, loaded.task)
