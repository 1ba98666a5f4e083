"""Sees one job to its end: looks, says what has changed, and gives up what makes no sense to wait for."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone

from kftrain.config import Config
from kftrain.core.progress import to_log
from kftrain.errors import FailureClass, FencedError
from kftrain.launch.kubernetes import diagnosis, observation, states
from kftrain.launch.kubernetes.diagnosis import JobFailedError, is_lack_of_storage
from kftrain.launch.kubernetes.job_client import JobClient
from kftrain.launch.kubernetes.labels import PROGRESS_ANNOTATION, SEEN_ANNOTATION, STATE_ANNOTATION
from kftrain.launch.kubernetes.lease import Lease
from kftrain.launch.kubernetes.logs import Logs
from kftrain.launch.kubernetes.observation import Observation, Pod
from kftrain.launch.kubernetes.pod_exits import PodBudget, PodExits
from kftrain.launch.kubernetes.settings import KubernetesConfig
from kftrain.launch.kubernetes.states import Assessment, State
from kftrain.launch.spec import WORKER, JobSpec
from kftrain.run.best_effort import best_effort
from kftrain.run.error import ErrorDocument, read_error
from kftrain.run.job_tasks import JOB_TASKS
from kftrain.run.paths import RunPaths

ANNOTATE_SECONDS = 30.0
EXPLAIN_SECONDS = 3.0
"""Seconds between two looks at the sources that only explain."""

WATCH_PAUSE_SECONDS = 1.0
NOTICE_SECONDS = 60.0
"""Seconds after the timeout of their collective operations by which workers that lost a peer have ended, too."""


class Watcher:
    """Follows one job from its creation or adoption on: shows its state, and raises when waiting makes no sense."""

    def __init__(self, cluster: JobClient, config: Config, spec: JobSpec, lease: Lease, wake: threading.Event) -> None:
        paths = RunPaths(spec.run_uri)
        self._config = config
        self._cluster = cluster
        self._spec = spec
        self._task = JOB_TASKS[spec.task]
        self._paths = paths
        self._lease = lease
        self._name = lease.name
        self._logs = Logs(cluster, spec.num_pods)
        self._pod_exits = PodExits(config.launch.timeout_seconds + NOTICE_SECONDS)
        self._wake = wake
        self._budget = PodBudget(config.launch.max_restarts_without_progress, paths, self._task)
        self._claimed_by = -1
        self._clock = Clock(time.monotonic())
        self._state = State.QUEUED
        self._last_text = ""
        self._seen_at = time.time()
        self._is_fenced = False
        """True if another launch holds the job, or a later job of its name, at the last look."""
        self._failure: tuple[int, str] | None = None
        self._was_hopeless = False
        """True if the last look found no hope. Two in a row count: one may read a Workload newer than the job."""
        self._explained_at = float("-inf")
        self._annotated_at = float("-inf")
        self._events: Sequence[observation.Event] = ()
        self._lost_nodes: frozenset[str] = frozenset()
        self._closed = threading.Event()
        threading.Thread(target=self._watch, daemon=True, name=f"watch of {lease.name}").start()

    def look(self) -> State:
        """Look at the job once, act on what is seen, and return the state of the job.

        Raises JobFailedError if waiting makes no sense any more, FencedError if another launch holds the job.
        """
        seen = self._observe()
        assessment = states.assess(seen)
        now = time.monotonic()
        self._clock = self._clock.advance(self._state, now).advance(assessment.state, now)
        self._show(assessment)
        # A job that is gone may have succeeded, so that is asked before it is taken for deleted or for another's.
        state = State.SUCCEEDED if assessment.state is State.GONE and self._is_complete() else assessment.state
        if self._is_fenced and state is not State.SUCCEEDED:
            where = f"job {self._name} in namespace {self._cluster.namespace}"
            raise FencedError(f"{FencedError.BY_LAUNCHER} by now, and follows its job", where=where)
        if state in (State.SUCCEEDED, State.FAILED):
            self._logs.finish({pod.uid for pod in seen.pods if pod.ended})
            return state
        self._give_up_if_hopeless(assessment)
        self._give_up_if_spent(seen)
        self._give_up_if_late(assessment, seen)
        self._release(seen)
        self._annotate()
        return state

    def close(self, wait: bool = True) -> None:
        """End the watch of the pods and the logs; `wait` gives the ends of the logs a moment."""
        self._closed.set()
        self._logs.close(wait)

    def diagnose(self) -> ErrorDocument:
        """Summarize why the job failed, from its pods, its logs and the workers' own error."""
        error = None
        with best_effort("the workers' error could not be read"):
            error = read_error(self._paths.error)
        ended, tails = self._pod_exits.list_last(), self._logs.copy_tails()
        return diagnosis.diagnose(self._spec.task, error, ended, tails, self._failure)

    def _observe(self) -> Observation:
        """Read the job, its pods and what explains them; note endings of pods, and follow new logs."""
        now = self._seen_at = time.time()
        item = self._cluster.read_job(self._name)
        kind = self._cluster.kind
        job = observation.parse_job(item, now, kind) if item and item["metadata"]["uid"] == self._lease.uid else None
        self._failure = job.failure if job else None
        self._is_fenced = item is not None and self._lease.is_lost(item)
        parsed = observation.parse_pods(self._cluster.list_pods(self._name), now, kind)
        for pod in parsed:
            self._pod_exits.note_end(pod, time.monotonic())
        pods = observation.keep_newest(parsed)
        pods.sort(key=lambda pod: (pod.role != WORKER, pod.role, pod.index))
        self._logs.follow(pods)  # before its step is asked: a new pod is at none
        self._explain(pods)
        raw = self._cluster.find_workload(self._lease.uid) if job and job.has_queue and job.suspended else None
        return Observation(
            job=job,
            pods=pods,
            events=self._events,
            workload=observation.parse_workload(raw) if raw else None,
            sees_workloads=self._cluster.sees_workloads,
            lost_nodes=self._lost_nodes,
            step=self._logs.step,
            target_step=self._logs.target_step,
            claimed=self._claimed_by == self._budget.num_looks,
        )

    def _explain(self, pods: Sequence[Pod]) -> None:
        """Ask for events and nodes, only while something waits and not at every look."""
        if time.monotonic() - self._explained_at < EXPLAIN_SECONDS:
            return
        self._explained_at = time.monotonic()
        waits = len(pods) < self._spec.num_pods or any(not pod.has_log for pod in pods)
        self._events = [observation.parse_event(e) for e in self._cluster.list_warnings()] if waits else ()
        doubtful = {pod.node for pod in pods if pod.node and (pod.overdue_seconds or (pod.running and not pod.ready))}
        nodes = ((name, self._cluster.read_node(name)) for name in sorted(doubtful))
        self._lost_nodes = frozenset(name for name, node in nodes if node and observation.is_node_lost(node))

    def _show(self, assessment: Assessment) -> None:
        self._state = assessment.state
        if assessment.text != self._last_text:
            self._last_text = assessment.text
            self._annotated_at = float("-inf")
            to_log(f"{self._name}: {assessment.text}")

    def _is_complete(self) -> bool:
        """Tell whether a job that is gone had succeeded: gc or its time to live may delete it while a laptop sleeps."""
        complete = False
        with best_effort("what proves the job's success could not be read"):
            complete = self._task.is_complete(self._paths, self._config)
        if complete:
            to_log(f"{self._name}: it is gone, and everything that it was to produce is there")
        return complete

    def _give_up_if_hopeless(self, assessment: Assessment) -> None:
        """Raise JobFailedError if the job was deleted, or if two looks in a row found no hope."""
        if assessment.state is State.GONE:
            raise self._make_failure("somebody deleted the job", FailureClass.DELETED)
        if assessment.hopeless is not None and self._was_hopeless:
            raise self._make_failure(assessment.hopeless.text, assessment.hopeless.failure_class)
        self._was_hopeless = assessment.hopeless is not None

    def _give_up_if_spent(self, seen: Observation) -> None:
        """Raise JobFailedError if pods end again and again without a checkpoint: the operator never gives up."""
        num_failed = 0
        with best_effort("the attempts could not be counted"):
            self._budget.begin(seen.pods, self._seen_at)
            num_failed = self._budget.count_spent(self._pod_exits.list_failed(), seen.pods)
        if num_failed:
            last = self.diagnose()
            text = f"{num_failed} attempts in a row without a new {self._task.progress}, at last: {last.line}"
            raise self._make_failure(text, last.failure_class, last)

    def _give_up_if_late(self, assessment: Assessment, seen: Observation) -> None:
        """Raise JobFailedError if a time limit of the job is exceeded and a late start is not excused."""
        limit = self._clock.find_exceeded(self._config.launch.kubernetes)
        if not limit or (assessment.state in STARTING and self._is_excused(assessment, seen)):
            return
        first = next(iter(assessment.reasons), None)
        running = f", {sum(pod.running for pod in seen.pods)} of {self._spec.num_pods} workers run" if seen.pods else ""
        text = f"{assessment.word} for longer than {limit}{running}"
        if first is not None:
            raise self._make_failure(f"{text}: {first.text}", first.failure_class)
        last = self.diagnose() if assessment.state in STARTING and self._pod_exits.list_last() else None
        if last is not None and is_lack_of_storage(last):  # such attempts do not count, so it ends here
            raise self._make_failure(f"{text}, at last: {last.line}", FailureClass.STORAGE, last)
        raise self._make_failure(text, FailureClass.DEADLINE)

    def _is_excused(self, assessment: Assessment, seen: Observation) -> bool:
        """Tell whether a late start is excused: the attempt has begun to train, or storage holds it up.

        Training may have begun though no step was seen, as logs may be out of reach and the data is verified first:
        then the attempt has claimed the run. While storage does not answer, nothing can start, and the time to start
        begins anew.
        """
        claimed = None
        with best_effort("the attempts could not be read"):
            self._budget.begin(seen.pods, self._seen_at)
            claimed = self._budget.has_claim()
        if claimed is None:
            self._clock = self._clock.reset_start()
            return True
        if assessment.state is not State.RENDEZVOUS or not claimed:
            return False
        self._claimed_by = self._budget.num_looks
        return True

    def _release(self, seen: Observation) -> None:
        """Force-delete the pods of dead nodes, so that the operator replaces them elsewhere."""
        for pod in states.list_stuck_pods(seen):
            if self._cluster.kind.replaces_failed_pods:
                self._cluster.fail_pod(pod.name, pod.uid)
            if self._cluster.force_delete_pod(pod.name, pod.uid):
                to_log(f"{pod.name} was taken off node {pod.node}, which is dead")

    def _annotate(self) -> None:
        """Write state and progress onto the job, now and then: `kftrain status` and kubectl show them there."""
        if time.monotonic() - self._annotated_at < ANNOTATE_SECONDS:
            return
        self._annotated_at = time.monotonic()
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        progress = {STATE_ANNOTATION: self._last_text, PROGRESS_ANNOTATION: self._logs.progress}
        self._cluster.annotate_job(self._name, {SEEN_ANNOTATION: now, **progress})

    def _make_failure(self, what: str, kind: FailureClass, last: ErrorDocument | None = None) -> JobFailedError:
        where = f"job {self._name} in namespace {self._cluster.namespace}"
        return JobFailedError(what, kind, where=where, last_summary=last)

    def _watch(self) -> None:
        """Note how pods end, in a thread: looks each second would miss a failed pod, replaced within 0.1 s."""
        while not self._closed.is_set():
            for item in self._cluster.watch_pods(self._name):
                if self._closed.is_set():
                    return
                for pod in observation.parse_pods([item], time.time(), self._cluster.kind):
                    if self._pod_exits.note_end(pod, time.monotonic()):
                        self._wake.set()
            self._closed.wait(WATCH_PAUSE_SECONDS)


