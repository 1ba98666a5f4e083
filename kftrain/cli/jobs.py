"""`kftrain status | logs | cancel | suspend | resume | gc`: training jobs on the cluster, from anywhere."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import click

from kftrain import storage
from kftrain.cli.options import echo, json_option
from kftrain.errors import ConfigError
from kftrain.run.config import is_opened, read_config
from kftrain.run.paths import RunPaths

if TYPE_CHECKING:
    from kftrain.launch.kubernetes.client import Cluster

namespace_option = click.option(
    "--namespace", "-n", default="", help="Namespace of the jobs; default: that of the kubeconfig's context."
)


def _run_id(run: str) -> str:
    """A run may be named by its id or by the URI of its folder."""
    return run.rstrip("/").rsplit("/", 1)[-1]


def _one_run(context: click.Context, parameter: click.Parameter, run: str) -> str:
    """The id of the run that is named: a variable that the shell does not know must not mean every run."""
    run_id = _run_id(run)
    if not run_id:
        raise ConfigError("this names no run", where="RUN", value=run, fix="kftrain status lists those that have jobs")
    return run_id


run_argument = click.argument("run", callback=_one_run)


@click.command("status")
@click.argument("run", default="")
@namespace_option
@json_option
def status_command(run: str, namespace: str, as_json: bool) -> None:
    """Show the jobs on the cluster, or those of one RUN: state, reason, progress.

    The folder of a run of the local backend shows that run; kftrain runs lists them all.
    """
    if _is_local(run):
        _show_local(RunPaths(storage.absolute(run)), as_json)
        return
    from kftrain.launch.kubernetes import control

    found = control.status(_cluster(namespace), _run_id(run))
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


def _is_local(run: str) -> bool:
    """Whether a run's folder is named whose jobs are processes of a machine."""
    uri = storage.absolute(run) if "/" in run else ""
    return bool(uri) and is_opened(RunPaths(uri)) and read_config(RunPaths(uri)).launch.backend == "local"


def _show_local(paths: RunPaths, as_json: bool) -> None:
    from kftrain.cli.runs import table
    from kftrain.stages import runs

    found = [runs.read(paths)]
    echo(json.dumps([dataclasses.asdict(run) for run in found], indent=2) if as_json else "\n".join(table(found)))


@click.command("logs")
@run_argument
@click.option("--task", type=click.Choice(["train", "evaluate"]), default="train", show_default=True)
@click.option("--follow", "-f", is_flag=True, help="Go on until the job has ended.")
@namespace_option
def logs_command(run: str, task: str, follow: bool, namespace: str) -> None:
    """Print what the workers of a RUN print now; complete logs of ended ones lie in the run's folder, under logs/."""
    from kftrain.launch.kubernetes import control

    control.print_logs(_cluster(namespace), run, task, follow, echo)


@click.command("cancel")
@run_argument
@namespace_option
def cancel_command(run: str, namespace: str) -> None:
    """End the jobs of a RUN: workers commit a checkpoint, then every pod goes."""
    from kftrain.launch.kubernetes import control

    _say("deleted", control.cancel(_cluster(namespace), run))


@click.command("suspend")
@run_argument
@namespace_option
def suspend_command(run: str, namespace: str) -> None:
    """Take the pods of a RUN away after a commit; its launcher waits."""
    from kftrain.launch.kubernetes import control

    _say("suspended", control.suspend(_cluster(namespace), run))


@click.command("resume")
@run_argument
@namespace_option
def resume_command(run: str, namespace: str) -> None:
    """Let the suspended jobs of a RUN go on."""
    from kftrain.launch.kubernetes import control

    _say("resumed", control.resume(_cluster(namespace), run))


@click.command("gc")
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@click.option(
    "--tracking-uri",
    metavar="URI",
    envvar="MLFLOW_TRACKING_URI",
    default="",
    help="End runs of ended pipelines there.",
)
@namespace_option
def gc_command(dry_run: bool, tracking_uri: str, namespace: str) -> None:
    """Delete jobs that nobody will take away, and end MLflow runs that nobody works on.

    The pipeline run of a job has ended, or its launcher is gone. The pipeline run of an MLflow run was deleted.
    """
    from kftrain.launch.kubernetes import control

    cluster = _cluster(namespace)
    found = control.collect_garbage(cluster, dry_run)
    for garbage in found:
        echo(f"{'would delete' if dry_run else 'deleted'} {garbage.job}: {garbage.why}")
    if not found:
        echo("nothing to delete")
    if tracking_uri:
        from kftrain.stages import garbage as garbage_stage

        for orphan in garbage_stage.close_orphans(cluster, tracking_uri, dry_run):
            echo(f"{'would end' if dry_run else 'ended'} the MLflow run of {orphan.run_id}: {orphan.why}")


def _cluster(namespace: str) -> Cluster:
    from kftrain.launch.kubernetes.client import Cluster

    return Cluster(namespace, warn=lambda line: echo(f"warning: {line}", err=True))


def _say(done: str, names: list[str]) -> None:
    for name in names:
        echo(f"{done} {name}")


def _age(seconds: float) -> str:
    minutes = int(seconds // 60)
    return f"{minutes // 60}h{minutes % 60:02d}m" if minutes >= 60 else f"{minutes}m{int(seconds % 60):02d}s"
