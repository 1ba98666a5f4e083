"""The program of each of a job's processes, forked from the node's agent.

Its exit code is the error's own. The first process of a node that fails writes its error to the file that the
supervisor named, by exclusive creation: those that fail afterwards, because their peer is gone, come too late to hide
the cause.

The agent has imported torch already; where it could not, the import here says why in the process's log.
"""

from __future__ import annotations

import contextlib
import gc
import pkgutil
import sys
from collections.abc import Iterator
from typing import Any

from kftrain.core import outages
from kftrain.errors import BUG_CODE, print_traceback
from kftrain.process import output
from kftrain.process.stop_request import StopRequest
from kftrain.run.config import read_job_config
from kftrain.run.job_tasks import JOB_TASKS, JobTask
from kftrain.run.paths import RunPaths
from kftrain.worker.error_report import leave_error


def run_rank(task: str, run_uri: str, digest: str) -> int:
    """Run one process of a job, whose place torchrun's variables tell; return its exit code. Raises nothing."""
    output.redirect_output()
    try:
        _run_task(JOB_TASKS[task], RunPaths(run_uri), digest)
    except Exception as error:  # noqa: BLE001 - the last line of defence of a process: report, then exit with the right code
        return report_error(error)
    return 0


def import_function(task: JobTask) -> Any:
    """Import the function that ranks of a task run: most of the time that they need to start."""
    with freeze_imports():
        return pkgutil.resolve_name(task.rank_function)


def _run_task(task: JobTask, paths: RunPaths, digest: str) -> None:
    """Run this rank's part of a task. Where it has nothing to commit, SIGTERM keeps its default and ends the process.

    A SIGTERM is answered before anything is read or imported: none must end a rank whose peers go on to commit.
    """
    with contextlib.ExitStack() as stack:
        stop = [stack.enter_context(StopRequest().note_sigterm())] if task.commits else []
        config = read_job_config(paths, digest)
        outages.limit(config.launch.timeout_seconds / 2)  # longer, and the others would take this process for hung
        import_function(task)(paths, config, *stop)


def report_error(error: Exception) -> int:
    """Write an error for the supervisor and to stderr; return the exit code."""
    known, document = leave_error(error)
    if known is None:
        print_traceback(error)
    sys.stderr.write(f"kftrain: error: {document.line}\n")
    return known.exit_code if known else BUG_CODE


@contextlib.contextmanager
def freeze_imports() -> Iterator[None]:
    """Import within the block what is never searched for garbage, neither now nor at the end of the process.

    torch is a million objects: that takes a second of a core, on every rank.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # before the collector may run again: else it searches all of it once
        gc.enable()
