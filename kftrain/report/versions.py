"""What a comparison of versions is made of, and what follows from it: which is better, and what differs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kftrain.report import wording
from kftrain.run.documents import Completion, Evaluation, Interval
from kftrain.run.timeline import Timeline


@dataclass(frozen=True)
class ReportedVersion:
    """One version with what its run left behind; what is gone is None or empty."""

    version: int
    aliases: Sequence[str] = ()
    run_id: str = ""
    run_uri: str = ""
    problem: str = ""
    """Why it cannot be compared, or something of it cannot be read."""
    evaluation: Evaluation | None = None
    differences: Mapping[str, Interval] = field(default_factory=dict)
    """Metric -> its value minus the baseline's, paired; empty for the baseline, and where they cannot be compared."""
    slice_differences: Mapping[str, Mapping[str, Interval]] = field(default_factory=dict)
    completion: Completion | None = None
    history: Sequence[Mapping[str, Any]] = ()
    timeline: Timeline | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    """Its configuration: `train.steps` -> value."""
    data: Mapping[str, str] = field(default_factory=dict)
    """Its dataset, as a person describes it: `source` -> value."""
    tokens_per_sample: int = 0
    """0 where samples are no tokens."""
    has_gpus: bool = False
    """Whether each of its processes was given a GPU."""

    @property
    def name(self) -> str:
        """What people call it."""
        return f"v{self.version}"


@dataclass(frozen=True)
class VersionComparison:
    """Versions in the order in which they were named."""

    model_name: str
    metric: str
    """What the gate compares."""
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
        return next(each for each in self.versions if each.version == self.baseline)

    @property
    def others(self) -> list[ReportedVersion]:
        """All but the baseline."""
        return [each for each in self.versions if each.version != self.baseline]

    def improvement(self, difference: Interval | None) -> Interval | None:
        """A difference in the gate's metric as an improvement: positive is better whatever the goal."""
        if difference is None or self.goal == "maximize":
            return difference
        return Interval(value=-difference.value, low=-difference.high, high=-difference.low)

    def judged(self, difference: Interval | None) -> bool | None:
        """Whether a difference in the gate's metric is better; None where its interval holds zero."""
        gain = self.improvement(difference)
        if gain is None or gain.low <= 0 <= gain.high:
            return None
        return gain.low > 0


def called(version: ReportedVersion) -> str:
    """`version 3 (champion)`."""
    aliases = f" ({', '.join(wording.clean(each) for each in version.aliases)})" if version.aliases else ""
    return f"version {version.version}{aliases}"


def differing(documents: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """Key -> value in each document, for the keys whose values are not all equal; '' where it is not there."""
    keys = dict.fromkeys(key for document in documents for key in document)
    found = {key: [document.get(key, "") for document in documents] for key in sorted(keys)}
    return {key: values for key, values in found.items() if len(set(values)) > 1}


def cost(version: ReportedVersion) -> dict[str, Any]:
    """What a training took: plain numbers; empty where its timeline is not known."""
    if version.timeline is None:
        return {}
    found = version.timeline
    unit = "gpu_hours" if version.has_gpus else "process_hours"
    return {
        "attempts": len(found.attempts),
        "wall_seconds": found.wall_seconds,
        unit: found.process_seconds / 3600,
        "goodput": found.goodput,
        "step_seconds": found.step_seconds,
        "around_seconds": found.around_seconds,
        "lost_seconds": found.lost_seconds,
    }


def to_plain(found: VersionComparison) -> dict[str, Any]:
    """A comparison as JSON."""
    return {
        "model_name": found.model_name,
        "metric": found.metric,
        "goal": found.goal,
        "confidence": found.confidence,
        "baseline": found.baseline,
        "evaluation_digest": found.evaluation_digest,
        "versions": [_plain(found, each) for each in found.versions],
        "config_differences": _by_version(found, [each.settings for each in found.versions]),
        "data_differences": _by_version(found, [each.data for each in found.versions]),
    }


def _plain(found: VersionComparison, version: ReportedVersion) -> dict[str, Any]:
    gain = found.improvement(version.differences.get(found.metric))
    evaluation = version.evaluation
    return {
        "version": version.version,
        "aliases": list(version.aliases),
        "run_uri": version.run_uri,
        "problem": version.problem,
        "evaluation_digest": evaluation.evaluation_digest if evaluation else "",
        "metrics": _intervals(evaluation.metrics if evaluation else {}),
        "improvement": gain.model_dump(mode="json") if gain else None,
        "differences": _intervals(version.differences),
        "slice_differences": {name: _intervals(each) for name, each in version.slice_differences.items()},
        "cost": cost(version),
    }


def _intervals(found: Mapping[str, Interval]) -> dict[str, Any]:
    return {name: each.model_dump(mode="json") for name, each in found.items()}


def _by_version(found: VersionComparison, documents: Sequence[Mapping[str, str]]) -> dict[str, dict[str, str]]:
    names = [str(each.version) for each in found.versions]
    return {key: dict(zip(names, values, strict=True)) for key, values in differing(documents).items()}
