"""A run that is complete, as the documents in its folder describe it."""

from __future__ import annotations

from dataclasses import dataclass

from kftrain.config import Config
from kftrain.core import storage
from kftrain.errors import ConfigError
from kftrain.run import documents
from kftrain.run.config import read_config
from kftrain.run.documents import Completion, Evaluation, Registration
from kftrain.run.paths import RunPaths


@dataclass(frozen=True)
class CompletedRun:
    """A run that has been trained, evaluated and registered: the documents in its folder."""

    uri: str
    config: Config
    completion: Completion
    evaluation: Evaluation
    registration: Registration

    @classmethod
    def read(cls, uri: str) -> CompletedRun:
        """Read the run in a folder. Raises ConfigError, DataError or EvaluationError where a document is missing."""
        from kftrain.stages.evaluate import read_evaluation
        from kftrain.stages.firing import read_skipped

        paths = RunPaths(storage.absolute(uri))
        skipped = read_skipped(paths)
        if skipped is not None:
            raise ConfigError(f"the run had nothing to do: {skipped.line}", where=paths.uri, fix="read the one before")
        config, completion = read_config(paths), documents.read(Completion, paths.complete)
        registration = documents.read(Registration, paths.registration)
        return cls(paths.uri, config, completion, read_evaluation(paths, config, completion), registration)

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics on the validation split; `evaluation.metrics` has their intervals."""
        return {name: interval.value for name, interval in self.evaluation.metrics.items()}
