"""Compares registered versions for people (`kftrain models compare`): under one evaluation, with paired differences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kftrain.config import Config
from kftrain.errors import ConfigError, EvaluationError, TrackingError
from kftrain.registry import comparison, lineage
from kftrain.registry.champion_alias import CHAMPION, ChampionAlias
from kftrain.registry.comparison import RESAMPLING_SEED, MeasuredExport
from kftrain.registry.reference import Reference
from kftrain.run.documents import Evaluation, Interval
from kftrain.statistics import bootstrap
from kftrain.statistics.bootstrap import KEYS, Metrics
from kftrain.tracking import model_client
from kftrain.tracking.model_client import ModelVersion
from kftrain.trust import Trust

SliceNames = Callable[[list[str], Mapping[str, np.ndarray]], Sequence[str]]
"""A task's `slice_names`: from the keys and sums of the groups to the slice of every group."""

SLICE_TOLERANCE = 1e-6
"""A slice whose figure differs by more, relatively, from that of the evaluation was cut in another way there."""


@dataclass(frozen=True)
class ComparedVersion:
    """A version with its evaluation, and its differences from the baseline if both have the common evaluation."""

    version: int
    aliases: tuple[str, ...] = ()
    reference: Reference | None = None
    evaluation: Evaluation | None = None
    """The evaluation under the common digest; if the version has none, the one under which it was registered."""
    problem: str = ""
    """The reason why there is no evaluation, or none that can be compared; empty if all is well."""
    differences: dict[str, Interval] = field(default_factory=dict)
    """Metric -> the version's value minus the baseline's, as a paired interval."""
    slice_differences: dict[str, dict[str, Interval]] = field(default_factory=dict)


@dataclass(frozen=True)
class ComparedVersions:
    """The result of a comparison; versions stand in the order in which they were named."""

    model_name: str
    evaluation_digest: str
    """Digest of the evaluation that is common to the versions that are compared; empty if none was evaluated."""
    baseline: int
    """The version that the others are compared with: the champion if it is one of them, else the first."""
    versions: list[ComparedVersion]


def compare(
    config: Config, names: Sequence[str], metrics: Metrics, slice_names: SliceNames, at_most: int = 0
) -> ComparedVersions:
    """Compare versions, named by number (`3`, `v3`) or alias (`champion`), with the champion or the first of them.

    Without names: all versions, newest first; if there are more than `at_most` (0: no limit), the newest and the
    champion. `metrics`: the task's function from sums to metrics. Raises TrackingError, EvaluationError.
    """
    alias = ChampionAlias.of(config)
    aliases = model_client.get_aliases(alias.uri, alias.model_name)
    existing = {version.version: version for version in model_client.search_versions(alias.uri, alias.model_name)}
    numbers = _choose_numbers(alias.model_name, names, aliases, existing, at_most)
    champion = aliases.get(CHAMPION)
    baseline = champion if champion in numbers else numbers[0]
    references = {number: lineage.find_reference(alias.uri, existing[number]) for number in numbers}
    measured = _read_evaluations(
        alias.uri, {number: (existing[number], references[number]) for number in numbers}, alias.trust
    )
    digest = _choose_common_digest(measured, baseline)
    base = measured[baseline].get(digest)
    versions = []
    for number in numbers:
        own = measured[number].get(digest)
        evaluation = (own or next(iter(measured[number].values()), None)) if measured[number] else None
        pair = (own, base) if own and base and number != baseline else None
        whole, parts = _compute_differences(config, metrics, slice_names, *pair) if pair else ({}, {})
        versions.append(
            ComparedVersion(
                version=number,
                aliases=tuple(sorted(name for name, at in aliases.items() if at == number)),
                reference=references[number],
                evaluation=evaluation.evaluation if evaluation else None,
                problem=_describe_problem(references[number], evaluation, own),
                differences=whole,
                slice_differences=parts,
            )
        )
    return ComparedVersions(alias.model_name, digest, baseline, versions)


def find_version(config: Config, name: str) -> tuple[int, Reference]:
    """Return the number of the version that a name means, and its reference. Raises TrackingError."""
    alias = ChampionAlias.of(config)
    number = _parse_number(alias.model_name, name, model_client.get_aliases(alias.uri, alias.model_name))
    version = model_client.get_version(alias.uri, alias.model_name, number)
    if version is None:
        raise TrackingError("there is no such version", where=alias.model_name, value=name)
    return number, lineage.read_reference(alias.uri, version)


