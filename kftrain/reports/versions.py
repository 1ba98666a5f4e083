"""The values that a comparison of versions is made of, and the judgement that follows from them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kftrain.reports import wording
from kftrain.run.documents import Completion, Evaluation, Interval
from kftrain.run.timeline import Timeline


@dataclass(frozen=True)
class ReportedVersion:
    """A version with the documents that its run left behind; lost ones are None or empty."""

    version: int
    aliases: Sequence[str] = ()
    run_id: str = ""
    run_uri: str = ""
    problem: str = ""
    """Reason why the version cannot be compared, or which of its documents cannot be read."""
    evaluation: Evaluation | None = None
    differences: Mapping[str, Interval] = field(default_factory=dict)
    """Metric -> value minus the baseline's, paired; empty for the baseline and for versions that cannot be compared."""
    slice_differences: Mapping[str, Mapping[str, Interval]] = field(default_factory=dict)
    completion: Completion | None = None
    history: Sequence[Mapping[str, Any]] = ()
    timeline: Timeline | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    """Configuration by key: `train.steps` -> value."""
    data: Mapping[str, str] = field(default_factory=dict)
    """Description of the dataset for a reader: `source` -> value."""
    tokens_per_sample: int = 0
    """Tokens of one sample; 0 if samples are not tokens."""
    has_gpus: bool = False
    """True if every process had a GPU."""

    @property
    def name(self) -> str:
        """Short name, as `v3`."""
        return f"v{self.version}"


@dataclass(frozen=True)
class VersionComparison:
    """Versions in the order in which they were named."""

    model_name: str
    metric: str
    """Metric that the gate compares."""
    goal: str
    """`minimize` or `maximize`."""
    confidence: float
    baseline: int
    """The version that the others are compared with."""
    evaluation_digest: str
    versions: Sequence[ReportedVersion]

    @property
    def base(self) -> ReportedVersion:
        """The version that the others are compared with."""
        return next(version for version in self.versions if version.version == self.baseline)

    @property
    def others(self) -> list[ReportedVersion]:
        """The versions that are compared with the baseline."""
        return [version for version in self.versions if version.version != self.baseline]

    def improvement(self, difference: Interval | None) -> Interval | None:
        """Turn a difference in the gate's metric into an improvement: positive is better whatever the goal."""
        if difference is None or self.goal == "maximize":
            return difference
        return Interval(value=-difference.value, low=-difference.high, high=-difference.low)

    def is_gain(self, difference: Interval | None) -> bool | None:
        """Return True if a difference in the gate's metric is a gain, None if its interval holds zero."""
        gain = self.improvement(difference)
        if gain is None or gain.low <= 0 <= gain.high:
            return None
        return gain.low > 0


def describe_version(version: ReportedVersion) -> str:
    """Return the version's number and aliases: `version 3 (champion)`."""
    aliases = f" ({', '.join(wording.clean(alias) for alias in version.aliases)})" if version.aliases else ""
    return f"version {version.version}{aliases}"


def find_differences(documents: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """Map a key to its value in every document ('' if missing), for the keys whose values are not all equal."""
    keys = dict.fromkeys(key for document in documents for key in document)
    by_key = {key: [document.get(key, "") for document in documents] for key in sorted(keys)}
    return {key: values for key, values in by_key.items() if len(set(values)) > 1}


def summarize_cost(version: ReportedVersion) -> dict[str, Any]:
    """Sum up the time that a training took over all attempts; empty if its timeline is lost."""
    if version.timeline is None:
        return {}
    timeline = version.timeline
    unit = "gpu_hours" if version.has_gpus else "process_hours"
    return {
        "attempts": len(timeline.attempts),
        "wall_seconds": timeline.wall_seconds,
        unit: timeline.process_seconds / 3600,
        "goodput": timeline.goodput,
        "step_seconds": timeline.step_seconds,
        "around_seconds": timeline.around_seconds,
        "lost_seconds": timeline.lost_seconds,
    }


def to_plain(comparison: VersionComparison) -> dict[str, Any]:
    """Turn a comparison into plain values for JSON."""
    return {
        "model_name": comparison.model_name,
        "metric": comparison.metric,
        "goal": comparison.goal,
        "confidence": comparison.confidence,
        "baseline": comparison.baseline,
        "evaluation_digest": comparison.evaluation_digest,
        "versions": [_version_to_plain(comparison, version) for version in comparison.versions],
        "config_differences": _map_differences(comparison, [version.settings for version in comparison.versions]),
        "data_differences": _map_differences(comparison, [version.data for version in comparison.versions]),
    }


def _version_to_plain(comparison: VersionComparison, version: ReportedVersion) -> dict[str, Any]:
    gain = comparison.improvement(version.differences.get(comparison.metric))
    evaluation = version.evaluation
    return {
        "version": version.version,
        "aliases": list(version.aliases),
        "run_uri": version.run_uri,
        "problem": version.problem,
        "evaluation_digest": evaluation.evaluation_digest if evaluation else "",
        "metrics": _intervals_to_plain(evaluation.metrics if evaluation else {}),
        "improvement": gain.model_dump(mode="json") if gain else None,
        "differences": _intervals_to_plain(version.differences),
        "slice_differences": {
            name: _intervals_to_plain(version) for name, version in version.slice_differences.items()
        },
        "cost": summarize_cost(version),
    }


def _intervals_to_plain(intervals: Mapping[str, Interval]) -> dict[str, Any]:
    return {name: interval.model_dump(mode="json") for name, interval in intervals.items()}


def _map_differences(
    comparison: VersionComparison, documents: Sequence[Mapping[str, str]]
) -> dict[str, dict[str, str]]:
    names = [str(version.version) for version in comparison.versions]
    return {key: dict(zip(names, values, strict=True)) for key, values in find_differences(documents).items()}


# Their names in 0.2.0, which copies of examples/compare.ipynb import.
cost = summarize_cost
differing = find_differences
