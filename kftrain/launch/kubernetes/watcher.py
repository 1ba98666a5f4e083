"""Sees one job to its end: looks, says what has changed, and gives up what makes no sense to wait for."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import datetime, timezone

from kftrain.config import Config
from kftrain.errors import FailureClass, FencedError
from kftrain.launch.kubernetes import diagnosis, observation, states
from kftrain.launch.kubernetes.annotations import PROGRESS_ANNOTATION, SEEN_ANNOTATION, STATE_ANNOTATION
from kftrain.launch.kubernetes.clock import STARTING, Clock, Limits
from kftrain.launch.kubernetes.failures import JobFailedError, lacked_storage
from kftrain.launch.kubernetes.job_client import JobClient
from kftrain.launch.kubernetes.lease import Lease
from kftrain.launch.kubernetes.logs import Logs
from kftrain.launch.kubernetes.observation import Observation, Pod
from kftrain.launch.kubernetes.pod_exits import PodBudget, PodExits
from kftrain.launch.kubernetes.states import Assessment, State
from kftrain.launch.spec import WORKER, JobSpec
from kftrain.progress import to_log
from kftrain.run.best_effort import best_effort
from kftrain.run.completion import is_complete
from kftrain.run.error import ErrorDocument, read_error
from kftrain.run.paths import RunPaths

ANNOTATE_SECONDS = 30.0
EXPLAIN_SECONDS = 3.0
"""Between two looks at the sources that only explain."""

WATCH_PAUSE_SECONDS = 1.0
NOTICE_SECONDS = 60.0
"""How long after the timeout of their collective operations workers that have lost a peer have ended, too."""


class Watcher:
    """One job of this launcher, from its creation or adoption on."""

    def __init__(self, cluster: JobClient, config: Config, spec: JobSpec, lease: Lease, wake: threading.Event) -> None:
        settings, paths = config.launch.kubernetes, RunPaths(spec.run_uri)
        self._config = config
        self._cluster = cluster
        self._spec = spec
        self._paths = paths
        self._lease = lease
        self._name = lease.name
        self._limits = Limits(
            settings.queue_timeout_seconds, settings.start_timeout_seconds, settings.training_timeout_seconds
        )
        self._logs = Logs(cluster, spec.num_pods)
        self._pod_exits = PodExits(config.launch.timeout_seconds + NOTICE_SECONDS)
        self._wake = wake
        self._budget = PodBudget(config.launch.max_restarts_without_progress, paths)
        self._claimed_by = -1
        self._clock = Clock(time.monotonic())
        self._state = State.QUEUED
        self._shown = ""
        self._seen_at = time.time()
        self._is_fenced = False
        """Whether another launch holds the job, or one of its name."""
        self._was_hopeless = False
        """At the last look. One look may see a Workload that is younger than the job it has read, or half a message."""
        self._explained_at = float("-inf")
        self._annotated_at = float("-inf")
        self._events: Sequence[observation.Event] = ()
        self._lost_nodes: frozenset[str] = frozenset()
        self._closed = threading.Event()
        threading.Thread(target=self._watch, daemon=True, name=f"watch of {lease.name}").start()

    def look(self) -> State:
        """One look at the job; returns its state.

        Raises JobFailedError for what makes no sense to wait for, FencedError where another launch holds the job.
        """
        seen = self._observe()
        assessment = states.assess(seen)
        now = time.monotonic()
        self._clock = self._clock.advance(self._state, now).advance(assessment.state, now)
        self._show(assessment)
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
        """Ends the watch and the logs, once the pods are gone, or at once."""
        self._closed.set()
        self._logs.close(wait)

    def diagnose(self) -> ErrorDocument:
        """Why it failed, as far as pods, logs and the workers' own error tell."""
        error = None
        with best_effort("the workers' error could not be read"):
            error = read_error(self._paths.error)
        return diagnosis.diagnose(self._spec.task, error, self._pod_exits.last(), self._logs.tails())

    def _observe(self) -> Observation:
        now = self._seen_at = time.time()
        item = self._cluster.read_job(self._name)
        kind = self._cluster.kind
        job = observation.parse_job(item, now, kind) if item and item["metadata"]["uid"] == self._lease.uid else None
        self._is_fenced = item is not None and self._lease.is_lost(item)
        found = observation.parse_pods(self._cluster.list_pods(self._name), now, kind)
        for pod in found:
            self._pod_exits.note(pod, time.monotonic())
        pods = observation.newest(found)
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
        """Asks for events and nodes, only while something waits, and not at every look."""
        if time.monotonic() - self._explained_at < EXPLAIN_SECONDS:
            return
        self._explained_at = time.monotonic()
        waits = len(pods) < self._spec.num_pods or any(not pod.has_log for pod in pods)
        self._events = [observation.parse_event(e) for e in self._cluster.list_warnings()] if waits else ()
        doubtful = {pod.node for pod in pods if pod.node and (pod.overdue_seconds or (pod.running and not pod.ready))}
        nodes = ((name, self._cluster.read_node(name)) for name in sorted(doubtful))
        self._lost_nodes = frozenset(name for name, node in nodes if node and observation.node_is_lost(node))

    def _show(self, assessment: Assessment) -> None:
        self._state = assessment.state
        if assessment.text != self._shown:
            self._shown = assessment.text
            self._annotated_at = float("-inf")
            to_log(f"{self._name}: {assessment.text}")

    def _is_complete(self) -> bool:
        """Whether a job that is gone had succeeded: gc and its time to live take it while a laptop sleeps."""
        complete = False
        with best_effort("what proves the job's success could not be read"):
            complete = is_complete(self._spec.task, self._paths, self._config)
        if complete:
            to_log(f"{self._name}: it is gone, and everything that it was to produce is there")
        return complete

    def _give_up_if_hopeless(self, assessment: Assessment) -> None:
        if assessment.state is State.GONE:
            raise self._failed("somebody deleted the job", FailureClass.DELETED)
        if assessment.hopeless is not None and self._was_hopeless:
            raise self._failed(assessment.hopeless.text, assessment.hopeless.failure_class)
        self._was_hopeless = assessment.hopeless is not None

    def _give_up_if_spent(self, seen: Observation) -> None:
        """Where pods end again and again without a new checkpoint: the operator itself would go on for ever."""
        failed = 0
        with best_effort("the attempts could not be counted"):
            self._budget.begin(seen.pods, self._seen_at)
            failed = self._budget.spent(self._pod_exits.bad(), seen.pods)
        if failed:
            found = self.diagnose()
            text = f"{failed} attempts in a row without a new checkpoint, at last: {found.line}"
            raise self._failed(text, found.failure_class, found)

    def _give_up_if_late(self, assessment: Assessment, seen: Observation) -> None:
        exceeded = self._clock.exceeded(self._limits)
        if not exceeded or (assessment.state in STARTING and self._is_excused(assessment, seen)):
            return
        first = next(iter(assessment.reasons), None)
        running = f", {sum(pod.running for pod in seen.pods)} of {self._spec.num_pods} workers run" if seen.pods else ""
        text = f"{assessment.state.value} for longer than {exceeded}{running}"
        if first is not None:
            raise self._failed(f"{text}: {first.text}", first.failure_class)
        found = self.diagnose() if assessment.state in STARTING and self._pod_exits.last() else None
        if found is not None and lacked_storage(found):  # such attempts do not count, so it ends here
            raise self._failed(f"{text}, at last: {found.line}", FailureClass.STORAGE, found)
        raise self._failed(text, FailureClass.DEADLINE)

    def _is_excused(self, assessment: Assessment, seen: Observation) -> bool:
        """Whether a start that takes too long is none, or is held up by storage, without which nothing can start.

        Training may have begun though no step was seen: logs may be out of reach, and the data is verified before.
        """
        claimed = None
        with best_effort("the attempts could not be read"):
            self._budget.begin(seen.pods, self._seen_at)
            claimed = self._budget.has_claim()
        if claimed is None:
            self._clock = self._clock.started_anew()
            return True
        if assessment.state is not State.RENDEZVOUS or not claimed:
            return False
        self._claimed_by = self._budget.num_looks
        return True

    def _release(self, seen: Observation) -> None:
        """Takes pods of dead nodes off the API server, so that they can be replaced elsewhere."""
        for pod in states.stuck_pods(seen):
            if self._cluster.force_delete_pod(pod.name, pod.uid):
                to_log(f"{pod.name} was taken off node {pod.node}, which is dead")

    def _annotate(self) -> None:
        """Leaves state and progress on the job, where `kftrain status` and kubectl show them."""
        if time.monotonic() - self._annotated_at < ANNOTATE_SECONDS:
            return
        self._annotated_at = time.monotonic()
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        annotations = {
            SEEN_ANNOTATION: now,
            STATE_ANNOTATION: self._shown,
            PROGRESS_ANNOTATION: self._logs.progress,
        }
        self._cluster.annotate_job(self._name, annotations)

    def _failed(self, what: str, kind: FailureClass, found: ErrorDocument | None = None) -> JobFailedError:
        where = f"job {self._name} in namespace {self._cluster.namespace}"
        return JobFailedError(what, kind, where=where, found=found)

    def _watch(self) -> None:
        """Notes how pods end: under `restartPolicy: ExitCode` a failed pod is replaced within a tenth of a second."""
        while not self._closed.is_set():
            for item in self._cluster.watch_pods(self._name):
                if self._closed.is_set():
                    return
                for pod in observation.parse_pods([item], time.time(), self._cluster.kind):
                    if self._pod_exits.note(pod, time.monotonic()):
                        self._wake.set()
            self._closed.wait(WATCH_PAUSE_SECONDS)
