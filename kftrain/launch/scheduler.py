"""Launchers whose jobs lie with a scheduler, and go on when the launcher is gone: what those of Slurm and Ray share.

A launcher that is killed leaves the job: the next one adopts it. Of two launchers that live, the one that came last
follows the job, and the other one ends.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from kftrain.config import Config
from kftrain.core import storage
from kftrain.core.progress import to_log
from kftrain.errors import (
    FIRST_RETRYABLE_CODE,
    FailureClass,
    FencedError,
    LaunchError,
    OtherJobError,
    Preempted,
    RetryableError,
)
from kftrain.launch.base import JobStatus, Launcher
from kftrain.launch.local import remove_temporary_files
from kftrain.launch.spec import JobSpec
from kftrain.process.signals import INTERRUPT, STOP, handle_signals
from kftrain.run.best_effort import best_effort
from kftrain.run.error import read_error
from kftrain.run.job_tasks import JOB_TASKS
from kftrain.run.paths import RunPaths

POLL_SECONDS = 2.0

GOING_SECONDS = 1800
"""Seconds that a job that was told to stop may take to commit and to go."""

NEXT_SECONDS = 30.0
"""Seconds in which a failed job has a successor, if its launcher starts another attempt."""


class SchedulerAwayError(LaunchError):
    """The scheduler cannot be reached or is not well: it may be in a moment, and jobs go on meanwhile."""


@dataclass(frozen=True)
class ScheduledJob:
    """A job of kftrain as its scheduler lists it."""

    ended_states: ClassVar[frozenset[str]]
    """Words for jobs that will not run again, and of which no process is left."""
    cancelled_state: ClassVar[str]
    """Word for those that somebody has ended."""

    job_id: str
    state: str
    """The scheduler's word for it, such as `PENDING`."""
    reason: str
    """The scheduler's words about the state, such as why it waits."""
    num_nodes: int
    submitted_at: float
    """Seconds since the epoch."""
    run_uri: str
    task: str
    digest: str
    """Digest of the configuration that the job was started for."""

    @property
    def has_ended(self) -> bool:
        """True if it will not run again, and none of its processes is left."""
        return self.state in self.ended_states

    @property
    def title(self) -> str:
        """Name of the job for people."""
        return self.job_id

    def belongs_to(self, run: str) -> bool:
        """Tell whether it works on a run, named by its folder or its id."""
        return self.run_uri == storage.absolute(run) if "/" in run else RunPaths(self.run_uri).run_id == run


def parse_mark(mark: Mapping[str, Any]) -> dict[str, str]:
    """Parse what a job of kftrain says of its work. Raises ValueError, TypeError or KeyError for any other job's words.

    Anybody may write any: it is shown on terminals, and the folder of the run is read.
    """
    values = {"run_uri": str(mark["run"]), "task": str(mark["task"]), "digest": str(mark["digest"])}
    if str(mark["kftrain"]) != "1" or not values["run_uri"].isprintable() or values["task"] not in JOB_TASKS:
        raise ValueError("it is no mark of kftrain's")
    return values


@dataclass(frozen=True)
class JobOutput:
    """The output of the last job of a task, as it was at one moment."""

    name: str
    """Name that no other job's output has."""
    read_lines: Callable[[], list[str]]
    """Returns the lines that were added since its last call."""
    is_active: bool
    """True if the job had not ended."""
    is_final: bool
    """True if no other job follows it."""


class JobStanding(NamedTuple):
    """The standing of a job that has not ended."""

    state: str
    reason: str
    progress: str
    """`step 3/40`; empty before the first one."""
    is_at_work: bool
    """True if it has its nodes."""


JobT = TypeVar("JobT", bound=ScheduledJob)


def _make_status(job: ScheduledJob, assessment: JobStanding) -> JobStatus:
    state, reason, progress, is_at_work = assessment
    workers = f"{job.num_nodes if is_at_work else 0}/{job.num_nodes}"
    run_id, age_seconds = RunPaths(job.run_uri).run_id, time.time() - job.submitted_at
    return JobStatus(run_id, job.task, job.title, state, reason, progress, workers, age_seconds)


@contextlib.contextmanager
def tolerate_absence(deadline: float = math.inf) -> Iterator[None]:
    """Run a block in which the scheduler may be away: until `deadline` (monotonic seconds) that is a warning."""
    try:
        yield
    except SchedulerAwayError as error:
        if time.monotonic() > deadline:
            raise
        to_log(f"warning: {error.line}")


