"""`kftrain schedule`: recurring runs as files, compared with what Kubeflow has, and brought about there."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import click

from kftrain import config as configuration
from kftrain.cli.options import config_file_option, json_option
from kftrain.cli.submit import connection_options
from kftrain.client.console import echo
from kftrain.client.managed_schedule import ManagedSchedule, follow_scheduled
from kftrain.core import outages
from kftrain.core.progress import to_log
from kftrain.errors import ConfigError
from kftrain.kubeflow.client import Connection, Pipelines
from kftrain.run.paths import RunPaths
from kftrain.schedule import cron, spec
from kftrain.schedule.plan import CONFIG, Recurring
from kftrain.schedule.settings import format_instant, format_time, parse_instant
from kftrain.schedule.spec import Schedule
from kftrain.schedule.state import History
from kftrain.settings import layers
from kftrain.stages import preflight

CHANGED = 1
"""Exit code of `diff` and `list` for a schedule that is not as its file says."""


file_option = click.option(
    "-f", "--file", "path", metavar="FILE", required=True, help="The schedule, as schedule.yaml says it."
)
wait_option = click.option(
    "--wait-seconds",
    type=click.FloatRange(min=0),
    default=0.0,
    help="How long to wait for runs of an old one to end, so that it can go; default: the next call deletes it.",
)


@click.group("schedule")
def schedule_command() -> None:
    """Recurring runs as files: apply, compare, pause, run now."""


@schedule_command.command("apply")
@file_option
@connection_options
@wait_option
@click.option("--render", type=click.Choice(["cronjob"]), help="Print it as a CronJob of Kubernetes, and ask nobody.")
@click.option("--image", default="", help="Of a CronJob: the image of the steps; default: the one of this version.")
def apply_command(path: str, wait_seconds: float, render: str | None, image: str, **connection: Any) -> None:
    """Make Kubeflow's recurring run what FILE says; nothing happens where it is that already.

    A change is a new one: it is created disabled, the old one is disabled, the new one enabled, and the old one deleted
    once no run of it lives.
    """
    if render:
        from kftrain.components.images import STEPS_IMAGE
        from kftrain.schedule import cronjob

        schedule = _read_schedule(path)
        chosen = image or schedule.file.steps_image or STEPS_IMAGE
        echo(cronjob.render(schedule, chosen, datetime.now(timezone.utc), connection["namespace"]), nl=False)
        return
    managed = _manage(path, connection)
    left, paused = managed.apply(wait_seconds), managed.history.read_pause()
    echo(f"{managed.name} is as the file says" + ("" if paused is None else f", and paused: {paused.line}"))
    if left:
        echo(f"to be deleted by the next apply, when its runs have ended: {', '.join(left)}")


@schedule_command.command("diff")
@file_option
@connection_options
def diff_command(path: str, **connection: Any) -> int:
    """Show field by field what apply would change, and change nothing; exit 1 where there is something."""
    managed = _manage(path, connection)
    changes = managed.compare(managed.pipelines.list_recurring(managed.name))
    echo("\n".join(map(str, changes)) or f"{managed.name} is as the file says")
    return CHANGED if changes else 0


@schedule_command.command("list")
@click.option("-f", "--file", "paths", metavar="FILE", multiple=True, help="Schedules to compare with; repeatable.")
@connection_options
@json_option
def list_command(paths: tuple[str, ...], as_json: bool, **connection: Any) -> int:
    """List schedules: state, last run, failures, and how they differ from their files; exit 1 where one does."""
    pipelines = _connect(connection)
    schedules = [ManagedSchedule(_read_schedule(path), pipelines) for path in paths]
    listed = pipelines.list_recurring()
    rows = []
    for managed in schedules:
        own = [recurring for recurring in listed if recurring.content.name == managed.name]
        drift = [str(change) for change in managed.compare(own)]
        rows.append(build_row(managed.name, own, managed.history, drift))
    known = {managed.name for managed in schedules}
    rows += [row for row in build_rows_without_file(listed) if row.name not in known]
    if as_json:
        echo(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
    else:
        echo("\n".join(write_rows(rows)) if rows else "no schedules")
    return CHANGED if any(row.drift for row in rows) else 0


@schedule_command.command("pause")
@file_option
@connection_options
@click.option("--reason", default="by hand", show_default=True, help="What people will read.")
def pause_command(path: str, reason: str, **connection: Any) -> None:
    """Start no more runs, until it is resumed; the one at work goes on."""
    managed = _manage(path, connection)
    changed = managed.history.add_event("paused", reason)
    managed.executor.disable()
    echo(f"{managed.name} {'is paused' if changed else 'was paused already'}")


@schedule_command.command("resume")
@file_option
@connection_options
def resume_command(path: str, **connection: Any) -> None:
    """Start runs again; failures of before do not count any more, and nothing is caught up on."""
    managed = _manage(path, connection)
    changed = managed.history.add_event("resumed", "by hand")
    if managed.executor.enable():
        echo(f"{managed.name} {'goes on' if changed else 'was not paused'}")
    else:
        echo(f"{managed.name} is not in Kubeflow: kftrain schedule apply")


@schedule_command.command("run-now")
@file_option
@connection_options
@click.option("--wait", is_flag=True, help="Follow the run; exit 0 only if it succeeds.")
def run_now_command(path: str, wait: bool, **connection: Any) -> None:
    """Start a run now, for the instant at which the schedule was due last; its id and its URL go to stdout."""
    managed = _manage(path, connection)
    submitted = managed.start_run("manual")
    echo(f"{submitted.id}\n{submitted.url}")
    if wait:
        echo(follow_scheduled(submitted), err=True)


@schedule_command.command("backfill")
@file_option
@connection_options
@click.option("--from", "start", metavar="MOMENT", required=True, help="First instant, e.g. 2026-11-01T00:00:00Z.")
@click.option("--to", "end", metavar="MOMENT", required=True, help="The last instant is before this.")
@click.option("--dry-run", is_flag=True, help="Print the instants, and start nothing.")
def backfill_command(path: str, start: str, end: str, dry_run: bool, **connection: Any) -> None:
    """Run the windows of earlier instants, one after another, and promote nothing; it ends where one fails."""
    schedule = _read_schedule(path)
    expression, zone = cron.parse_cron(schedule.file.cron), cron.load_zone(schedule.file.time_zone)
    due = cron.list_instants(expression, zone, parse_instant(start, "--from"), parse_instant(end, "--to"))
    if not due:
        raise ConfigError("the schedule is never due in this time", where="--from", fix="choose an earlier one")
    instants = [format_instant(instant) for instant in due]
    if dry_run:
        echo("\n".join(instants))
        return
    managed = ManagedSchedule(schedule, _connect(connection))
    for number, instant in enumerate(instants, 1):
        echo(f"{instant} ({number} of {len(instants)})", err=True)
        submitted = managed.start_run("backfill", instant)
        echo(f"{submitted.id} {submitted.url}")
        echo(follow_scheduled(submitted), err=True)


@schedule_command.command("delete")
@file_option
@connection_options
@wait_option
def delete_command(path: str, wait_seconds: float, **connection: Any) -> None:
    """Take the schedule away from Kubeflow, once no run of it lives; what it has trained stays."""
    managed = _manage(path, connection)
    left = managed.executor.converge(lambda: None, wait_seconds)
    for identity in left:
        echo(f"{identity} is disabled; delete it again when its runs have ended")
    if not left:
        echo(f"{managed.name} is gone")


@schedule_command.command("fire")
@config_file_option
@click.option("--job", envvar="KFTRAIN_JOB", required=True, help="Name of the Kubernetes Job that this is a pod of.")
def fire_command(config_file: tuple[str, ...], job: str) -> None:
    """One run of a schedule, here: what a rendered CronJob runs."""
    from kftrain.stages.fire import fire

    config = configuration.load(config_file)
    with outages.retry_for(outages.ANSWERED_SECONDS):
        outcome = fire(config, job, to_log)
    echo(outcome.to_json(), nl=False)


def _read_schedule(path: str) -> Schedule:
    """Read the schedule in a file. Raises ConfigError, and LaunchError for what cannot run on Kubeflow."""
    schedule = spec.read_schedule(path)
    preflight.require_remote(schedule.config)
    return schedule


def _manage(path: str, connection: dict[str, Any]) -> ManagedSchedule:
    return ManagedSchedule(_read_schedule(path), _connect(connection))


def _connect(connection: dict[str, Any]) -> Pipelines:
    if not connection["host"]:
        raise click.UsageError("Missing option '--host'.")
    return Pipelines(Connection(**connection))


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


def build_row(name: str, listed: Sequence[Recurring], history: History, drift: list[str]) -> ScheduleRow:
    """Build the row of a schedule that has a file. `listed`: its recurring runs. Raises DataError if damaged."""
    paused, last = history.read_pause(), next(history.iterate_ends(), None)
    return ScheduleRow(
        name=name,
        state="paused" if paused else _name_state(listed),
        cron=_choose_cron(listed),
        last=f"{last.result}: {last.line} ({RunPaths(last.run_uri).run_id}, {format_time(last.time)})" if last else "",
        num_failures=history.count_failures_in_a_row(),
        reason=paused.line if paused else "",
        drift=drift,
    )


def build_rows_without_file(listed: Iterable[Recurring]) -> list[ScheduleRow]:
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


def write_rows(rows: Sequence[ScheduleRow]) -> list[str]:
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
        section: Any = layers.parse_layer(str(recurring.content.parameters.get(CONFIG, "")), CONFIG).get("schedule")
    except ConfigError:
        return ""
    return str(section.get("name", "")) if isinstance(section, dict) else ""
