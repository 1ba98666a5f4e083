"""A stage that fails leaves its reason behind, because Kubeflow does not keep it.

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

from kftrain import errors, storage
from kftrain.config import Config
from kftrain.errors import FencedError, KftrainError
from kftrain.process import channel, stage_lifetime
from kftrain.process.termination import leave_message
from kftrain.progress import ERROR_LINE, Progress
from kftrain.run.best_effort import REPORT_SECONDS, best_effort
from kftrain.run.error import of_stage, read_error
from kftrain.run.heartbeat import Heartbeat
from kftrain.run.paths import RunPaths
from kftrain.stages import tracked
from kftrain.trust import permit

KFP_RUNTIME_ENV = "_KFP_RUNTIME"
"""Set where kfp's executor calls a component."""


@contextlib.contextmanager
def reported(stage: str, paths: RunPaths, config: Config, progress: Progress) -> Iterator[None]:
    """Runs a stage of a run: an older error.json goes, a failure writes a new one and is raised again.

    That storage is away by then hides no failure. The code that the run's own configuration names may be imported.
    """
    permit(config)
    with _announced(stage, progress), seen_alive(paths, config):
        storage.remove(paths.error)
        storage.remove(paths.failure)
        try:
            with stage_lifetime.signals_as_errors(), storage.telling_of_disks(paths.uri):
                yield
        except FencedError:  # the run is another's: what it says and what MLflow shows of it is not ours
            raise
        except BaseException as error:  # what ends the process, too: without error.json nobody would know why
            found = None
            with best_effort("what the launcher found out could not be read"):
                found = read_error(paths.failure)
            document = of_stage(stage, error).found_out(found)
            with best_effort("error.json could not be written", REPORT_SECONDS):
                storage.publish_json(paths.error, document.to_dict())
            tracked.mark_failed(paths, config, error, document, progress)
            raise


def seen_alive(paths: RunPaths, config: Config) -> contextlib.AbstractContextManager[object]:
    """A scheduled run that no Workflow speaks for is taken for dead where it gives no sign for long."""
    return Heartbeat(paths) if config.schedule.name else contextlib.nullcontext()


@contextlib.contextmanager
def announced(stage: str, progress: Progress) -> Iterator[None]:
    """Runs what needs no run's folder: a failure, a signal too, reaches the log and the pod's termination message."""
    with _announced(stage, progress), stage_lifetime.signals_as_errors(), storage.telling_of_disks(""):
        yield


@contextlib.contextmanager
def _announced(stage: str, progress: Progress) -> Iterator[None]:
    stage_lifetime.end_with_parent()
    try:
        yield
    except BaseException as error:  # what ends the process, too: kfp keeps no exception
        found = of_stage(stage, error)
        leave_message(found.line, found.exit_code, found.kind)
        if not channel.tell(channel.ERROR, found.to_dict()):
            progress(ERROR_LINE + json.dumps(found.to_dict()))
        if os.environ.get(KFP_RUNTIME_ENV):
            sys.excepthook = _show_in_one_line
        raise


def _show_in_one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """How kfp's executor ends for an expected failure, which is one line; a bug keeps its traceback."""
    if isinstance(error, KftrainError):
        sys.stderr.write(f"kftrain: error: {error.line}\n")
    else:
        errors.print_traceback(error)
