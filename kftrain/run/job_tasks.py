"""The tasks of jobs: what each job does, as one table that launchers, workers and the command line all read.

A new task is an entry here and the function that its ranks run; nothing else asks which task it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kftrain.config import Config
from kftrain.core import storage
from kftrain.errors import EvaluationError, LaunchError
from kftrain.run import commit, documents
from kftrain.run.completion import read_completion, read_evaluations
from kftrain.run.documents import Evaluation, EvaluationRequest, PartShare
from kftrain.run.paths import RunPaths


@dataclass(frozen=True)
class JobTask:
    """The work of a job: what its ranks run, what proves that it is done, and the words for it."""

    name: str
    """Value of `--task`, and the end of the names of its jobs."""
    rank_function: str
    """Function that every rank runs, as `module:name`, called with the run's paths and its configuration.

    Where the task `commits`, it gets the StopRequest of its process, too.
    """
    read_results: Callable[[RunPaths, Config], object]
    """Reads and verifies all that a job produces. Raises LaunchError or EvaluationError where any of it is missing."""
    state: str
    """Word for the state of a job that is at work, as `kftrain status` shows it."""
    stop_message: str
    """Message of a node that was asked to stop, where none of its processes could say more."""
    log_folder: str = ""
    """Folder of its logs below the run's; empty for a task that commits, which has one for each attempt."""
    commits: bool = False
    """True if its ranks claim an attempt and, asked to stop, commit first; else SIGTERM ends them at once."""
    is_tracked: bool = False
    """True if rank 0 logs to the MLflow run that the launcher names."""
    is_in_every_run: bool = False
    """True if `kftrain run` has such a job, so that its dry run shows it."""
    meets: bool = True
    """True if its nodes work together: the others wait until the first one has completed the job. Else each has a share
    of its own, needs no GPU, and ends when that is done."""
    progress: str = "checkpoint"
    """Word for what a failed attempt must have added so that the count of failures begins anew."""
    count_progress: Callable[[RunPaths], int] = commit.find_last_step
    """Returns a number that grows with each of them."""

    def is_complete(self, paths: RunPaths, config: Config) -> bool:
        """Tell whether everything that a job was to produce is there and belongs to this very job."""
        try:
            self.read_results(paths, config)
        except (LaunchError, EvaluationError):
            return False
        return True


def _read_requested_evaluations(paths: RunPaths, config: Config) -> list[Evaluation]:
    return read_evaluations(paths, documents.read(EvaluationRequest, paths.evaluation_request, EvaluationError))


def _read_shares(paths: RunPaths, config: Config) -> list[PartShare]:
    uris = [paths.share(config.digest(), rank) for rank in range(config.data.shard_pods)]
    shares = [documents.read(PartShare, uri, LaunchError) for uri in uris]
    names = {f"{job['input_digest']}.json" for share in shares for job in share.jobs}
    if missing := names.difference(storage.list_names(paths.encoded_parts)):
        raise LaunchError("parts are not encoded yet", where=paths.sharding, value=len(missing), fix="run again")
    return shares


TRAINING = JobTask(
    name="train",
    rank_function="kftrain.train.session:train",
    read_results=read_completion,
    state="Training",
    stop_message="stopped before the first step: there was nothing to commit",
    commits=True,
    is_tracked=True,
    is_in_every_run=True,
)

EVALUATION = JobTask(
    name="evaluate",
    rank_function="kftrain.evaluate.session:evaluate",
    read_results=_read_requested_evaluations,
    state="Evaluating",
    stop_message="the evaluation was stopped; training is complete and is not repeated",
    log_folder="evaluation",
    is_in_every_run=True,
)

SHARDING = JobTask(
    name="shard",
    rank_function="kftrain.sharding.parts.share:encode_share",
    read_results=_read_shares,
    state="Sharding",
    stop_message="the sharding was stopped; parts that are encoded are not encoded again",
    log_folder="sharding",
    meets=False,
    progress="part",
    count_progress=lambda paths: len(storage.list_names(paths.encoded_parts)),
)


def read_bandwidth(paths: RunPaths, config: Config) -> list[dict[str, Any]]:
    """Read the rows of a measurement. Raises LaunchError where there are none."""
    rows: list[dict[str, Any]] | None = storage.read_json_if_exists(paths.bandwidth)
    if rows is None:
        raise LaunchError("nothing was measured", where=paths.bandwidth, fix="run kftrain bandwidth again")
    return rows


BANDWIDTH = JobTask(
    name="bandwidth",
    rank_function="kftrain.train.bandwidth:measure",
    read_results=read_bandwidth,
    state="Measuring",
    stop_message="the measurement was stopped",
    log_folder="bandwidth",
)

JOB_TASKS = {task.name: task for task in (TRAINING, EVALUATION, SHARDING, BANDWIDTH)}
"""Name -> task of a job."""


def find_job_task(name: str) -> JobTask:
    """Return a task of a job that anybody may have started; a name that this version does not know is a training."""
    return JOB_TASKS.get(name, TRAINING)
