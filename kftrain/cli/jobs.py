"""`kftrain status | logs | cancel | suspend | unsuspend | scale | gc | runs`: jobs at work, and where runs lie."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import click

from kftrain import config as configuration
from kftrain.cli.options import config_options, json_option
from kftrain.client.console import echo
from kftrain.config import Config
from kftrain.core import storage
from kftrain.core.credentials import redact
from kftrain.errors import ConfigError, KftrainError
from kftrain.kubeflow.client import ENDPOINT_ENV
from kftrain.run.best_effort import best_effort
from kftrain.run.config import is_opened, read_config
from kftrain.run.job_tasks import JOB_TASKS, TRAINING
from kftrain.run.paths import RunPaths

if TYPE_CHECKING:
    from kftrain.launch.base import Jobs
    from kftrain.launch.kubernetes.client import Cluster
    from kftrain.stages.runs import RunOverview

namespace_option = click.option(
    "--namespace", "-n", default="", help="Namespace of the jobs; default: that of the kubeconfig's context."
)


def _require_run(context: click.Context, parameter: click.Parameter, run: str) -> str:
    """Return the run, an id or a folder. Raises ConfigError for none: the shell may not know a variable."""
    if not run.strip("/"):
        raise ConfigError("this names no run", where="RUN", value=run, fix="kftrain status lists those that have jobs")
    return run


run_argument = click.argument("run", callback=_require_run)


@click.command("status")
@click.argument("run", default="")
@namespace_option
@json_option
def status_command(run: str, namespace: str, as_json: bool) -> None:
    """Show the jobs on the cluster, or those of one RUN: state, reason, progress.

    Of a run's folder that has no job it shows what the files say; kftrain runs lists all runs.
    """
    config = _read_config(run)
    jobs = _find_jobs(config, namespace).describe(run)
    if not jobs and config is not None:
        from kftrain.stages import runs

        overviews = [runs.read_run_overview(RunPaths(storage.absolute(run)))]
        echo(_to_json(overviews) if as_json else "\n".join(write_table(overviews)))
        return
    if as_json:
        echo(_to_json(jobs))
        return
    for job in jobs:
        echo(f"{job.job}: {job.state}, {job.workers} workers, {_format_age(job.age_seconds)} old")
        for line in (job.progress, job.reason):
            if line:
                echo(f"  {line}")
    if not jobs:
        echo("no jobs")


def _read_config(run: str) -> Config | None:
    """Read the configuration in a run's folder; None where only an id is given, or where it cannot be read."""
    uri = storage.absolute(run) if "/" in run else ""
    with best_effort("the run's folder cannot be read, so its job is looked for on the cluster"):
        if uri and is_opened(RunPaths(uri)):
            return read_config(RunPaths(uri))
    return None


def _to_json(rows: Sequence[Any]) -> str:
    """Write dataclasses as a list of JSON objects."""
    return json.dumps([dataclasses.asdict(row) for row in rows], indent=2)


@click.command("logs")
@run_argument
@click.option("--task", type=click.Choice(list(JOB_TASKS)), default=TRAINING.name, show_default=True)
@click.option("--follow", "-f", is_flag=True, help="Go on until the job has ended.")
@namespace_option
def logs_command(run: str, task: str, follow: bool, namespace: str) -> None:
    """Print what the workers of a RUN print now; complete logs of ended ones lie in the run's folder, under logs/."""
    _find_jobs(_read_config(run), namespace).logs(run, task, follow, echo)


@click.command("cancel")
@run_argument
@namespace_option
def cancel_command(run: str, namespace: str) -> None:
    """End the jobs of a RUN: workers commit a checkpoint, then every one of them goes."""
    _echo_names("deleted", _find_jobs(_read_config(run), namespace).cancel(run))


@click.command("suspend")
@run_argument
@namespace_option
def suspend_command(run: str, namespace: str) -> None:
    """Take the pods of a RUN away after a commit; its launcher waits."""
    _echo_names("suspended", _find_jobs(_read_config(run), namespace).suspend(run))


@click.command("unsuspend")
@run_argument
@namespace_option
def unsuspend_command(run: str, namespace: str) -> None:
    """Let the suspended jobs of a RUN go on."""
    _echo_names("unsuspended", _find_jobs(_read_config(run), namespace).unsuspend(run))


@click.command("scale")
@run_argument
@click.option("--servers", type=click.IntRange(min=1), required=True, help="Servers from now on.")
def scale_command(run: str, servers: int) -> None:
    """Have a RUN at work, a folder, go on with more or fewer parameter servers; its output says when it does."""
    from kftrain.launch.servers import change_servers

    paths = RunPaths(storage.absolute(run))
    config = read_config(paths)
    change_servers(_find_jobs(config, ""), paths, config, servers)
    echo(f"asked for {servers} servers")


