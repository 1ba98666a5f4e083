"""What every process of a job runs, forked from the node's agent.

Its exit code is the error's own. The first process of a node that fails writes its error to the file that the
supervisor named, by exclusive creation: those that fail afterwards, because their peer is gone, come too late to hide
the cause.

The agent has imported torch already; where it could not, the import here says why in the process's log.
"""

from __future__ import annotations

import sys

from kftrain.config import Config
from kftrain.core import outages
from kftrain.errors import BUG_CODE, print_traceback
from kftrain.process import output
from kftrain.process.imports import imports_for_good
from kftrain.process.stop_request import StopRequest
from kftrain.run.config import read_job_config
from kftrain.run.paths import RunPaths
from kftrain.worker.error_report import leave


def run(task: str, run_uri: str, digest: str) -> int:
    """Run one process of a job, whose place torchrun's variables tell; return its exit code. Raises nothing."""
    output.redirect()
    try:
        if task == "train":
            _train(RunPaths(run_uri), digest)
        else:
            _evaluate(RunPaths(run_uri), digest)
    except Exception as error:  # noqa: BLE001 - the last line of defence of a process: report, then exit with the right code
        return report(error)
    return 0


def _train(paths: RunPaths, digest: str) -> None:
    with StopRequest().on_sigterm() as stop:
        resolved = _read_job_config(paths, digest)
        with imports_for_good():
            from kftrain.train.session import train

        train(paths, resolved, stop)


def _evaluate(paths: RunPaths, digest: str) -> None:
    """Evaluate the run. There is nothing to commit, so SIGTERM keeps its default and ends the process."""
    resolved = _read_job_config(paths, digest)
    with imports_for_good():
        from kftrain.evaluate.session import evaluate

    evaluate(paths, resolved)


def _read_job_config(paths: RunPaths, digest: str) -> Config:
    """Read the configuration, and limit waits for storage, so that the others do not take this process for hung."""
    resolved = read_job_config(paths, digest)
    outages.limit(resolved.launch.timeout_seconds / 2)
    return resolved


def report(error: Exception) -> int:
    """Write an error for the supervisor and to stderr; return the exit code."""
    known, document = leave(error)
    if known is None:
        print_traceback(error)
    sys.stderr.write(f"kftrain: error: {document.line}\n")
    return known.exit_code if known else BUG_CODE
