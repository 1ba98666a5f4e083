"""`kftrain schedule`: recurring runs as files, compared with what Kubeflow has, and brought about there."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any, TypeVar

import click

from kftrain import config as configuration
from kftrain.cli.options import config_file_option, json_option
from kftrain.cli.submit import connection_options
from kftrain.client.console import echo
from kftrain.client.submit import SubmittedRun, build_submission, submit, upload
from kftrain.config import Config
from kftrain.core import outages
from kftrain.core.progress import to_log
from kftrain.errors import ConfigError, LaunchError
from kftrain.kubeflow.client import Connection
from kftrain.kubeflow.recurring import RecurringPipelines
from kftrain.kubeflow.submission import Submission
from kftrain.run.best_effort import best_effort
from kftrain.run.paths import RunPaths
from kftrain.schedule import cron, overview, spec
from kftrain.schedule.apply import Executor
from kftrain.schedule.plan import Change, Content, Recurring, Wanted, changes_to
from kftrain.schedule.settings import format_instant, parse_instant
from kftrain.schedule.spec import Schedule
from kftrain.schedule.state import History
from kftrain.schedule.turn import Turn
from kftrain.stages import firing, preflight, resolve
from kftrain.tracking.runs import find_git_commit

CHANGED = 1
"""Exit code of `diff` and `list` where something is not as the files say."""

Called = TypeVar("Called", bound=Callable[..., Any])

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

        schedule = _read(path)
        chosen = image or schedule.file.steps_image or STEPS_IMAGE
        echo(cronjob.render(schedule, chosen, datetime.now(timezone.utc), connection["namespace"]), nl=False)
        return
    schedule, pipelines = _opened(path, connection)
    submission = _prepared(schedule.config, schedule, connection["host"])
    history, content = _history(schedule), _ensured(schedule, submission, pipelines)
    left = _executor(pipelines, schedule).converge(lambda: Wanted(content, history.paused() is None), wait_seconds)
    paused = history.paused()
    state = "is as the file says" if paused is None else f"is as the file says, and paused: {paused.line}"
    echo(f"{schedule.name} {state}")
    if left:
        echo(f"to be deleted by the next apply, when its runs have ended: {', '.join(left)}")


@schedule_command.command("diff")
@file_option
@connection_options
def diff_command(path: str, **connection: Any) -> int:
    """Show field by field what apply would change, and change nothing; exit 1 where there is something."""
    schedule, pipelines = _opened(path, connection)
    found = _found_changes(schedule, pipelines, connection["host"], pipelines.list_recurring(schedule.name))
    for change in found:
        echo(str(change))
    if not found:
        echo(f"{schedule.name} is as the file says")
    return CHANGED if found else 0


@schedule_command.command("list")
@click.option("-f", "--file", "paths", metavar="FILE", multiple=True, help="Schedules to compare with; repeatable.")
@connection_options
@json_option
def list_command(paths: tuple[str, ...], as_json: bool, **connection: Any) -> int:
    """List schedules: state, last run, failures, and how they differ from their files; exit 1 where one does."""
    pipelines = _connected(connection)
    schedules = [_read(path) for path in paths]
    listed = pipelines.list_recurring()
    rows = []
    for schedule in schedules:
        own = [each for each in listed if each.content.name == schedule.name]
        drift = [str(change) for change in _found_changes(schedule, pipelines, connection["host"], own)]
        rows.append(overview.row(schedule.name, own, _history(schedule), drift))
    known = {schedule.name for schedule in schedules}
    rows += [row for row in overview.rows_without_file(listed) if row.name not in known]
    if as_json:
        echo(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
    else:
        echo("\n".join(overview.lines(rows)) if rows else "no schedules")
    return CHANGED if any(row.drift for row in rows) else 0


@schedule_command.command("pause")
@file_option
@connection_options
@click.option("--reason", default="by hand", show_default=True, help="What people will read.")
def pause_command(path: str, reason: str, **connection: Any) -> None:
    """Start no more runs, until it is resumed; the one at work goes on."""
    schedule, pipelines = _opened(path, connection)
    changed = _history(schedule).add("paused", reason)
    _executor(pipelines, schedule).disable()
    echo(f"{schedule.name} {'is paused' if changed else 'was paused already'}")


@schedule_command.command("resume")
@file_option
@connection_options
def resume_command(path: str, **connection: Any) -> None:
    """Start runs again; failures of before do not count any more, and nothing is caught up on."""
    schedule, pipelines = _opened(path, connection)
    changed = _history(schedule).add("resumed", "by hand")
    if not _executor(pipelines, schedule).enable():
        echo(f"{schedule.name} is not in Kubeflow: kftrain schedule apply")
        return
    echo(f"{schedule.name} {'goes on' if changed else 'was not paused'}")


@schedule_command.command("run-now")
@file_option
@connection_options
@click.option("--wait", is_flag=True, help="Follow the run; exit 0 only if it succeeds.")
def run_now_command(path: str, wait: bool, **connection: Any) -> None:
    """Start a run now, for the instant at which the schedule was due last; its id and its URL go to stdout."""
    schedule, pipelines = _opened(path, connection)
    submitted = _send(schedule, pipelines, connection["host"], trigger="manual")
    echo(f"{submitted.id}\n{submitted.url}")
    if wait:
        _wait(submitted)


@schedule_command.command("backfill")
@file_option
@connection_options
@click.option("--from", "start", metavar="MOMENT", required=True, help="First instant, e.g. 2026-11-01T00:00:00Z.")
@click.option("--to", "end", metavar="MOMENT", required=True, help="The last instant is before this.")
@click.option("--dry-run", is_flag=True, help="Print the instants, and start nothing.")
def backfill_command(path: str, start: str, end: str, dry_run: bool, **connection: Any) -> None:
    """Run the windows of earlier instants, one after another, and promote nothing; it ends where one fails."""
    schedule = _read(path)
    found = _instants(schedule, parse_instant(start, "--from"), parse_instant(end, "--to"))
    if dry_run:
        echo("\n".join(found))
        return
    pipelines = _connected(connection)
    for number, instant in enumerate(found, 1):
        echo(f"{instant} ({number} of {len(found)})", err=True)
        submitted = _send(schedule, pipelines, connection["host"], trigger="backfill", instant=instant)
        echo(f"{submitted.id} {submitted.url}")
        _wait(submitted)


@schedule_command.command("delete")
@file_option
@connection_options
@wait_option
def delete_command(path: str, wait_seconds: float, **connection: Any) -> None:
    """Take the schedule away from Kubeflow, once no run of it lives; what it has trained stays."""
    schedule, pipelines = _opened(path, connection)
    left = _executor(pipelines, schedule).converge(lambda: None, wait_seconds)
    for identity in left:
        echo(f"{identity} is disabled; delete it again when its runs have ended")
    if not left:
        echo(f"{schedule.name} is gone")


@schedule_command.command("fire")
@config_file_option
@click.option("--job", envvar="KFTRAIN_JOB", required=True, help="Name of the Kubernetes Job that this is a pod of.")
def fire_command(config_file: tuple[str, ...], job: str) -> None:
    """One run of a schedule, here: what a rendered CronJob runs."""
    from kftrain.stages.fire import fire

    config = configuration.load(config_file)
    with outages.retry_for(outages.ANSWERED_SECONDS):
        ended = fire(config, job, to_log)
    echo(ended.to_json(), nl=False)


def _read(path: str) -> Schedule:
    """The schedule in a file. Raises ConfigError, and LaunchError for what cannot run on Kubeflow."""
    schedule = spec.read(path)
    preflight.require_remote(schedule.config)
    return schedule


def _connected(connection: dict[str, Any]) -> RecurringPipelines:
    if not connection["host"]:
        raise click.UsageError("Missing option '--host'.")
    return RecurringPipelines(Connection(**connection))


def _opened(path: str, connection: dict[str, Any]) -> tuple[Schedule, RecurringPipelines]:
    return _read(path), _connected(connection)


def _history(schedule: Schedule) -> History:
    return History.of(schedule.config.run.storage_root, schedule.name)


def _executor(pipelines: RecurringPipelines, schedule: Schedule) -> Executor:
    def progress(line: str) -> None:
        echo(line, err=True)

    turn = Turn.of(schedule.config.run.storage_root, schedule.name, progress)
    return Executor(pipelines, schedule.name, turn, progress)


def _prepared(config: Config, schedule: Schedule, host: str, run_name: str = "") -> Submission:
    file = schedule.file
    return build_submission(config, "", host, file.experiment, run_name, steps_image=file.steps_image or None)


def _ensured(schedule: Schedule, submission: Submission, pipelines: RecurringPipelines) -> Content:
    """What is wanted in Kubeflow; pipeline, version and experiment are there afterwards."""
    pipeline_id, _, uploaded = upload(pipelines, submission)
    if uploaded:
        echo(f"version {submission.version} uploaded", err=True)
    return _content(schedule, submission, pipeline_id, pipelines.ensure_experiment(submission.experiment))


def _content(schedule: Schedule, submission: Submission, pipeline_id: str, experiment_id: str) -> Content:
    file = schedule.file
    every = cron.in_utc(cron.parse(file.cron), cron.zone(file.time_zone), datetime.now(timezone.utc))
    return Content(
        name=schedule.name,
        cron=str(every),
        pipeline_id=pipeline_id,
        experiment_id=experiment_id,
        parameters=dict(submission.parameters),
        service_account=file.service_account,
        description=f"managed by kftrain schedule: {schedule.where}, commit {find_git_commit() or 'unknown'}",
    )


def _found_changes(
    schedule: Schedule, pipelines: RecurringPipelines, host: str, listed: list[Recurring]
) -> list[Change]:
    """How what is there differs from the file, the newest version of the pipeline too."""
    submission = _prepared(schedule.config, schedule, host)
    pipeline_id, experiment_id = pipelines.find_ids(submission.pipeline, submission.experiment)
    content = _content(schedule, submission, pipeline_id, experiment_id)
    found = changes_to(Wanted(content, enabled=_history(schedule).paused() is None), listed)
    newest = pipelines.latest_version(pipeline_id) if pipeline_id else ""
    if newest != submission.version:
        found.append(Change("pipeline version", newest, submission.version))
    return found


def _send(
    schedule: Schedule, pipelines: RecurringPipelines, host: str, trigger: str, instant: str = ""
) -> SubmittedRun:
    """Starts a run of the schedule by hand."""
    section = schedule.config.schedule.model_copy(update={"trigger": trigger, "instant": instant})
    changed: dict[str, Any] = {"schedule": section}
    if trigger == "backfill":
        changed["registry"] = schedule.config.registry.model_copy(update={"promotion": "never"})
    config = schedule.config.model_copy(update=changed)
    resolve.require_run_id(f"{config.run.name}-{'0' * resolve.JOB_ID_CHARACTERS}")
    name = f"{schedule.name}-{instant or trigger + time.strftime('-%Y%m%d-%H%M%S')}"
    return submit(pipelines, _prepared(config, schedule, host, name), config, "")


def _wait(submitted: SubmittedRun) -> None:
    """Follows a run. Raises LaunchError where it failed, or did nothing because another one was at work."""
    line, skipped = submitted.wait(), None
    with best_effort("whether the run had nothing to do is not known"):
        skipped = firing.read_skipped(RunPaths(submitted.run_uri))
    line = f"nothing to do: {skipped.line}" if skipped is not None else line
    if skipped is not None and skipped.why == "overlap":
        raise LaunchError(line, where=submitted.url, fix="start it again when that one has ended")
    echo(line, err=True)


def _instants(schedule: Schedule, start: datetime, end: datetime) -> list[str]:
    file = schedule.file
    found = cron.instants(cron.parse(file.cron), cron.zone(file.time_zone), start, end)
    if not found:
        raise ConfigError("the schedule is never due in this time", where="--from", fix="choose an earlier one")
    return [format_instant(instant) for instant in found]
