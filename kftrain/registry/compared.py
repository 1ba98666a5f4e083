"""Versions beside each other: named as people name them, measured under one evaluation, with paired differences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kftrain import bootstrap
from kftrain.bootstrap import KEYS, Metrics
from kftrain.config import Config
from kftrain.errors import ConfigError, EvaluationError, TrackingError
from kftrain.registry import comparison, lineage
from kftrain.registry.champion_alias import CHAMPION, ChampionAlias
from kftrain.registry.comparison import RESAMPLING_SEED, MeasuredExport
from kftrain.registry.reference import Reference
from kftrain.run.documents import Evaluation, Interval
from kftrain.tracking import model_client
from kftrain.tracking.model_client import ModelVersion
from kftrain.trust import Trust

SliceNames = Callable[[list[str], Mapping[str, np.ndarray]], Sequence[str]]
"""From the groups' keys and sums to the name of the slice of each: a task's `slice_names`."""

SLICE_TOLERANCE = 1e-6
"""A slice whose figure differs by more, relatively, from that of the evaluation was cut in another way there."""


@dataclass(frozen=True)
class ComparedVersion:
    """A version, its evaluation, and how it differs from the baseline where both have that of the comparison."""

    version: int
    aliases: tuple[str, ...] = ()
    reference: Reference | None = None
    evaluation: Evaluation | None = None
    """Under the comparison's digest; where the version has none, the one under which it was registered."""
    problem: str = ""
    """Why there is no evaluation, or none that can be compared."""
    differences: dict[str, Interval] = field(default_factory=dict)
    """Metric -> the version's minus the baseline's, paired."""
    slice_differences: dict[str, dict[str, Interval]] = field(default_factory=dict)


@dataclass(frozen=True)
class ComparedVersions:
    """Versions in the order in which they were named."""

    model_name: str
    evaluation_digest: str
    """What all of them that can be compared were evaluated under; empty where none was evaluated."""
    baseline: int
    """The version that the others are compared with: the champion if it is one of them, else the first."""
    versions: list[ComparedVersion]


def compare(
    config: Config, names: Sequence[str], metrics: Metrics, slice_names: SliceNames, at_most: int = 0
) -> ComparedVersions:
    """Versions by number (`3`, `v3`) or alias (`champion`), in this order.

    None named: all, newest first; of more than `at_most`, where that is not 0, the champion and the newest. `metrics`:
    the task's function from sums to metrics. Raises TrackingError, EvaluationError.
    """
    alias = ChampionAlias.of(config)
    aliases = model_client.get_aliases(alias.uri, alias.model_name)
    found = {version.version: version for version in model_client.search_versions(alias.uri, alias.model_name)}
    numbers = _chosen(alias.model_name, names, aliases, found, at_most)
    champion = aliases.get(CHAMPION)
    baseline = champion if champion in numbers else numbers[0]
    known = {number: lineage.find(alias.uri, found[number]) for number in numbers}
    measured = _measured(alias.uri, {number: (found[number], known[number]) for number in numbers}, alias.trust)
    digest = _common_digest(measured, baseline)
    base = measured[baseline].get(digest)
    versions = []
    for number in numbers:
        own = measured[number].get(digest)
        evaluation = (own or next(iter(measured[number].values()), None)) if measured[number] else None
        pair = (own, base) if own and base and number != baseline else None
        whole, parts = _differences(config, metrics, slice_names, *pair) if pair else ({}, {})
        versions.append(
            ComparedVersion(
                version=number,
                aliases=tuple(sorted(name for name, at in aliases.items() if at == number)),
                reference=known[number],
                evaluation=evaluation.evaluation if evaluation else None,
                problem=_problem(known[number], evaluation, own),
                differences=whole,
                slice_differences=parts,
            )
        )
    return ComparedVersions(alias.model_name, digest, baseline, versions)


def find_version(config: Config, name: str) -> tuple[int, Reference]:
    """The version that a name means, and what it was made of. Raises TrackingError."""
    alias = ChampionAlias.of(config)
    number = _number(alias.model_name, name, model_client.get_aliases(alias.uri, alias.model_name))
    version = model_client.get_version(alias.uri, alias.model_name, number)
    if version is None:
        raise TrackingError("there is no such version", where=alias.model_name, value=name)
    return number, lineage.of(alias.uri, version)