class SchedulerLauncher(Launcher, Generic[JobT]):
    """Runs the jobs of a run with a scheduler."""

    scheduler_name: ClassVar[str]
    """Name of the scheduler for people."""
    submit_seconds: ClassVar[float] = math.inf
    """Seconds for which the scheduler may refuse a job, or be away, before it is given up."""
    forget_seconds: ClassVar[float] = 0.0
    """Seconds for which the scheduler may not know a job that it was given."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._token = uuid.uuid4().hex

    @abstractmethod
    def _list_jobs(self, mine: bool = False) -> list[JobT]:
        """List kftrain's jobs, those that have just ended too, the newest last; `mine`: those this user may follow."""

    @abstractmethod
    def _submit(self, spec: JobSpec, jobs: list[JobT]) -> str:
        """Submit the next job of a task, which had `jobs` before; return its id."""

    @abstractmethod
    def _tell_to_end(self, job: JobT) -> None:
        """Tell a job once to commit and to end."""

    @abstractmethod
    def _open_output(self, job: JobT) -> Callable[[], list[str]]:
        """Return a function that returns the lines that the job has printed since its last call."""

    @abstractmethod
    def _find_output(self, run: str, task: str, follow: bool) -> JobOutput:
        """Find the output of a task's last job. Raises LaunchError where there is none."""

    @abstractmethod
    def _read_code(self, job: JobT) -> int | None:
        """Return the exit code of an ended job; None where a job that the scheduler has forgotten left none."""

    @abstractmethod
    def _assess(self, job: JobT) -> JobStanding:
        """Say how a job stands that has not ended."""

    def _recall(self, job: JobT) -> JobT | None:
        """Return a job that is not listed any more as it ended; None where the scheduler has forgotten it."""
        return None

    def run(self, spec: JobSpec) -> int:
        """Submit or adopt a job, show its output, and return its exit code: see `Launcher.run`.

        Raises OtherJobError where a job with another configuration is at work on the run, and FencedError once another
        launcher follows the job.
        """
        with handle_signals((INTERRUPT, *STOP), self._on_signal):
            job = self._submit_or_adopt(spec)
            if job is not None:
                storage.publish_json(self._make_lead_uri(spec), {"launcher": self._token})
                return self._follow(job, spec)
            with tolerate_absence():  # a job whose submission was not answered any more
                self._end([job for job in self._list_task_jobs(spec) if job.digest == spec.config_digest])
            return Preempted.exit_code

    def clean(self, paths: RunPaths, job_id: str) -> list[str]:
        """End the run's jobs of this user, and remove its temporary files: see `Launcher.clean`."""
        return [*self._end(self._list_active(paths.uri, mine=True)), *remove_temporary_files(paths)]

    def describe(self, run: str) -> list[JobStatus]:
        """Return the status of the run's jobs, whoever has started them: see `Jobs.describe`."""
        return [_make_status(job, self._assess(job)) for job in self._list_active(run)]

    def cancel(self, run: str) -> list[str]:
        """End the run's jobs after a commit, and wait until they are gone: see `Jobs.cancel`."""
        return self._end(self._require_active(run))

    def logs(self, run: str, task: str, follow: bool, write: Callable[[str], None]) -> None:
        """Write what the last job has printed; with `follow` its successors, too, while the scheduler may be away."""
        output, seen_at = None, time.monotonic()
        while True:
            with tolerate_absence(math.inf if follow else 0.0):
                latest = self._find_output(run, task, follow)
                lines = [] if output is None else output.read_lines()
                if output is None or latest.name != output.name:
                    output = latest
                    lines += output.read_lines()
                for line in lines:
                    write(line)
                seen_at = time.monotonic() if latest.is_active or lines else seen_at
                if not follow or latest.is_final or time.monotonic() - seen_at > NEXT_SECONDS:
                    return
            time.sleep(POLL_SECONDS)

    def _list_active(self, run: str, mine: bool = False) -> list[JobT]:
        return [job for job in self._list_jobs(mine) if not job.has_ended and (not run or job.belongs_to(run))]

    def _require_active(self, run: str) -> list[JobT]:
        """List the jobs of a run that have not ended. Raises LaunchError where there are none."""
        assert run, "no run would mean every run"
        jobs = self._list_active(run)
        if not jobs:
            what = f"this run has no job in {self.scheduler_name}"
            raise LaunchError(what, where=run, fix="kftrain runs says how it ended")
        return jobs

    def _list_task_jobs(self, spec: JobSpec) -> list[JobT]:
        return [job for job in self._list_jobs(mine=True) if job.belongs_to(spec.run_uri) and job.task == spec.task]

    def _submit_or_adopt(self, spec: JobSpec) -> JobT | None:
        """Return the job of the task, new or not; None where this process was told to stop before."""
        submitted, deadline = "", time.monotonic() + self.submit_seconds
        while not self.interrupted:
            with tolerate_absence(deadline):
                jobs = self._list_task_jobs(spec)
                active = [job for job in jobs if not job.has_ended or job.job_id == submitted]
                if active:
                    job = active[0]
                    self._end([later for later in active[1:] if later.job_id == submitted])  # another one was faster
                    if job.digest != spec.config_digest:
                        raise OtherJobError("a job with another configuration works on this run", where=spec.run_uri)
                    how = "" if job.job_id == submitted else " is there already: following it"
                    to_log(f"job {job.job_id} of {self.scheduler_name}{how}: {spec.size}")
                    return job
                if not submitted:
                    submitted = self._submit(spec, jobs)
                    continue
            time.sleep(POLL_SECONDS)
        return None

    def _make_lead_uri(self, spec: JobSpec) -> str:
        """Return the file with the token of the launcher that follows a task's job."""
        return storage.join(spec.run_uri, self._config.launch.backend, f"{spec.task}.json")

    def _require_lead(self, spec: JobSpec) -> None:
        """Raise FencedError once another launcher follows the job."""
        token = self._token
        with best_effort("whether another launcher follows the job is not known"):
            kept = storage.read_json_if_exists(self._make_lead_uri(spec)) or {}
            token = kept.get("launcher", token)
        if token != self._token:
            raise FencedError(f"{FencedError.BY_LAUNCHER} by now, and follows its job", where=spec.run_uri)

    def _follow(self, job: JobT, spec: JobSpec) -> int:
        """Show the job's output until it has ended; return its exit code."""
        read_lines, reason, known_at = self._open_output(job), "", time.monotonic()
        while True:
            self._require_lead(spec)
            current: JobT | None = job
            with tolerate_absence():
                listed = (other for other in self._list_jobs(mine=True) if other.job_id == job.job_id)
                current = next(listed, None) or self._recall(job)
                if self.interrupted and current is not None and not current.has_ended:
                    self._tell_to_end(current)
            if current is not None:
                job, known_at = current, time.monotonic()
                before, reason = reason, job.reason if job.state == "PENDING" else ""
                if reason not in ("", before):
                    to_log(f"job {job.job_id} waits: {reason}")
            with tolerate_absence():  # what it printed last is shown before it is judged
                for line in read_lines():
                    sys.stdout.write(f"{line}\n")
                sys.stdout.flush()
                code = self._read_code(job) if job.has_ended or current is None else None
                if code is None and current is None and time.monotonic() - known_at >= self.forget_seconds:
                    to_log(f"job {job.job_id}: {self.scheduler_name} does not know it any more")
                    return RetryableError.exit_code
                if code is not None:
                    return self._judge(job, code)
            time.sleep(POLL_SECONDS)

    def _judge(self, job: JobT, code: int) -> int:
        """Return the exit code of an ended job; the error that a worker left knows better what is for good."""
        where = f"job {job.job_id} of {self.scheduler_name}"
        if code and job.state == job.cancelled_state and not self.interrupted:
            raise LaunchError("somebody cancelled the job", where=where, fix="resume the run").of_class(
                FailureClass.DELETED
            )
        error = read_error(RunPaths(job.run_uri).error) if code else None
        if error is not None and 0 < error.exit_code < FIRST_RETRYABLE_CODE:
            return error.exit_code
        if 0 < code < FIRST_RETRYABLE_CODE:
            raise LaunchError("the job failed outside of its workers", where=where, value=job.reason[-300:])
        return code

    def _end(self, jobs: list[JobT]) -> list[str]:
        """End jobs after a commit, and wait until they have ended; return their names."""
        return self._tell_until(jobs, self._tell_to_end, lambda job: job.has_ended)

    def _tell_until(self, jobs: list[JobT], tell: Callable[[JobT], None], is_done: Callable[[JobT], bool]) -> list[str]:
        """Tell jobs what to do until all have done it or have ended; return their names.

        Again and again: a job may begin to run, or be requeued, between a look and the command.
        """
        numbers, deadline = {job.job_id for job in jobs}, time.monotonic() + GOING_SECONDS
        while numbers:
            left = [job for job in self._list_jobs() if job.job_id in numbers and not (job.has_ended or is_done(job))]
            if not left:
                break
            if time.monotonic() > deadline:
                where = f"{left[0].title} of {self.scheduler_name}"
                raise LaunchError("the job was told to stop, and does not", where=where)
            for job in left:
                tell(job)
            time.sleep(POLL_SECONDS)
        return [job.title for job in jobs]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = True
