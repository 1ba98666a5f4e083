"""`kftrain status | logs | cancel | suspend | unsuspend | gc`: jobs, wherever they run, from anywhere."""

from __future__ import annotations

import dataclasses
import json
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import click

from kftrain.cli.options import json_option
from kftrain.client.console import echo
from kftrain.config import Config
from kftrain.core import storage
from kftrain.errors import ConfigError, KftrainError
from kftrain.kubeflow.client import ENDPOINT_ENV
from kftrain.run.best_effort import best_effort
from kftrain.run.config import is_opened, read_config
from kftrain.run.job_tasks import JOB_TASKS, TRAINING
from kftrain.run.paths import RunPaths

if TYPE_CHECKING:
    from kftrain.launch.base import Jobs
    from kftrain.launch.kubernetes.client import Cluster

namespace_option = click.option(
    "--namespace", "-n", default="", help="Namespace of the jobs; default: that of the kubeconfig's context."
)


def _one_run(context: click.Context, parameter: click.Parameter, run: str) -> str:
    """The run that is named, by its id or by its folder: a variable that the shell does not know means none."""
    if not run.strip("/"):
        raise ConfigError("this names no run", where="RUN", value=run, fix="kftrain status lists those that have jobs")
    return run


run_argument = click.argument("run", callback=_one_run)


@click.command("status")
@click.argument("run", default="")
@namespace_option
@json_option
def status_command(run: str, namespace: str, as_json: bool) -> None:
    """Show the jobs on the cluster, or those of one RUN: state, reason, progress.

    Of a run's folder that has no job it shows what the files say; kftrain runs lists all runs.
    """
    config = _config_of(run)
    found = _jobs(config, namespace).describe(run)
    if not found and config is not None:
        _show_run(RunPaths(storage.absolute(run)), as_json)
        return
    if as_json:
        echo(json.dumps([dataclasses.asdict(job) for job in found], indent=2))
        return
    for job in found:
        echo(f"{job.job}: {job.state}, {job.workers} workers, {_age(job.age_seconds)} old")
        for line in (job.progress, job.reason):
            if line:
                echo(f"  {line}")
    if not found:
        echo("no jobs")


def _config_of(run: str) -> Config | None:
    """The configuration in a run's folder; None where only an id is given, or where it cannot be read."""
    uri = storage.absolute(run) if "/" in run else ""
    with best_effort("the run's folder cannot be read, so its job is looked for on the cluster"):
        if uri and is_opened(RunPaths(uri)):
            return read_config(RunPaths(uri))
    return None


def _show_run(paths: RunPaths, as_json: bool) -> None:
    from kftrain.cli.runs import table
    from kftrain.stages import runs

    found = [runs.read_run_overview(paths)]
    echo(json.dumps([dataclasses.asdict(run) for run in found], indent=2) if as_json else "\n".join(table(found)))


@click.command("logs")
@run_argument
@click.option("--task", type=click.Choice(list(JOB_TASKS)), default=TRAINING.name, show_default=True)
@click.option("--follow", "-f", is_flag=True, help="Go on until the job has ended.")
@namespace_option
def logs_command(run: str, task: str, follow: bool, namespace: str) -> None:
    """Print what the workers of a RUN print now; complete logs of ended ones lie in the run's folder, under logs/."""
    _jobs(_config_of(run), namespace).logs(run, task, follow, echo)


@click.command("cancel")
@run_argument
@namespace_option
def cancel_command(run: str, namespace: str) -> None:
    """End the jobs of a RUN: workers commit a checkpoint, then every one of them goes."""
    _say("deleted", _jobs(_config_of(run), namespace).cancel(run))


@click.command("suspend")
@run_argument
@namespace_option
def suspend_command(run: str, namespace: str) -> None:
    """Take the pods of a RUN away after a commit; its launcher waits."""
    _say("suspended", _jobs(_config_of(run), namespace).suspend(run))


@click.command("unsuspend")
@run_argument
@namespace_option
def unsuspend_command(run: str, namespace: str) -> None:
    """Let the suspended jobs of a RUN go on."""
    _say("unsuspended", _jobs(_config_of(run), namespace).unsuspend(run))


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
    from kftrain.launch.kubernetes.kinds import all_kinds

    clusters = control.ClusterJobs(all_kinds(), namespace, _warn).clusters
    found = control.collect_garbage(clusters, dry_run)
    for garbage in found:
        echo(f"{'would delete' if dry_run else 'deleted'} {garbage.job}: {garbage.why}")
    if not found:
        echo("nothing to delete")
    if tracking_uri:
        from kftrain.stages import garbage as garbage_stage

        for orphan in garbage_stage.close_orphans(clusters, tracking_uri, dry_run):
            echo(f"{'would end' if dry_run else 'ended'} the MLflow run of {orphan.run_id}: {orphan.why}")
    if storage_root:
        _close_firings(clusters[0], storage_root, dry_run, host)


def _close_firings(cluster: Cluster, storage_root: str, dry_run: bool, host: str) -> None:
    from kftrain.schedule.state import History, names_below
    from kftrain.stages import firing

    for name, run_uri in firing.close_lost(cluster, storage_root, datetime.now(timezone.utc), dry_run, echo):
        echo(f"{'would count' if dry_run else 'counted'} as failed for {name}: {run_uri}")
    names = names_below(storage_root) if host else []
    paused = [name for name in names if History.of(storage_root, name).paused()]
    if paused:
        from kftrain.kubeflow.recurring import disable_all

        try:
            for line in disable_all(host, cluster.namespace, paused, dry_run):
                echo(line)
        except KftrainError as error:  # a paused schedule runs nothing either way: its runs end at once
            _warn(f"what is paused may still be enabled in Kubeflow: {error.line}")


def _jobs(config: Config | None, namespace: str) -> Jobs:
    from kftrain import launch

    return launch.find_jobs(config, namespace, _warn)


def _warn(line: str) -> None:
    echo(f"warning: {line}", err=True)


def _say(done: str, names: list[str]) -> None:
    for name in names:
        echo(f"{done} {name}")


def _age(seconds: float) -> str:
    minutes = int(seconds // 60)
    return f"{minutes // 60}h{minutes % 60:02d}m" if minutes >= 60 else f"{minutes}m{int(seconds % 60):02d}s"
