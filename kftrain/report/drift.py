"""The part of a data report that compares the dataset with the one before."""

from __future__ import annotations

from kftrain.report import wording
from kftrain.report.content import Table
from kftrain.run.drift import Drift, DriftedDistribution

NAMES = {"none": "\u2013", "some": "some", "large": "large"}


def sentences(drift: Drift) -> list[str]:
    """What has changed, in words."""
    thresholds = f"from a population stability index of {drift.some:g} (some) or "
    thresholds += f"{drift.large:g} (large) on, where it is more than chance alone would give"
    if not drift.drifted:
        count = len(drift.distributions)
        return [f"No drift against the dataset before: none of {count} distributions changed {thresholds}."]
    named = ", ".join(f"{wording.clean(each.name)} ({each.level})" for each in drift.drifted)
    return [f"Drift against the dataset before: {named}. A change counts {thresholds}."]


def tables(drift: Drift) -> list[Table]:
    """Sizes, measures of each distribution, and where those that have changed differ."""
    return [_sizes(drift), *_measures(drift), *(_shifts(each) for each in drift.drifted)]


def _sizes(drift: Drift) -> Table:
    before, now = drift.before, drift.now
    rows = [
        _size("training records", before.num_records, now.num_records, wording.count),
        _size("training samples", before.num_samples, now.num_samples, wording.count),
        _size("content", before.content_bytes, now.content_bytes, wording.size),
    ]
    return Table("Size against the dataset before", ["", "before", "now", "change"], rows)


def _size(name: str, before: int, now: int, shown: object) -> list[str]:
    assert callable(shown)
    change = f"{wording.fixed(100 * (now - before) / before, 1, signed=True)} %" if before else ""
    return [name, shown(before), shown(now), change]


def _measures(drift: Drift) -> list[Table]:
    rows = [
        [
            wording.clean(each.name),
            wording.fixed(each.psi, 3),
            wording.fixed(each.chance_psi, 3),
            wording.fixed(each.js_distance, 3),
            _figures(each.before),
            _figures(each.now),
            NAMES[each.level],
        ]
        for each in drift.distributions
    ]
    columns = ["distribution", "PSI", "by chance below", "JS distance", "before: mean (deviation)", "now", "drift"]
    return [Table("Drift", columns, rows)] if rows else []


def _figures(found: tuple[float, float] | None) -> str:
    return "" if found is None else f"{wording.number(found[0])} ({wording.number(found[1])})"


def _shifts(each: DriftedDistribution) -> Table:
    rows = [
        [
            wording.clean(shift.bin),
            f"{wording.fixed(100 * shift.before, 2)} %",
            f"{wording.fixed(100 * shift.now, 2)} %",
        ]
        for shift in each.shifts
    ]
    return Table(f"Largest changes in {wording.clean(each.name)}", ["value", "before", "now"], rows)
