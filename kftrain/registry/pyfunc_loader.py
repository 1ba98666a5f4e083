"""How `mlflow.pyfunc.load_model("models:/<name>@champion")` becomes a model: through the reference, without a pickle.

MLflow calls `_load_pyfunc` with the path of `reference.json`. The export is fetched and every byte of it checked
against the digest before a tensor is loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kftrain import contracts
from kftrain.errors import CheckpointError
from kftrain.registry.reference import Reference

if TYPE_CHECKING:
    import pandas


class ExportedModel:
    """What MLflow wraps: a model with the task that knows how to ask it."""

    def __init__(self, model: Any, task: Any) -> None:
        self._model, self._task = model, task

    def predict(self, model_input: pandas.DataFrame) -> pandas.DataFrame:
        """One row per input row, equal to what evaluation computes."""
        answer: pandas.DataFrame = self._task.predict(self._model, model_input)
        return answer


def _load_pyfunc(path: str) -> ExportedModel:
    from kftrain.checkpoint.export import load_export

    reference = contracts.read(Reference, path, CheckpointError)
    loaded = load_export(reference.export_uri, reference.export_digest)
    return ExportedModel(loaded.model, loaded.task)
