"""Keeps the reason of a stage that fails, because Kubeflow does not.

Kubeflow shows neither the exception nor the exit code of a failed step, and loses its artifacts. So the reason goes to
`error.json` in the run's folder (for `kftrain run` and for the exit handler), to the termination message of the pod
(which ends up in the Workflow), to the log, and to the MLflow run.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from types import TracebackType

from kftrain import errors
from kftrain.config import Config
from kftrain.core import storage
from kftrain.core.progress import ERROR_LINE, Progress
from kftrain.errors import FencedError, KftrainError
from kftrain.process import channel, stage_lifetime
from kftrain.process.termination import leave_message
from kftrain.run.best_effort import REPORT_SECONDS, best_effort
from kftrain.run.error import read_error, summarize_failure
from kftrain.run.heartbeat import Heartbeat
from kftrain.run.paths import RunPaths
from kftrain.tracking import mlflow_run
from kftrain.trust import permit

KFP_RUNTIME_ENV = "_KFP_RUNTIME"
"""Environment variable that is set where kfp's executor calls a component."""


@contextlib.contextmanager
def report_failure(stage: str, paths: RunPaths, config: Config, progress: Progress) -> Iterator[None]:
    """Run a stage of a run: remove an older error.json; on a failure write a new one and raise the error again.

    Storage that is away by then hides no failure. The code that the run's own configuration names may be imported.
    """
    permit(config)
    with _tell_failure(stage, progress), keep_heartbeat(paths, config):
        storage.remove(paths.error)
        storage.remove(paths.failure)
        try:
            with stage_lifetime.raise_on_signals(), storage.explain_disk_errors(paths.uri):
                yield
        except FencedError:  # the run is another's: what it says and what MLflow shows of it is not ours
            raise
        except BaseException as error:  # what ends the process, too: without error.json nobody would know why
            cause = None
            with best_effort("what the launcher found out could not be read"):
                cause = read_error(paths.failure)
            document = summarize_failure(stage, error).with_findings(cause)
            # error.json before MLflow: the exit handler and `kftrain run` need it, and MLflow may take long to fail.
            with best_effort("error.json could not be written", REPORT_SECONDS):
                storage.publish_json(paths.error, document.to_dict())
            mlflow_run.mark_failed(paths, config, error, document, progress)
            raise


def keep_heartbeat(paths: RunPaths, config: Config) -> contextlib.AbstractContextManager[object]:
    """Return a heartbeat for a scheduled run: without a Workflow and without a sign it would be taken for dead."""
    return Heartbeat(paths) if config.schedule.name else contextlib.nullcontext()


@contextlib.contextmanager
def announce_failure(stage: str, progress: Progress) -> Iterator[None]:
    """Run code that needs no run's folder; a failure or a signal reaches the log and the pod's termination message."""
    with _tell_failure(stage, progress), stage_lifetime.raise_on_signals(), storage.explain_disk_errors(""):
        yield


@contextlib.contextmanager
def _tell_failure(stage: str, progress: Progress) -> Iterator[None]:
    """Tell a failure of the block to the pod's termination message and to the parent process, or else to the log."""
    stage_lifetime.end_with_parent()
    try:
        yield
    except BaseException as error:  # what ends the process, too: kfp keeps no exception
        document = summarize_failure(stage, error)
        leave_message(document.line, document.exit_code, document.kind)
        if not channel.tell(channel.ERROR, document.to_dict()):
            progress(ERROR_LINE + json.dumps(document.to_dict()))
        if os.environ.get(KFP_RUNTIME_ENV):
            sys.excepthook = _show_in_one_line
        raise


def _show_in_one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an expected failure as one line when kfp's executor ends (`sys.excepthook`); a bug keeps its traceback."""
    if isinstance(error, KftrainError):
        sys.stderr.write(f"kftrain: error: {error.line}\n")
    else:
        errors.print_traceback(error)
