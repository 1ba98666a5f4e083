"""A record of how pods ended; it decides whether their ends have used up the restart budget."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

from kftrain.errors import Preempted, RetryableError, StorageAwayError
from kftrain.launch.kubernetes.observation import Pod
from kftrain.process.termination import parse_message
from kftrain.run import attempts, documents
from kftrain.run.attempts import Claim
from kftrain.run.budget import RestartBudget, WorkerEnd, read_standing
from kftrain.run.job_tasks import TRAINING, JobTask
from kftrain.run.paths import RunPaths

DELETED = "deleted"
"""Stands for the disruption of a pod that somebody deleted while it ran: `kubectl`, a drained node, a suspension."""

CONSEQUENCES = frozenset((Preempted.exit_code, RetryableError.exit_code))
"""Exit codes of the other workers when one is taken away: they stop after a commit, or they lose a peer."""

CLOCKS_SECONDS = 5.0
"""Seconds by which the clock of a worker's node may be behind that of the API server."""


class PodExits:
    """The pods that have ended or been taken away lately, also those that were replaced within a moment.

    The watch and the launcher's own looks both fill it, from two threads.
    """

    def __init__(self, window_seconds: float) -> None:
        """Keep the endings of the `window_seconds` before the newest one: earlier ones have nothing to do with it."""
        self._window_seconds = window_seconds
        self._lock = threading.Lock()
        self._pods: dict[str, tuple[float, Pod]] = {}

    def note_end(self, pod: Pod, now: float) -> bool:
        """Keep a pod that ended or is going; return whether its ending is news. `now`: seconds, monotonic."""
        if pod.terminating and pod.exit_code is None:
            pod = replace(pod, disruption=pod.disruption or DELETED)
        if pod.exit_code is None and not pod.disruption:
            return False
        with self._lock:
            noted_at, known = self._pods.get(pod.uid, (now, None))
            if known is not None:
                # Watch and looks race: an older answer without an exit code must not replace a newer one that has it.
                latest = known if pod.exit_code is None else pod
                pod = replace(latest, disruption=known.disruption or pod.disruption)
            self._pods[pod.uid] = noted_at, pod
        return known is None or known.exit_code != pod.exit_code

    def list_failed(self) -> list[Pod]:
        """Return the pods that failed or were taken away within the window, in the order of their endings."""
        with self._lock:
            newest = max((noted_at for noted_at, _ in self._pods.values()), default=0.0)
            oldest = newest - self._window_seconds
            self._pods = {uid: (at, pod) for uid, (at, pod) in self._pods.items() if at >= oldest}
            return [pod for _, pod in self._pods.values() if pod.failed or pod.disruption]

    def list_last(self) -> list[Pod]:
        """Return the last bad pod of each place: together they tell how the last attempt ended."""
        pods = self.list_failed()
        uids = {pod.place: pod.uid for pod in pods}
        return [pod for pod in pods if uids[pod.place] == pod.uid]


class PodBudget:
    """The restart budget of one launch of a job, fed with the endings of its pods. `begin` comes first.

    `run.budget` says what counts as a failed attempt. This class decides which endings are news and which are excused.
    """

    def __init__(self, limit: int, paths: RunPaths, task: JobTask = TRAINING) -> None:
        self._paths = paths
        self._task = task
        self._has_begun = False
        self._budget = RestartBudget(limit)
        self._last_attempt = 0
        self.num_looks = 0
        """Times that storage was read: grows whenever a pod has ended or was replaced."""
        self._present: frozenset[str] = frozenset()
        self._counted: set[str] = set()
        self._blind: set[str] = set()
        """Uids of pods that ended while storage did not answer here either: storage may have ended them."""

    def begin(self, pods: Sequence[Pod], now: float) -> None:
        """Read from storage which attempts were over before this launch; later calls do nothing.

        The attempt of an adopted job is not over: it has its claim, its failure will count, and what was committed
        since its claim is its progress. So it does not matter when storage answers. Raises whatever storage raises.

        Args:
            pods: The pods that are there.
            now: Seconds since the epoch at which they were seen.
        """
        if self._has_begun:
            return
        number, step = attempts.find_last_attempt(self._paths), self._task.count_progress(self._paths)
        if number:
            claim = documents.read(Claim, self._paths.attempt(number))
            if is_at_work(claim, pods, now):
                number, step = number - 1, claim.start_step
        self._budget = replace(self._budget, step=step, first_attempt=number)
        self._last_attempt = number
        self._has_begun = True

    def count_spent(self, ended: Sequence[Pod], pods: Sequence[Pod]) -> int:
        """Return the number of attempts that failed in a row, if it exceeds the limit; else 0.

        Reads storage only when a pod has ended or was replaced. Raises whatever storage raises; the next call then
        counts the same pods, and excuses those that storage may have ended.

        Args:
            ended: Pods that failed or were taken away.
            pods: The pods that are there.
        """
        assert self._has_begun, "begin comes first"
        news = [pod for pod in ended if pod.uid not in self._counted]
        present = frozenset(pod.uid for pod in pods)
        if not news and self._present <= present:
            self._present = present
            return 0
        try:
            now = read_standing(self._paths, self._budget.first_attempt, self._task)
        except Exception:  # whatever a driver raises
            self._blind.update(pod.uid for pod in news)
            raise
        self._present = present
        self._last_attempt = now.last_attempt
        self.num_looks = self.num_looks + 1
        self._counted.update(pod.uid for pod in news)
        before, disrupted = self._budget, any(pod.disruption or _met_outage(pod) for pod in ended)
        self._budget = before.advance(now, [self._describe_end(pod, disrupted) for pod in news])
        if self._budget.step > before.step:  # the same attempt's other pods are still to end: that does not count
            replaced = {pod.place for pod in news}
            self._counted.update(pod.uid for pod in pods if pod.place not in replaced)
        return self._budget.num_failed if self._budget.is_spent else 0

    def has_claim(self) -> bool:
        """Tell whether an attempt has claimed the run since a pod ended last. Raises whatever storage raises."""
        assert self._has_begun, "begin comes first"
        return attempts.find_last_attempt(self._paths) > self._last_attempt

    def _describe_end(self, pod: Pod, disrupted: bool) -> WorkerEnd:
        """Describe a pod's ending for the budget, excused where the worker itself is not at fault.

        That is a worker that was taken away, those that stop with it, and one that could not reach storage. The last
        cannot go on for ever: the limit of a start runs on while storage answers here.
        """
        disturbed = disrupted or pod.uid in self._blind
        is_excused = bool(pod.disruption) or (disturbed and pod.exit_code in CONSEQUENCES)
        return WorkerEnd(pod.place, pod.exit_code, is_excused)


def _met_outage(pod: Pod) -> bool:
    """Tell whether a worker's termination message says that it could not reach storage."""
    message = parse_message(pod.end_message)
    return message is not None and message.kind == StorageAwayError.__name__


def is_at_work(claim: Claim, pods: Sequence[Pod], now: float) -> bool:
    """Tell whether these pods, seen at `now`, made the claim: it comes only once the last of them has joined.

    Two clocks are compared, with some patience, because the errors differ in cost: an attempt that is taken for at work
    and is over costs the time limit of one start; one that is taken for over and is at work costs a healthy job.
    """
    newest = max((now - pod.age_seconds for pod in pods), default=float("inf"))
    return claim.start_time + CLOCKS_SECONDS >= newest
