"""Reads the evaluations of two exports from their files and compares them unit by unit.

A comparison is the paired difference of a metric as an interval, on all units or on each slice, and McNemar's test.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
import zlib
from dataclasses import dataclass

import numpy as np

from kftrain.config import Config
from kftrain.core import storage
from kftrain.errors import EvaluationError
from kftrain.registry.reference import Reference
from kftrain.run import documents
from kftrain.run.documents import Evaluation, Interval, Performance, ReferenceSet, Unmeasured
from kftrain.run.paths import RunPaths
from kftrain.statistics import bootstrap
from kftrain.statistics.bootstrap import Metrics, Statistics
from kftrain.statistics.significance import PairedTest, mcnemar
from kftrain.trust import Trust

SLICES = "slices.npz"
"""File beside `statistics.npz` with a row for every pair of a unit and a slice that the unit has a part in."""

RESAMPLING_SEED = 0
"""Seed of the bootstrap, the same for every comparison: equal inputs give equal decisions."""

_UNREADABLE = (ValueError, TypeError, EOFError, RuntimeError, MemoryError, zipfile.BadZipFile, zlib.error)
"""Errors that numpy and zipfile raise for an archive that is damaged, encrypted, or no archive at all."""


@dataclass(frozen=True)
class MeasuredExport:
    """The evaluation of an export with the sums per group (unit of resampling) that its metrics were computed from."""

    evaluation: Evaluation
    statistics: dict[str, np.ndarray]
    slices: dict[str, Statistics] | None = None
    """Slice -> the sums of each unit within it, with its keys; None where the evaluation has kept none."""

    performance: Performance | None = None
    """Latency, memory and size of the export; None where they were not measured."""

    @property
    def costs(self) -> dict[str, float]:
        """Values by the names of `gate.LIMITS`; unmeasured ones are left out."""
        calibration, performance = self.evaluation.calibration, self.performance
        costs = {} if calibration is None else {"calibration_error": calibration.error}
        if performance is not None:
            costs |= {
                "latency_seconds": performance.latency_seconds.median,
                "export_bytes": float(performance.export_bytes),
            }
        if performance is not None and performance.memory_bytes is not None:
            costs["memory_bytes"] = performance.memory_bytes.median
        return costs

    @property
    def num_groups(self) -> int:
        """Number of groups, the units that a comparison resamples."""
        return len(next(iter(self.statistics.values()), ()))


def read_measured_export(folder: str) -> MeasuredExport:
    """Read the evaluation in a folder with its statistics, checked against their digests. Raises EvaluationError."""
    evaluation = documents.read(Evaluation, storage.join(folder, "metrics.json"), EvaluationError)
    statistics = _read_arrays(storage.join(folder, "statistics.npz"), evaluation.statistics_sha256)
    performance = find_performance(folder, evaluation.export_digest)
    if not evaluation.slices_sha256:
        return MeasuredExport(evaluation, statistics, performance=performance)
    needed = (bootstrap.SLICES, bootstrap.SLICE_NAMES)
    slices = unpack_slices(_read_arrays(storage.join(folder, SLICES), evaluation.slices_sha256, needed))
    return MeasuredExport(evaluation, statistics, slices, performance)


def read_on_reference(paths: RunPaths, evaluation: Evaluation) -> MeasuredExport | None:
    """Read the evaluation of the same export on the run's reference set; None if the run has no such set.

    Raises EvaluationError, also if the evaluation there is of another export.
    """
    reference = documents.read_if_exists(ReferenceSet, paths.reference_set, EvaluationError)
    if reference is None:
        return None
    folder = paths.evaluation(evaluation.checkpoint_digest, reference.evaluation_digest)
    measured = read_measured_export(folder)
    if measured.evaluation.export_digest != evaluation.export_digest:
        raise EvaluationError("the evaluation on the reference set is of another export", where=folder)
    return measured


def find_performance(folder: str, export_digest: str) -> Performance | None:
    """Read the measured performance of an export from the folder of its evaluation; None if there is none of it."""
    performance = documents.read_if_exists(Performance, storage.join(folder, "performance.json"), EvaluationError)
    return performance if performance is not None and performance.export_digest == export_digest else None


def _read_arrays(where: str, sha256: str, needed: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    try:
        content = storage.read_bytes(where)  # once: what is parsed below is what was hashed
        if hashlib.sha256(content).hexdigest() != sha256:
            raise EvaluationError("the statistics are not those of metrics.json", where=where, fix="evaluate again")
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            return _require_columns(dict(arrays), {bootstrap.KEYS, *needed})
    except FileNotFoundError as error:
        raise EvaluationError("the statistics are missing", where=where, fix="evaluate again") from error
    except _UNREADABLE as error:
        raise EvaluationError(f"the statistics cannot be read: {error}", where=where, fix="evaluate again") from error


def _require_columns(arrays: dict[str, np.ndarray], needed: set[str]) -> dict[str, np.ndarray]:
    """Return the arrays. Raises ValueError unless they are equally long columns of numbers; keys and names are text.

    The names of slices are a table of their own: `[slices]`, not `[rows]`.
    """
    kinds = {bootstrap.KEYS: "U", bootstrap.SLICE_NAMES: "U"}
    odd = [key for key, v in arrays.items() if np.ndim(v) != 1 or v.dtype.kind not in kinds.get(key, "biuf")]
    odd += sorted(needed - arrays.keys())
    if odd or len({len(values) for key, values in arrays.items() if key != bootstrap.SLICE_NAMES}) > 1:
        raise ValueError(f"no columns as expected: {', '.join(odd) or 'their lengths differ'}")
    return arrays


def unpack_slices(arrays: dict[str, np.ndarray]) -> dict[str, Statistics]:
    """Return slice -> statistics of its units, from the rows of `slices.npz`, which code their slice by a number."""
    sums = {name: values for name, values in arrays.items() if name not in (bootstrap.SLICES, bootstrap.SLICE_NAMES)}
    codes = arrays[bootstrap.SLICES]
    members = {str(name): codes == code for code, name in enumerate(arrays[bootstrap.SLICE_NAMES])}
    return {name: {key: values[rows] for key, values in sums.items()} for name, rows in members.items()}


def find_measured_export(reference: Reference | None, evaluation_digest: str, trust: Trust) -> MeasuredExport | None:
    """Read the evaluation of a registered version under a digest; None if there is none of this export.

    Raises EvaluationError if it is damaged, and ConfigError if its place is not trusted.
    """
    if reference is None or not evaluation_digest:
        return None
    folder = RunPaths(reference.run_uri).evaluation(reference.checkpoint_digest, evaluation_digest)
    trust.require_place(folder)
    if not storage.exists(storage.join(folder, "metrics.json")):
        return None
    measured = read_measured_export(folder)
    if measured.evaluation.export_digest != reference.export_digest:
        return None
    return measured if measured.evaluation.evaluation_digest == evaluation_digest else None


def read_why_unmeasured(paths: RunPaths, evaluation_digest: str, export_digest: str) -> str:
    """Return the reason why a run's evaluation could not score the champion's export; empty if it noted none."""
    unmeasured = documents.read_if_exists(Unmeasured, paths.unmeasured, EvaluationError)
    if unmeasured is None or (unmeasured.evaluation_digest, unmeasured.export_digest) != (
        evaluation_digest,
        export_digest,
    ):
        return ""
    return unmeasured.reason


def compute_improvement(
    config: Config,
    metrics: Metrics,
    challenger: MeasuredExport,
    champion: MeasuredExport,
    confidence: float | None = None,
) -> Interval:
    """Compute how much better the challenger is in the gate's metric, as an interval; positive is better.

    `confidence`: level of the interval; None: `registry.confidence`. Raises EvaluationError, and ConfigError for an
    unknown metric.
    """
    return _compare_paired(config, metrics, challenger.statistics, champion.statistics, confidence)


def run_paired_test(
    config: Config, metrics: Metrics, challenger: MeasuredExport, champion: MeasuredExport
) -> PairedTest | None:
    """Run McNemar's test if the metric is the share of units that are right (0 or 1 for a unit, their mean for all).

    None for other metrics, and if `registry.min_effect` is set: the test says only that there is a difference.
    """
    name, settings = config.registry.metric, config.registry
    if settings.min_effect:
        return None
    values = bootstrap.paired_values(metrics, name, challenger.statistics, champion.statistics)
    wholes = [export.evaluation.metrics[name].value for export in (challenger, champion)]
    if not all(_is_share(units, whole) for units, whole in zip(values, wholes, strict=True)):
        return None
    ours, theirs = ((units == 1.0) == (settings.goal == "maximize") for units in values)
    return mcnemar(ours, theirs)


def compute_slice_improvements(
    config: Config, metrics: Metrics, challenger: MeasuredExport, champion: MeasuredExport
) -> dict[str, Interval] | None:
    """Compute how much better the challenger is on every slice with enough groups and a value of the metric.

    NaN where only the champion has a value. None if an evaluation has no sums by slice. All slices together have the
    configured confidence (Bonferroni). A slice resamples its own units.
    """
    if not challenger.evaluation.slices:
        return {}
    if challenger.slices is None or champion.slices is None:
        return None
    ours, theirs = challenger.slices, champion.slices
    large = [name for name in sorted(ours) if name in theirs and _is_comparable(config, ours[name], theirs[name])]
    valued = [name for name in large if _has_value(config, metrics, theirs[name])]
    shared = [name for name in valued if _has_value(config, metrics, ours[name])]
    lost = dict.fromkeys(set(valued) - set(shared), Interval(value=np.nan, low=np.nan, high=np.nan))
    confidence = 1.0 - (1.0 - config.registry.confidence) / max(1, len(shared))
    return lost | {name: _compare_paired(config, metrics, ours[name], theirs[name], confidence) for name in shared}


def _compare_paired(
    config: Config, metrics: Metrics, challenger: Statistics, champion: Statistics, confidence: float | None
) -> Interval:
    return bootstrap.paired_improvement(
        metrics,
        config.registry.metric,
        config.registry.goal,
        challenger,
        champion,
        config.evaluate.num_bootstrap,
        confidence or config.registry.confidence,
        RESAMPLING_SEED,
    )


def _is_comparable(config: Config, ours: Statistics, theirs: Statistics) -> bool:
    """Return True if a slice has enough units, and the same ones in both evaluations."""
    own, other = (np.sort(np.asarray(sums[bootstrap.KEYS])) for sums in (ours, theirs))
    return len(own) >= config.registry.slice_min_groups and np.array_equal(own, other)


def _has_value(config: Config, metrics: Metrics, sums: Statistics) -> bool:
    whole = {name: values.sum() for name, values in sums.items() if name != bootstrap.KEYS}
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return bool(np.isfinite(metrics(whole)[config.registry.metric]))


def _is_share(units: np.ndarray, whole: float) -> bool:
    return bool(np.isin(units, (0.0, 1.0)).all()) and bool(np.isclose(units.mean(), whole, rtol=0.0, atol=1e-12))