def _choose_numbers(
    model_name: str, names: Sequence[str], aliases: dict[str, int], existing: Mapping[int, ModelVersion], at_most: int
) -> list[int]:
    """Return the versions to compare, see `compare`. Raises TrackingError if one is missing, or there are none."""
    numbers = [_parse_number(model_name, name, aliases) for name in names]
    if missing := [name for name, number in zip(names, numbers, strict=True) if number not in existing]:
        raise TrackingError("there is no such version", where=model_name, value=", ".join(missing))
    newest = sorted(existing, reverse=True)
    if not newest:
        raise TrackingError("the model has no versions yet", where=model_name, fix="register a run first")
    if names or not 0 < at_most < len(newest):
        return list(dict.fromkeys(numbers)) or newest
    champion = aliases.get(CHAMPION)
    if champion is None or champion not in existing or champion in newest[:at_most]:
        return newest[:at_most]
    return [*newest[: at_most - 1], champion]


def _parse_number(model_name: str, name: str, aliases: dict[str, int]) -> int:
    """Return the number that `3`, `v3`, `champion` or `@champion` means. Raises TrackingError for an unknown alias."""
    digits = name.removeprefix("v")
    if digits.isdecimal() and len(digits) < 10:
        return int(digits)
    alias = name.removeprefix("@")
    if alias not in aliases:
        fix = f"a number such as v3, or one of: {', '.join(sorted(aliases)) or 'no aliases yet'}"
        raise TrackingError("there is no such version", where=model_name, value=name, fix=fix)
    return aliases[alias]


def _read_evaluations(
    uri: str, versions: Mapping[int, tuple[ModelVersion, Reference | None]], trust: Trust
) -> dict[int, dict[str, MeasuredExport]]:
    """Return version -> digest -> evaluation.

    A version is looked up under its own last digest first, then under those of the others: it may have been evaluated
    on their data as a champion.
    """
    own = {
        number: lineage.find_last_evaluation(uri, version, reference) if reference else ""
        for number, (version, reference) in versions.items()
    }
    return {
        number: {
            digest: evaluation
            for digest in dict.fromkeys([own[number], *own.values()])
            if (evaluation := _find_evaluation(reference, digest, trust)) is not None
        }
        for number, (_, reference) in versions.items()
    }


def _find_evaluation(reference: Reference | None, digest: str, trust: Trust) -> MeasuredExport | None:
    """Return the evaluation under a digest, or None; a damaged or untrusted one spoils only its own version."""
    try:
        return comparison.find_measured_export(reference, digest, trust)
    except (EvaluationError, ConfigError):
        return None


def _choose_common_digest(measured: Mapping[int, Mapping[str, MeasuredExport]], baseline: int) -> str:
    """Return the digest that most versions have, the baseline among them if it has any.

    Of several with as many versions, the newest version's wins; empty if nothing was evaluated.
    """
    newest_first = [measured[number] for number in sorted(measured, reverse=True)]
    counts = Counter(digest for evaluations in newest_first for digest in evaluations)
    usable = [digest for digest in counts if not measured[baseline] or digest in measured[baseline]]
    return max(usable, key=lambda digest: counts[digest], default="")


def _describe_problem(
    reference: Reference | None, evaluation: MeasuredExport | None, common: MeasuredExport | None
) -> str:
    if reference is None:
        return "not registered by kftrain, or its reference is gone"
    if evaluation is None:
        return "no evaluation that can be read"
    return "" if common else "evaluated on other data or with other settings"


def _compute_differences(
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
        name: {
            metric: interval
            for metric, interval in intervals.items()
            if _matches_evaluations(name, metric, interval, ours, theirs)
        }
        for name, intervals in parts.items()
    }


def _matches_evaluations(
    name: str, metric: str, difference: Interval, ours: MeasuredExport, theirs: MeasuredExport
) -> bool:
    """Return True if a slice's difference here equals that of the two evaluations, within `SLICE_TOLERANCE`.

    It may not: here a cluster of groups lies in one slice, while its groups may lie in several.
    """
    slices = [export.evaluation.slices.get(name) for export in (ours, theirs)]
    values = [part.metrics.get(metric) if part else None for part in slices]
    if values[0] is None or values[1] is None:
        return False
    room = SLICE_TOLERANCE * max(abs(values[0]), abs(values[1]), 1e-12)
    return abs(values[0] - values[1] - difference.value) <= room
