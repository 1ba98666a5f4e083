"""Loads a model for `mlflow.pyfunc.load_model("models:/<name>@champion")` by its reference, without a pickle.

MLflow calls `_load_pyfunc` with the path of `reference.json`. The export is fetched and every byte of it checked
against the digest before a tensor is loaded. The environment of the loading process says which classes it may be made
of and where it may lie (`kftrain.trust`).
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
    """The object that MLflow wraps: a model with its task, which turns a data frame into predictions."""

    def __init__(self, model: Any, task: Any) -> None:
        self._model = model
        self._task = task

    def predict(self, model_input: Any) -> pandas.DataFrame:
        """Return one row per input row, with the values that evaluation would compute.

        `model_input`: a data frame, or anything that `make_frame` turns into one. Raises DataError.
        """
        frame = make_frame(model_input, self._task.input_column)
        answer: pandas.DataFrame = self._task.predict(self._model, frame)
        return answer


def make_frame(inputs: Any, column: str | None) -> pandas.DataFrame:
    """Turn what people pass to `predict` into a data frame with one row per sample.

    They may pass a frame, columns by name, a list of such rows, a table of numbers `[rows, columns]`, one value, or a
    list, array or series of values. `column`: the name that the task expects of a column of values; None: the task
    does not look at names. Raises DataError for anything else.
    """
    import pandas

    if isinstance(inputs, pandas.DataFrame):
        return inputs if column is None else _undo_signature(inputs, column)
    if isinstance(inputs, pandas.Series):
        return inputs.to_frame(inputs.name if column is None else column)
    rows = [inputs] if isinstance(inputs, str | bytes) else inputs
    if not isinstance(rows, Mapping | list | tuple | np.ndarray) or (isinstance(rows, np.ndarray) and not rows.shape):
        raise _refuse_input(inputs)
    try:
        if column is None or isinstance(rows, Mapping) or _is_table(rows):
            return pandas.DataFrame(rows)
        return pandas.DataFrame({column: pandas.Series(list(rows), dtype=object)})
    except (ValueError, TypeError) as error:
        raise _refuse_input(inputs) from error


def _undo_signature(frame: pandas.DataFrame, column: str) -> pandas.DataFrame:
    """Restore the frame that the caller meant, if MLflow made another one of it because the model has a signature.

    MLflow turns a list into a column 0, and columns by name into one row of lists. Only lists of texts are unfolded: a
    text is never a list itself, while a list of numbers may be one sample.
    """
    if list(frame.columns) == [0]:
        return frame.rename(columns={0: column})
    if column in frame and len(frame) and all(_are_texts(cell) for cell in frame[column]):
        return frame[[column]].explode(column, ignore_index=True)
    return frame


def _are_texts(cell: Any) -> bool:
    return isinstance(cell, list | np.ndarray) and len(cell) > 0 and all(isinstance(text, str) for text in cell)


def _is_table(rows: Any) -> bool:
    """Return True if the rows have columns of their own: they are mappings, or equally long rows of numbers."""
    if len(rows) and all(isinstance(row, Mapping) for row in rows):
        return True
    if not isinstance(rows, np.ndarray) and not (len(rows) and all(isinstance(row, list | tuple) for row in rows)):
        return False
    try:
        table = np.asarray(rows)
    except ValueError:  # rows of different lengths
        return False
    return table.ndim == 2 and table.dtype.kind in "biuf"


def _refuse_input(inputs: Any) -> DataError:
    what, value = "the input cannot be understood", f"{type(inputs).__name__}: {inputs!r:.80}"
    fix = "pass a pandas DataFrame, columns by name, a list of samples, or an array [rows, ...]"
    return DataError(what, where="predict", value=value, fix=fix)


def _load_pyfunc(path: str) -> ExportedModel:
    from kftrain.checkpoint.export import load_export

    reference = documents.read(Reference, path, CheckpointError)
    loaded = load_export(reference.export_uri, reference.export_digest)
    return ExportedModel(loaded.model, loaded.task)
