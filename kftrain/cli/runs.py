"""`kftrain runs`: what there is below a storage root, or in MLflow."""

from __future__ import annotations

import dataclasses
import json

import click

from kftrain import config as configuration
from kftrain.cli.options import config_options, json_option
from kftrain.client.console import echo
from kftrain.core import storage
from kftrain.core.credentials import redact
from kftrain.report import wording
from kftrain.stages import resolve, runs
from kftrain.stages.runs import RunOverview

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
    if from_mlflow and storage_root:
        raise click.UsageError("MLflow lists the runs of every storage root: leave STORAGE_ROOT out, or --mlflow")
    config = resolve.anchor_paths(configuration.load(config_file, overrides), ".")
    root = storage.absolute(storage_root) if storage_root else config.run.storage_root
    known = runs.list_runs_of_mlflow(config.tracking.uri) if from_mlflow else runs.list_runs(root)
    found = sorted((run for run in known if schedule in ("", run.schedule)), key=lambda run: (run.started, run.run_id))
    if as_json:
        echo(json.dumps([dataclasses.asdict(run) for run in found], indent=2))
    elif found:
        echo("\n".join(table(found)))
    else:
        echo(f"no runs in {redact(config.tracking.uri) if from_mlflow else storage.join(root, 'runs')}")


def table(found: list[RunOverview]) -> list[str]:
    """A line for each run below a line of headings, with the reason of a failure or of a step after it."""
    rows = [HEADINGS, *(_cells(run) for run in found)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    reasons = ["", *(wording.cut_text(wording.clean(run.reason or run.chosen), MAX_REASON_CHARACTERS) for run in found)]
    return [part for line, reason in zip(lines, reasons, strict=True) for part in (line, f"  {reason}") if part.strip()]


def _cells(run: RunOverview) -> tuple[str, ...]:
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