STARTING = (State.ADMITTED, State.SCHEDULING, State.PULLING, State.RENDEZVOUS)
_TRAINING = (State.WORKING, State.COMMITTING)


@dataclass(frozen=True)
class Clock:
    """Seconds that a job has spent in its queue, in its start and in training, up to `time` (monotonic).

    Time in a queue never counts as training. A job that goes back to the queue, or that loses a worker, gets its time
    to start anew; its time to train goes on. To verify the data is work, however long it takes, and no part of the
    start: the run is claimed before. The operator's own deadline is not a timer.
    """

    time: float
    queue_seconds: float = 0.0
    start_seconds: float = 0.0
    training_seconds: float = 0.0

    def advance(self, state: State, now: float) -> Clock:
        """Return the clock at `now`, for a job that has been in `state` since the last call."""
        passed = now - self.time
        if state is State.QUEUED:
            return replace(self, time=now, queue_seconds=self.queue_seconds + passed, start_seconds=0.0)
        if state in STARTING:
            return replace(self, time=now, queue_seconds=0.0, start_seconds=self.start_seconds + passed)
        if state in _TRAINING:
            return Clock(now, training_seconds=self.training_seconds + passed)
        return replace(self, time=now)

    def reset_start(self) -> Clock:
        """Return the clock with no time spent on the start: the time that has passed says nothing about the job."""
        return replace(self, start_seconds=0.0)

    def find_exceeded(self, limits: KubernetesConfig) -> str:
        """Return the setting whose limit is exceeded, as `key = limit s`; empty if none is."""
        spent = (
            ("launch.kubernetes.queue_timeout_seconds", self.queue_seconds, limits.queue_timeout_seconds),
            ("launch.kubernetes.start_timeout_seconds", self.start_seconds, limits.start_timeout_seconds),
            ("launch.kubernetes.training_timeout_seconds", self.training_seconds, limits.training_timeout_seconds),
        )
        return next((f"{name} = {limit:g} s" for name, seconds, limit in spent if seconds > limit), "")
