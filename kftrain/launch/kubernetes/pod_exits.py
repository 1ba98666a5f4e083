"""How pods ended, and whether that has used up the restart budget."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

from kftrain.errors import Preempted, RetryableError, StorageAwayError
from kftrain.launch.kubernetes.observation import Pod
from kftrain.process.termination import said_in
from kftrain.run import attempts, commit, documents
from kftrain.run.attempts import Claim
from kftrain.run.budget import RestartBudget, WorkerEnd, read_standing
from kftrain.run.paths import RunPaths

DELETED = "deleted"
"""Stands for the disruption of a pod that somebody deleted while it ran: `kubectl`, a drained node, a suspension."""

CONSEQUENCES = frozenset((Preempted.exit_code, RetryableError.exit_code))
"""What the others end with when one worker is taken away: they stop after a commit, or they lose a peer."""

CLOCKS_SECONDS = 5.0
"""By how much the clock of a worker's node may be behind that of the API server."""


class PodExits:
    """Pods that have ended or are being taken away lately, also those that were replaced within a moment.

    The watch and the launcher's own looks both fill it, from two threads.
    """

    def __init__(self, window_seconds: float) -> None:
        """`window_seconds`: how long before the newest ending one may lie that has to do with it."""
        self._window_seconds = window_seconds
        self._lock = threading.Lock()
        self._pods: dict[str, tuple[float, Pod]] = {}

    def note(self, pod: Pod, now: float) -> bool:
        """Keeps what is known of a pod that ended or is going; whether that is news. `now` is monotonic."""
        if pod.terminating and pod.exit_code is None:
            pod = replace(pod, disruption=pod.disruption or DELETED)
        if pod.exit_code is None and not pod.disruption:
            return False
        with self._lock:
            noted_at, known = self._pods.get(pod.uid, (now, None))
            if known is not None:
                latest = known if pod.exit_code is None else pod
                pod = replace(latest, disruption=known.disruption or pod.disruption)
            self._pods[pod.uid] = noted_at, pod
        return known is None or known.exit_code != pod.exit_code

    def bad(self) -> list[Pod]:
        """Those that failed or were taken away, the first one first."""
        with self._lock:
            newest = max((noted_at for noted_at, _ in self._pods.values()), default=0.0)
            oldest = newest - self._window_seconds
            self._pods = {uid: (at, pod) for uid, (at, pod) in self._pods.items() if at >= oldest}
            return [pod for _, pod in self._pods.values() if pod.failed or pod.disruption]

    def last(self) -> list[Pod]:
        """Of each worker only the last one: how the last attempt ended."""
        found = self.bad()
        uids = {pod.place: pod.uid for pod in found}
        return [pod for pod in found if uids[pod.place] == pod.uid]


class PodBudget:
    """The restart budget of one launch of a job, told by its pods how its workers end. `begin` comes first.

    What is counted, and why, `run.budget` says. Here it is decided which ends are news, and which are excused.
    """

    def __init__(self, limit: int, paths: RunPaths) -> None:
        self._paths = paths
        self._has_begun = False
        self._budget = RestartBudget(limit)
        self._last_attempt = 0
        self.num_looks = 0
        """How often storage was asked: changes whenever a pod has ended or was replaced."""
        self._present: frozenset[str] = frozenset()
        self._counted: set[str] = set()
        self._blind: set[str] = set()
        """Pods that have ended while storage did not answer here either."""

    def begin(self, pods: Sequence[Pod], now: float) -> None:
        """Finds out which attempts were over before this launch; does nothing once it knows.

        The attempt of an adopted job is not over: it has its claim, its failure will count, and what was committed
        since its claim is its progress. So it does not matter when storage answers. Raises whatever storage raises.

        Args:
            pods: Those that are there.
            now: Seconds since the epoch at which they were seen.
        """
        if self._has_begun:
            return
        number, step = attempts.last_attempt(self._paths), commit.last_step(self._paths)
        if number:
            claim = documents.read(Claim, self._paths.attempt(number))
            if is_at_work(claim, pods, now):
                number, step = number - 1, claim.start_step
        self._budget = replace(self._budget, step=step, first_attempt=number)
        self._last_attempt = number
        self._has_begun = True

    def spent(self, ended: Sequence[Pod], pods: Sequence[Pod]) -> int:
        """How many attempts have failed in a row, where that is more than may; else 0.

        Reads storage only when a pod has ended or was replaced. Raises whatever storage raises; the next call then
        sees the same again, and excuses those that storage may have ended.

        Args:
            ended: Pods that failed or were taken away.
            pods: Those that are there.
        """
        assert self._has_begun, "begin comes first"
        news = [pod for pod in ended if pod.uid not in self._counted]
        present = frozenset(pod.uid for pod in pods)
        if not news and self._present <= present:
            self._present = present
            return 0
        try:
            now = read_standing(self._paths, since=self._budget.first_attempt)
        except Exception:  # whatever a driver raises
            self._blind.update(pod.uid for pod in news)
            raise
        self._present = present
        self._last_attempt = now.last_attempt
        self.num_looks = self.num_looks + 1
        self._counted.update(pod.uid for pod in news)
        before, disrupted = self._budget, any(pod.disruption or _met_outage(pod) for pod in ended)
        self._budget = before.after(now, [self._end_of(pod, disrupted) for pod in news])
        if self._budget.step > before.step:  # the same attempt's other pods are still to end: that does not count
            replaced = {pod.place for pod in news}
            self._counted.update(pod.uid for pod in pods if pod.place not in replaced)
        return self._budget.num_failed if self._budget.is_spent else 0

    def has_claim(self) -> bool:
        """Whether an attempt has claimed the run since a pod ended last. Raises whatever storage raises."""
        assert self._has_begun, "begin comes first"
        return attempts.last_attempt(self._paths) > self._last_attempt

    def _end_of(self, pod: Pod, disrupted: bool) -> WorkerEnd:
        """Who is taken away has not failed, nor have those who stop with it, nor has who could not reach storage.

        The last ends somewhere: the limit of a start goes on while storage answers here.
        """
        disturbed = disrupted or pod.uid in self._blind
        is_excused = bool(pod.disruption) or (disturbed and pod.exit_code in CONSEQUENCES)
        return WorkerEnd(pod.place, pod.exit_code, is_excused)


def _met_outage(pod: Pod) -> bool:
    """Whether a worker says that it could not reach storage."""
    said = said_in(pod.end_message)
    return said is not None and said.kind == StorageAwayError.__name__


def is_at_work(claim: Claim, pods: Sequence[Pod], now: float) -> bool:
    """Whether these pods, seen at `now`, have made the claim: it comes only once the last of them has joined.

    Two clocks are compared, with some patience. Taken for at work wrongly, an attempt costs the limit of one start;
    taken for over wrongly, a job that is well.
    """
    newest = max((now - pod.age_seconds for pod in pods), default=float("inf"))
    return claim.start_time + CLOCKS_SECONDS >= newest
