"""The restart budget: how many attempts in a row may fail without a new checkpoint. Every launcher counts with it.

Attempts are seen from two sides, and neither is enough alone:

- The run's folder has a claim of each attempt that got as far as training, with the step that it began at. Claims
  outlive the launcher, but an attempt that fails before its claim leaves none.
- How the workers of an attempt ended is known of every attempt, but only to a launcher that was there.

So both are counted, and the larger number counts. A new checkpoint starts the count anew: whatever failed before it
has cost less than it has brought, and a run that makes progress ends.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kftrain.errors import FIRST_RETRYABLE_CODE
from kftrain.run import attempts
from kftrain.run.job_tasks import TRAINING, JobTask
from kftrain.run.paths import RunPaths


@dataclass(frozen=True)
class Standing:
    """A run's progress and attempts as its folder shows them at one moment."""

    step: int
    """Step of the newest committed checkpoint, or what else a task counts; 0 where there is none."""
    last_attempt: int
    """Number of the newest claim; 0 where there is none."""
    num_at_one_step: int = 0
    """Number of the newest claims that began at the same step."""


@dataclass(frozen=True)
class WorkerEnd:
    """The end of one worker of an attempt: its exit code, and whether something else caused it."""

    worker: Hashable
    """Tells it from the others of its job; its successor has the same."""
    exit_code: int | None
    is_excused: bool = False
    """True where something else ended it: it was taken away, lost a peer that was, or could not reach storage."""


@dataclass(frozen=True)
class RestartBudget:
    """The failures that count so far, against the limit. Pure: `advance` returns the next budget."""

    limit: int
    """Attempts in a row that may fail without a new checkpoint; one more is too many."""
    step: int = 0
    """Step of the newest commit that is known."""
    first_attempt: int = 0
    """Claims up to this one do not count: they were over before this launch, or have led to a commit."""
    num_at_one_step: int = 0
    failed: Mapping[Hashable, int] = field(default_factory=dict)
    """Worker -> number of its failures since the last commit."""
    excused: Mapping[Hashable, int] = field(default_factory=dict)
    """Worker -> number of its excused ends since the last commit."""

    def advance(self, now: Standing, ends: Sequence[WorkerEnd]) -> RestartBudget:
        """Return the budget after workers ended so, where the run's folder says `now` afterwards."""
        if now.step > self.step:  # the attempt that ended has committed: how it ended does not count
            return RestartBudget(self.limit, now.step, now.last_attempt)
        excused = [end.worker for end in ends if end.is_excused]
        # A permanent error ends the job at once, so there is nothing to count.
        failed = [end.worker for end in ends if not end.is_excused and (end.exit_code or 0) >= FIRST_RETRYABLE_CODE]
        return replace(
            self,
            num_at_one_step=now.num_at_one_step,
            failed=_add_counts(self.failed, failed),
            excused=_add_counts(self.excused, excused),
        )

    @property
    def num_failed(self) -> int:
        """Attempts in a row that have failed without a new checkpoint.

        The newest claim may be of the attempt that runs by now. Claims do not say how their attempts ended, so as many
        are forgiven as the worker was excused that was excused most. Of the ends the worker counts that failed most:
        one attempt ends several workers, and each at most once.
        """
        claims = self.num_at_one_step - 1 - max(self.excused.values(), default=0)
        return max(claims, max(self.failed.values(), default=0), 0)

    @property
    def is_spent(self) -> bool:
        """True where more attempts have failed than the limit allows, so that no other may be made."""
        return self.num_failed > self.limit


def read_standing(paths: RunPaths, since: int, task: JobTask = TRAINING) -> Standing:
    """Read what a run's folder says now; only claims later than number `since` count. Raises what storage raises."""
    step = task.count_progress(paths)
    return Standing(step, attempts.find_last_attempt(paths), attempts.count_without_progress(paths, since))


def _add_counts(counts: Mapping[Hashable, int], workers: Sequence[Hashable]) -> dict[Hashable, int]:
    return {**counts, **{worker: counts.get(worker, 0) + workers.count(worker) for worker in set(workers)}}