@click.command("gc")
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@click.option(
    "--tracking-uri",
    metavar="URI",
    envvar="MLFLOW_TRACKING_URI",
    default="",
    help="End runs of ended pipelines there.",
)
@click.option(
    "--storage-root",
    metavar="URI",
    envvar="KFTRAIN_STORAGE_ROOT",
    default="",
    help="End runs of schedules there that nobody works on: each counts as a failure.",
)
@click.option(
    "--host", metavar="URL", envvar=ENDPOINT_ENV, default="", help="Disable there what is paused in the storage root."
)
@namespace_option
def gc_command(dry_run: bool, tracking_uri: str, storage_root: str, host: str, namespace: str) -> None:
    """Delete jobs that nobody will take away, and end MLflow runs and firings of schedules that nobody works on.

    The pipeline run of a job has ended, or its launcher is gone. The pipeline run of an MLflow run was deleted.
    """
    from kftrain.launch.kubernetes import control
    from kftrain.launch.kubernetes.kinds import load_kinds

    clusters = control.ClusterJobs(load_kinds(), namespace, _warn).clusters
    garbage = control.collect_garbage(clusters, dry_run)
    for item in garbage:
        echo(f"{'would delete' if dry_run else 'deleted'} {item.job}: {item.why}")
    if not garbage:
        echo("nothing to delete")
    if tracking_uri:
        from kftrain.stages.garbage import close_orphans

        for orphan in close_orphans(clusters, tracking_uri, dry_run):
            echo(f"{'would end' if dry_run else 'ended'} the MLflow run of {orphan.run_id}: {orphan.why}")
    if storage_root:
        _close_firings(clusters[0], storage_root, dry_run, host)


def _close_firings(cluster: Cluster, storage_root: str, dry_run: bool, host: str) -> None:
    from kftrain.schedule.state import History, list_schedules
    from kftrain.stages import firing

    for name, run_uri in firing.close_lost(cluster, storage_root, datetime.now(timezone.utc), dry_run, echo):
        echo(f"{'would count' if dry_run else 'counted'} as failed for {name}: {run_uri}")
    names = list_schedules(storage_root) if host else []
    paused = [name for name in names if History.of(storage_root, name).read_pause()]
    if paused:
        from kftrain.kubeflow.client import disable_all

        try:
            for line in disable_all(host, cluster.namespace, paused, dry_run):
                echo(line)
        except KftrainError as error:  # a paused schedule runs nothing either way: its runs end at once
            _warn(f"what is paused may still be enabled in Kubeflow: {error.line}")


def _find_jobs(config: Config | None, namespace: str) -> Jobs:
    from kftrain import launch

    return launch.find_jobs(config, namespace, _warn)


def _warn(line: str) -> None:
    echo(f"warning: {line}", err=True)


def _echo_names(done: str, names: list[str]) -> None:
    for name in names:
        echo(f"{done} {name}")


def _format_age(seconds: float) -> str:
    minutes = int(seconds // 60)
    return f"{minutes // 60}h{minutes % 60:02d}m" if minutes >= 60 else f"{minutes}m{int(seconds % 60):02d}s"


MAX_REASON_CHARACTERS = 100
HEADINGS = ("run", "started", "state", "step", "metric", "version")


@click.command("runs")
@click.argument("storage_root", default="")
@config_options
@click.option(
    "--mlflow", "from_mlflow", is_flag=True, help="Ask MLflow at tracking.uri, for runs of every storage root."
)
@click.option("--schedule", metavar="NAME", default="", help="Those of this schedule only.")
@json_option
def runs_command(
    storage_root: str,
    config_file: tuple[str, ...],
    overrides: tuple[str, ...],
    from_mlflow: bool,
    schedule: str,
    as_json: bool,
) -> None:
    """List the runs below STORAGE_ROOT by their start: state, step, the gate's metric, and which is champion.

    Without it, below run.storage_root of --config, by default the current folder. They are read from the files of the
    runs. With --mlflow they are those of every experiment at tracking.uri (--config, or --set tracking.uri=URI): state
    and champion are as MLflow shows them, the step is the last one recorded.
    """
    from kftrain.stages import resolve, runs

    if from_mlflow and storage_root:
        raise click.UsageError("MLflow lists the runs of every storage root: leave STORAGE_ROOT out, or --mlflow")
    config = resolve.anchor_paths(configuration.load(config_file, overrides), ".")
    root = storage.absolute(storage_root) if storage_root else config.run.storage_root
    known = runs.list_runs_of_mlflow(config.tracking.uri) if from_mlflow else runs.list_runs(root)
    listed = sorted((run for run in known if schedule in ("", run.schedule)), key=lambda run: (run.started, run.run_id))
    if as_json:
        echo(_to_json(listed))
    elif listed:
        echo("\n".join(write_table(listed)))
    else:
        echo(f"no runs in {redact(config.tracking.uri) if from_mlflow else storage.join(root, 'runs')}")


def write_table(overviews: list[RunOverview]) -> list[str]:
    """Write a line for each run below a line of headings, with the reason of a failure or of a step after it."""
    from kftrain.reports import wording

    rows = [HEADINGS, *(_list_cells(run) for run in overviews)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    texts = [wording.clean(run.reason or run.chosen) for run in overviews]
    reasons = ["", *(wording.cut_text(text, MAX_REASON_CHARACTERS) for text in texts)]
    return [part for line, reason in zip(lines, reasons, strict=True) for part in (line, f"  {reason}") if part.strip()]


def _list_cells(run: RunOverview) -> tuple[str, ...]:
    from kftrain.reports import wording

    metric = f"{run.metric} {wording.format_number(run.value)}" if run.metric else ""
    version = "" if run.version is None else f"{run.model_name} {run.version}"
    return (
        run.run_id,
        run.started,
        run.state,
        f"{run.step}/{run.num_steps}" if run.num_steps else "",
        metric,
        f"{version}, champion" if run.is_champion else version,
    )