def _chosen(
    model_name: str, names: Sequence[str], aliases: dict[str, int], found: Mapping[int, ModelVersion], at_most: int
) -> list[int]:
    numbers = [_number(model_name, name, aliases) for name in names]
    if missing := [name for name, number in zip(names, numbers, strict=True) if number not in found]:
        raise TrackingError("there is no such version", where=model_name, value=", ".join(missing))
    newest = sorted(found, reverse=True)
    if not newest:
        raise TrackingError("the model has no versions yet", where=model_name, fix="register a run first")
    if names or not 0 < at_most < len(newest):
        return list(dict.fromkeys(numbers)) or newest
    champion = aliases.get(CHAMPION)
    if champion is None or champion not in found or champion in newest[:at_most]:
        return newest[:at_most]
    return [*newest[: at_most - 1], champion]


def _number(model_name: str, name: str, aliases: dict[str, int]) -> int:
    """The version that a name means. Raises TrackingError for an alias that is not there."""
    digits = name.removeprefix("v")
    if digits.isdecimal() and len(digits) < 10:
        return int(digits)
    alias = name.removeprefix("@")
    if alias not in aliases:
        fix = f"a number such as v3, or one of: {', '.join(sorted(aliases)) or 'no aliases yet'}"
        raise TrackingError("there is no such version", where=model_name, value=name, fix=fix)
    return aliases[alias]


def _measured(
    uri: str, versions: Mapping[int, tuple[ModelVersion, Reference | None]], trust: Trust
) -> dict[int, dict[str, MeasuredExport]]:
    """Version -> digest -> evaluation, under the digests of the last evaluations of all of them; its own first."""
    own = {
        number: lineage.last_evaluation(uri, version, reference) if reference else ""
        for number, (version, reference) in versions.items()
    }
    return {
        number: {
            digest: found
            for digest in dict.fromkeys([own[number], *own.values()])
            if (found := _find(reference, digest, trust)) is not None
        }
        for number, (_, reference) in versions.items()
    }


def _find(reference: Reference | None, digest: str, trust: Trust) -> MeasuredExport | None:
    """An evaluation that can be used; a damaged one, or one that may not be read, counts as none."""
    try:
        return comparison.find_measured(reference, digest, trust)
    except (EvaluationError, ConfigError):
        return None


def _common_digest(measured: Mapping[int, Mapping[str, MeasuredExport]], baseline: int) -> str:
    """The digest that most versions have, the baseline among them if it has any; of several that of the newest."""
    newest_first = [measured[number] for number in sorted(measured, reverse=True)]
    counts = Counter(digest for each in newest_first for digest in each)
    usable = [digest for digest in counts if not measured[baseline] or digest in measured[baseline]]
    return max(usable, key=lambda digest: counts[digest], default="")


def _problem(reference: Reference | None, evaluation: MeasuredExport | None, common: MeasuredExport | None) -> str:
    if reference is None:
        return "not registered by kftrain, or its reference is gone"
    if evaluation is None:
        return "no evaluation that can be read"
    return "" if common else "evaluated on other data or with other settings"


def _differences(
    config: Config, metrics: Metrics, slice_names: SliceNames, ours: MeasuredExport, theirs: MeasuredExport
) -> tuple[dict[str, Interval], dict[str, dict[str, Interval]]]:
    keys = [str(key) for key in ours.statistics[KEYS]]
    sums = {name: values for name, values in ours.statistics.items() if name != KEYS}
    names = [str(name) for name in slice_names(keys, sums)] if ours.evaluation.slices else []
    whole, parts = bootstrap.paired_differences(
        metrics,
        ours.statistics,
        theirs.statistics,
        dict(zip(keys, names, strict=True)) if names else {},
        config.evaluate.num_bootstrap,
        config.registry.confidence,
        RESAMPLING_SEED,
    )
    return whole, {
        name: {metric: each for metric, each in found.items() if _agrees(name, metric, each, ours, theirs)}
        for name, found in parts.items()
    }


def _agrees(name: str, metric: str, found: Interval, ours: MeasuredExport, theirs: MeasuredExport) -> bool:
    """Whether a slice is here what it was in both evaluations: clusters of groups may lie in several slices."""
    slices = [each.evaluation.slices.get(name) for each in (ours, theirs)]
    values = [each.metrics.get(metric) if each else None for each in slices]
    if values[0] is None or values[1] is None:
        return False
    room = SLICE_TOLERANCE * max(abs(values[0]), abs(values[1]), 1e-12)
    return abs(values[0] - values[1] - found.value) <= room
