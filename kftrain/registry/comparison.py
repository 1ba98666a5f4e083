"""Two evaluated exports against each other: their files, and the paired difference of a metric."""

from __future__ import annotations

import hashlib
import io
import zipfile
from dataclasses import dataclass

import numpy as np

from kftrain import bootstrap, storage
from kftrain.bootstrap import Metrics
from kftrain.config import Config
from kftrain.errors import EvaluationError
from kftrain.registry.reference import Reference
from kftrain.run import documents
from kftrain.run.documents import Evaluation, Interval, Unmeasured
from kftrain.run.paths import RunPaths
from kftrain.trust import Trust

RESAMPLING_SEED = 0
"""The same for every comparison: equal inputs give equal decisions."""


@dataclass(frozen=True)
class MeasuredExport:
    """An evaluation and the sums per group behind it."""

    evaluation: Evaluation
    statistics: dict[str, np.ndarray]

    @property
    def num_groups(self) -> int:
        """Groups that a comparison resamples."""
        return len(next(iter(self.statistics.values()), ()))


def read_measured(folder: str) -> MeasuredExport:
    """The evaluation in a folder with its statistics, checked against their digest. Raises EvaluationError."""
    evaluation = documents.read(Evaluation, storage.join(folder, "metrics.json"), EvaluationError)
    where = storage.join(folder, "statistics.npz")
    try:
        content = storage.read_bytes(where)
        if hashlib.sha256(content).hexdigest() != evaluation.statistics_sha256:
            raise EvaluationError("the statistics are not those of metrics.json", where=where, fix="evaluate again")
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            return MeasuredExport(evaluation, dict(arrays))
    except FileNotFoundError as error:
        raise EvaluationError("the statistics are missing", where=where, fix="evaluate again") from error
    except (ValueError, zipfile.BadZipFile) as error:
        raise EvaluationError(f"the statistics cannot be read: {error}", where=where, fix="evaluate again") from error


def find_measured(reference: Reference | None, evaluation_digest: str, trust: Trust) -> MeasuredExport | None:
    """The evaluation of a registered version under a digest; None where it has none.

    Raises EvaluationError, and ConfigError where it may not be read.
    """
    if reference is None or not evaluation_digest:
        return None
    folder = RunPaths(reference.run_uri).evaluation(reference.checkpoint_digest, evaluation_digest)
    trust.require_place(folder)
    if not storage.exists(storage.join(folder, "metrics.json")):
        return None
    found = read_measured(folder)
    if found.evaluation.export_digest != reference.export_digest:
        return None
    return found if found.evaluation.evaluation_digest == evaluation_digest else None


def why_unmeasured(paths: RunPaths, evaluation_digest: str, export_digest: str) -> str:
    """Why the evaluation of a run could not score the champion's export; empty where it says nothing of that."""
    if not storage.exists(paths.unmeasured):
        return ""
    found = documents.read(Unmeasured, paths.unmeasured, EvaluationError)
    is_ours = (found.evaluation_digest, found.export_digest) == (evaluation_digest, export_digest)
    return found.reason if is_ours else ""


def improvement(config: Config, metrics: Metrics, challenger: MeasuredExport, champion: MeasuredExport) -> Interval:
    """How much better the challenger is in the gate's metric. Raises EvaluationError, or ConfigError for the metric."""
    return bootstrap.paired_improvement(
        metrics,
        config.registry.metric,
        config.registry.goal,
        challenger.statistics,
        champion.statistics,
        config.evaluate.num_bootstrap,
        config.registry.confidence,
        RESAMPLING_SEED,
    )
