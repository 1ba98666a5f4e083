"""The list of schedules: what Kubeflow has, what the storage root remembers, what differs from the files."""

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
    """A schedule as one line of the list."""

    name: str
    state: str
    """`enabled`, `paused`, `disabled` or `missing`."""
    cron: str
    """Expression that Kubeflow has, in UTC; empty where it has no recurring run."""
    last: str = ""
    """Result of the last run, its id, and when it ended; empty where none has."""
    num_failures: int = 0
    """Failures in a row, up to now."""
    reason: str = ""
    """The reason why it is paused; empty where it is not."""
    drift: list[str] = field(default_factory=list)
    """Differences from the schedule's file, a line each."""


def row(name: str, listed: Sequence[Recurring], history: History, drift: list[str]) -> ScheduleRow:
    """Build the row of a schedule that has a file. `listed`: its recurring runs. Raises DataError if damaged."""
    paused, last = history.paused(), next(history.outcomes(), None)
    return ScheduleRow(
        name=name,
        state="paused" if paused else _name_state(listed),
        cron=_choose_cron(listed),
        last=f"{last.result}: {last.line} ({RunPaths(last.run_uri).run_id}, {format_time(last.time)})" if last else "",
        num_failures=history.failures_in_a_row(),
        reason=paused.line if paused else "",
        drift=drift,
    )


def rows_without_file(listed: Iterable[Recurring]) -> list[ScheduleRow]:
    """Build rows of schedules among recurring runs whose files were not named; several of a name are a drift."""
    by_name: dict[str, list[Recurring]] = {}
    for recurring in listed:
        if _read_schedule_name(recurring):
            by_name.setdefault(recurring.content.name, []).append(recurring)
    return [
        ScheduleRow(
            name,
            _name_state(own),
            _choose_cron(own),
            drift=[f"{len(own)} recurring runs of this name"] if len(own) > 1 else [],
        )
        for name, own in by_name.items()
    ]


def lines(rows: Sequence[ScheduleRow]) -> list[str]:
    """Write a line for every schedule, and below it what a person needs to know of it."""
    widths = [max(len(cell) for cell in column) for column in zip(*(_list_cells(row) for row in rows), strict=True)]
    text = []
    for row in rows:
        cells = [f"{cell:{width}}" for cell, width in zip(_list_cells(row), widths, strict=True)]
        text.append("  ".join([*cells, row.last]).rstrip())
        text += [f"  paused: {row.reason}"] if row.reason else []
        text += [f"  {row.num_failures} failures in a row"] if row.num_failures > 1 else []
        text += [f"  differs: {line}" for line in row.drift]
    return text


def _list_cells(row: ScheduleRow) -> list[str]:
    return [row.name, row.state, row.cron or "-"]


def _name_state(listed: Sequence[Recurring]) -> str:
    return "missing" if not listed else "enabled" if any(recurring.enabled for recurring in listed) else "disabled"


def _choose_cron(listed: Sequence[Recurring]) -> str:
    return max(listed, key=lambda recurring: (recurring.enabled, recurring.created)).content.cron if listed else ""


def _read_schedule_name(recurring: Recurring) -> str:
    """Read the name of the schedule from a recurring run's configuration; empty for recurring runs of others."""
    try:
        section: Any = layers.parse(str(recurring.content.parameters.get(CONFIG, "")), CONFIG).get("schedule")
    except ConfigError:
        return ""
    return str(section.get("name", "")) if isinstance(section, dict) else ""
