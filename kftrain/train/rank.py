"""What every process of a job runs: `python -m kftrain.train.rank`, started by torchrun.

Its exit code is the error's own. The first process of a node that fails writes its error to the file that the
supervisor named, by exclusive creation: those that fail afterwards, because their peer is gone, come too late to hide
the cause.

torch is imported late: what it prints or raises on the way in belongs into the process's log, and a SIGTERM while it
is read is noted.
"""

from __future__ import annotations

import sys
import traceback

import click

from kftrain.contracts import RunPaths
from kftrain.errors import BUG_CODE
from kftrain.launch.completion import load_config
from kftrain.processes import die_with_parent, imports_for_good
from kftrain.train import output
from kftrain.train.failing import leave
from kftrain.train.signals import StopRequest


@click.command()
@click.option("--task", type=click.Choice(["train", "evaluate"]), required=True)
@click.option("--run-uri", required=True)
@click.option("--digest", required=True)
def main(task: str, run_uri: str, digest: str) -> None:
    """One process of a job."""
    die_with_parent()
    output.redirect()
    try:
        if task == "train":
            _train(RunPaths(run_uri), digest)
        else:
            _evaluate(RunPaths(run_uri), digest)
    except Exception as error:  # noqa: BLE001 - the last line of defence of a process: report, then exit with the right code
        sys.exit(report(error))


def _train(paths: RunPaths, digest: str) -> None:
    with StopRequest().on_sigterm() as stop:
        resolved = load_config(paths, digest)
        with imports_for_good():
            from kftrain.train.session import train

        train(paths, resolved, stop)


def _evaluate(paths: RunPaths, digest: str) -> None:
    """Has nothing to commit, so SIGTERM simply ends it."""
    resolved = load_config(paths, digest)
    with imports_for_good():
        from kftrain.evaluate.session import evaluate

    evaluate(paths, resolved)


def report(error: Exception) -> int:
    """Writes the error for the supervisor and to stderr; returns the exit code."""
    known, document = leave(error)
    if known is None:
        traceback.print_exception(error, file=sys.stderr)
    sys.stderr.write(f"kftrain: error: {document['line']}\n")
    return known.exit_code if known else BUG_CODE


if __name__ == "__main__":
    main()
