"""Two evaluated exports against each other: their files, and the paired difference of a metric."""

from __future__ import annotations

import hashlib
import io
import zipfile
import zlib
from dataclasses import dataclass

import numpy as np

from kftrain import bootstrap, storage
from kftrain.bootstrap import Metrics, Statistics
from kftrain.config import Config
from kftrain.errors import EvaluationError
from kftrain.registry.reference import Reference
from kftrain.run import documents
from kftrain.run.documents import Evaluation, Interval, Performance, ReferenceSet, Unmeasured
from kftrain.run.paths import RunPaths
from kftrain.significance import PairedTest, mcnemar
from kftrain.trust import Trust

SLICES = "slices.npz"
"""Beside `statistics.npz`: a row for each unit and slice that it has a part in."""

RESAMPLING_SEED = 0
"""The same for every comparison: equal inputs give equal decisions."""

_UNREADABLE = (ValueError, TypeError, EOFError, RuntimeError, MemoryError, zipfile.BadZipFile, zlib.error)
"""What numpy and zipfile raise for an archive that is damaged, encrypted, or none."""


@dataclass(frozen=True)
class MeasuredExport:
    """An evaluation and the sums per group behind it."""

    evaluation: Evaluation
    statistics: dict[str, np.ndarray]
    slices: dict[str, Statistics] | None = None
    """Slice -> the sums of each unit within it, with its keys; None where the evaluation has kept none."""

    performance: Performance | None = None
    """What the export costs; None where that was not measured."""

    @property
    def costs(self) -> dict[str, float]:
        """What the gate's limits are about, as far as it is known."""
        calibration, found = self.evaluation.calibration, self.performance
        costs = {} if calibration is None else {"calibration_error": calibration.error}
        if found is not None:
            costs |= {"latency_seconds": found.latency_seconds.median, "export_bytes": float(found.export_bytes)}
        if found is not None and found.memory_bytes is not None:
            costs["memory_bytes"] = found.memory_bytes.median
        return costs

    @property
    def num_groups(self) -> int:
        """Groups that a comparison resamples."""
        return len(next(iter(self.statistics.values()), ()))


def read_measured(folder: str) -> MeasuredExport:
    """The evaluation in a folder with its statistics, checked against their digest. Raises EvaluationError."""
    evaluation = documents.read(Evaluation, storage.join(folder, "metrics.json"), EvaluationError)
    statistics = _read_arrays(storage.join(folder, "statistics.npz"), evaluation.statistics_sha256)
    performance = find_performance(folder, evaluation.export_digest)
    if not evaluation.slices_sha256:
        return MeasuredExport(evaluation, statistics, performance=performance)
    needed = (bootstrap.SLICES, bootstrap.SLICE_NAMES)
    slices = unpack_slices(_read_arrays(storage.join(folder, SLICES), evaluation.slices_sha256, needed))
    return MeasuredExport(evaluation, statistics, slices, performance)


def read_on_reference(paths: RunPaths, evaluation: Evaluation) -> MeasuredExport | None:
    """What was evaluated, on the run's reference set; None where it has none. Raises EvaluationError."""
    reference = documents.read_if_exists(ReferenceSet, paths.reference_set, EvaluationError)
    if reference is None:
        return None
    folder = paths.evaluation(evaluation.checkpoint_digest, reference.evaluation_digest)
    found = read_measured(folder)
    if found.evaluation.export_digest != evaluation.export_digest:
        raise EvaluationError("the evaluation on the reference set is of another export", where=folder)
    return found


def find_performance(folder: str, export_digest: str) -> Performance | None:
    """What the export costs that was evaluated into a folder; None where that was not measured, or of another one."""
    found = documents.read_if_exists(Performance, storage.join(folder, "performance.json"), EvaluationError)
    return found if found is not None and found.export_digest == export_digest else None


