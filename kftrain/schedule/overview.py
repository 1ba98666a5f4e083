"""Schedules at a glance: what Kubeflow has, what the storage root remembers, what differs from the files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kftrain.errors import ConfigError
from kftrain.run.paths import RunPaths
from kftrain.schedule.plan import CONFIG, Recurring
from kftrain.schedule.settings import format_time
from kftrain.schedule.state import History
from kftrain.settings import layers


@dataclass(frozen=True)
class ScheduleRow:
    """One schedule."""

    name: str
    state: str
    """`enabled`, `paused`, `disabled` or `missing`."""
    cron: str
    """As Kubeflow has it, in UTC."""
    last: str = ""
    """How the last run has ended, which it was, and when."""
    num_failures: int = 0
    """In a row, up to now."""
    reason: str = ""
    """Why it is paused."""
    drift: list[str] = field(default_factory=list)
    """What is not as its file says."""


def row(name: str, listed: Sequence[Recurring], history: History, drift: list[str]) -> ScheduleRow:
    """A schedule of a file. `listed`: its recurring runs. Raises DataError for a damaged document."""
    paused, last = history.paused(), next(history.outcomes(), None)
    return ScheduleRow(
        name=name,
        state="paused" if paused else _state(listed),
        cron=_cron(listed),
        last=f"{last.result}: {last.line} ({RunPaths(last.run_uri).run_id}, {format_time(last.time)})" if last else "",
        num_failures=history.failures_in_a_row(),
        reason=paused.line if paused else "",
        drift=drift,
    )


def rows_without_file(listed: Iterable[Recurring]) -> list[ScheduleRow]:
    """The schedules among recurring runs whose files were not named: several of a name are one row, and a drift."""
    by_name: dict[str, list[Recurring]] = {}
    for each in listed:
        if _schedule_of(each):
            by_name.setdefault(each.content.name, []).append(each)
    return [
        ScheduleRow(
            name, _state(own), _cron(own), drift=[f"{len(own)} recurring runs of this name"] if len(own) > 1 else []
        )
        for name, own in by_name.items()
    ]


def lines(rows: Sequence[ScheduleRow]) -> list[str]:
    """For people: a line a schedule, and what is to be said of it below."""
    widths = [max(len(each) for each in column) for column in zip(*(_cells(row) for row in rows), strict=True)]
    found = []
    for each in rows:
        cells = [f"{cell:{width}}" for cell, width in zip(_cells(each), widths, strict=True)]
        found.append("  ".join([*cells, each.last]).rstrip())
        found += [f"  paused: {each.reason}"] if each.reason else []
        found += [f"  {each.num_failures} failures in a row"] if each.num_failures > 1 else []
        found += [f"  differs: {line}" for line in each.drift]
    return found


def _cells(row: ScheduleRow) -> list[str]:
    return [row.name, row.state, row.cron or "-"]


def _state(listed: Sequence[Recurring]) -> str:
    return "missing" if not listed else "enabled" if any(each.enabled for each in listed) else "disabled"


def _cron(listed: Sequence[Recurring]) -> str:
    return max(listed, key=lambda each: (each.enabled, each.created)).content.cron if listed else ""


def _schedule_of(each: Recurring) -> str:
    """The schedule that a recurring run says it is of; empty for those of others."""
    try:
        section: Any = layers.parse(str(each.content.parameters.get(CONFIG, "")), CONFIG).get("schedule")
    except ConfigError:
        return ""
    return str(section.get("name", "")) if isinstance(section, dict) else ""