def _read_arrays(where: str, sha256: str, needed: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    try:
        content = storage.read_bytes(where)
        if hashlib.sha256(content).hexdigest() != sha256:
            raise EvaluationError("the statistics are not those of metrics.json", where=where, fix="evaluate again")
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            return _checked(dict(arrays), {bootstrap.KEYS, *needed})
    except FileNotFoundError as error:
        raise EvaluationError("the statistics are missing", where=where, fix="evaluate again") from error
    except _UNREADABLE as error:
        raise EvaluationError(f"the statistics cannot be read: {error}", where=where, fix="evaluate again") from error


def _checked(arrays: dict[str, np.ndarray], needed: set[str]) -> dict[str, np.ndarray]:
    """The same. Raises ValueError unless they are columns of numbers, and of text for keys and names, equally long."""
    kinds = {bootstrap.KEYS: "U", bootstrap.SLICE_NAMES: "U"}
    odd = [key for key, v in arrays.items() if np.ndim(v) != 1 or v.dtype.kind not in kinds.get(key, "biuf")]
    odd += sorted(needed - arrays.keys())
    if odd or len({len(values) for key, values in arrays.items() if key != bootstrap.SLICE_NAMES}) > 1:
        raise ValueError(f"no columns as expected: {', '.join(odd) or 'their lengths differ'}")
    return arrays


def unpack_slices(arrays: dict[str, np.ndarray]) -> dict[str, Statistics]:
    """Slice -> statistics of its units, from the rows that `evaluate.session` has kept."""
    sums = {name: values for name, values in arrays.items() if name not in (bootstrap.SLICES, bootstrap.SLICE_NAMES)}
    codes = arrays[bootstrap.SLICES]
    members = {str(name): codes == code for code, name in enumerate(arrays[bootstrap.SLICE_NAMES])}
    return {name: {key: values[rows] for key, values in sums.items()} for name, rows in members.items()}


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
    found = documents.read_if_exists(Unmeasured, paths.unmeasured, EvaluationError)
    if found is None or (found.evaluation_digest, found.export_digest) != (evaluation_digest, export_digest):
        return ""
    return found.reason


def improvement(
    config: Config,
    metrics: Metrics,
    challenger: MeasuredExport,
    champion: MeasuredExport,
    confidence: float | None = None,
) -> Interval:
    """How much better the challenger is in the gate's metric. Raises EvaluationError, or ConfigError for the metric.

    `confidence`: None: as it is configured.
    """
    return _paired(config, metrics, challenger.statistics, champion.statistics, confidence)


def paired_test(
    config: Config, metrics: Metrics, challenger: MeasuredExport, champion: MeasuredExport
) -> PairedTest | None:
    """McNemar's test, where the metric is a share of units that are right: of each alone 0 or 1, of all their mean.

    None for all other metrics, and where an effect is asked for that it knows nothing of.
    """
    name, settings = config.registry.metric, config.registry
    if settings.min_effect:
        return None
    values = bootstrap.paired_values(metrics, name, challenger.statistics, champion.statistics)
    wholes = [found.evaluation.metrics[name].value for found in (challenger, champion)]
    if not all(_is_share(units, whole) for units, whole in zip(values, wholes, strict=True)):
        return None
    ours, theirs = ((units == 1.0) == (settings.goal == "maximize") for units in values)
    return mcnemar(ours, theirs)


def slice_improvements(
    config: Config, metrics: Metrics, challenger: MeasuredExport, champion: MeasuredExport
) -> dict[str, Interval] | None:
    """How much better the challenger is on each slice that has enough groups and the metric; None without their sums.

    It is not a number where the champion alone has a value.
    All slices together have the configured confidence (Bonferroni). A slice resamples its own units.
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
    return lost | {name: _paired(config, metrics, ours[name], theirs[name], confidence) for name in shared}


def _paired(
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
    """Whether a slice has enough units, the same in both."""
    own, other = (np.sort(np.asarray(each[bootstrap.KEYS])) for each in (ours, theirs))
    return len(own) >= config.registry.slice_min_groups and np.array_equal(own, other)


def _has_value(config: Config, metrics: Metrics, sums: Statistics) -> bool:
    whole = {name: values.sum() for name, values in sums.items() if name != bootstrap.KEYS}
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return bool(np.isfinite(metrics(whole)[config.registry.metric]))


def _is_share(units: np.ndarray, whole: float) -> bool:
    return bool(np.isin(units, (0.0, 1.0)).all()) and bool(np.isclose(units.mean(), whole, rtol=0.0, atol=1e-12))
