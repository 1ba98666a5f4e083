"""The cluster launcher: a job as a PyTorchJob, followed until it has ended, and deleted.

The operator restarts pods by their exit codes; this counts the attempts that these restarts lead to, because the
operator does not. Logs of the pods are written through, so that a step's log is the training's log.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

from kftrain import attempts, storage
from kftrain.config import Config
from kftrain.contracts import RunPaths
from kftrain.errors import BUG_CODE, LaunchError, Preempted
from kftrain.launch import pytorchjob
from kftrain.launch.kubernetes_api import Cluster, Pod
from kftrain.launch.spec import JobSpec
from kftrain.progress import to_log

POLL_SECONDS = 1.0
DELETE_TIMEOUT_SECONDS = 300.0


class ClusterLauncher:
    """Runs jobs on the cluster of the kubeconfig or, in a pod, of its service account."""

    def __init__(self, config: Config, cluster: Cluster | None = None) -> None:
        self.interrupted = False
        self._config = config
        self._cluster = cluster or Cluster(config.launch.kubernetes.namespace)

    def run(self, spec: JobSpec) -> int:
        """See `Launcher.run`. The job is deleted when this returns or raises. Raises LaunchError."""
        document = pytorchjob.build(spec, self._config)
        name = document["metadata"]["name"]
        before = self._take_signals()
        try:
            self._create(document)
            to_log(
                f"job {name} in namespace {self._cluster.namespace}: {spec.nodes} x {spec.processes_per_node} processes"
            )
            return _Follower(self, self._cluster, self._config, spec, name).run()
        finally:
            self._delete(name)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _create(self, document: dict[str, Any]) -> None:
        """Creates the job, or finds that it is already there with the very same specification."""
        name = document["metadata"]["name"]
        deadline = time.monotonic() + DELETE_TIMEOUT_SECONDS
        while not self._cluster.create_job(document):
            existing = self._cluster.read_job(name)
            if existing is None:
                continue
            if "deletionTimestamp" not in existing["metadata"]:
                self._require_same(document, existing)
                to_log(f"job {name} is there already: following it")
                return
            if time.monotonic() > deadline:
                raise LaunchError("an older job of this run is being deleted and does not go", where=name)
            time.sleep(POLL_SECONDS)

    def _require_same(self, document: dict[str, Any], existing: dict[str, Any]) -> None:
        wanted = document["metadata"]["annotations"][pytorchjob.DIGEST_ANNOTATION]
        found = existing["metadata"].get("annotations", {}).get(pytorchjob.DIGEST_ANNOTATION)
        if found != wanted:
            raise LaunchError(
                "a job of this name with another specification is there",
                where=document["metadata"]["name"],
                value=found,
                fix=f"delete it: kubectl -n {self._cluster.namespace} delete pytorchjob {document['metadata']['name']}",
            )

    def _delete(self, name: str) -> None:
        """Deletes the job and waits until its pods are gone: the next attempt must not meet them."""
        self._cluster.delete_job(name)
        deadline = time.monotonic() + DELETE_TIMEOUT_SECONDS
        while any(pod.exit_code is None for pod in self._cluster.list_pods(name)) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def _take_signals(self) -> dict[int, Any]:
        if threading.current_thread() is not threading.main_thread():
            return {}
        return {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = True


class _Follower:
    """Sees one job to its end."""

    def __init__(self, launcher: ClusterLauncher, cluster: Cluster, config: Config, spec: JobSpec, name: str) -> None:
        self._launcher, self._cluster, self._config, self._spec, self._name = launcher, cluster, config, spec, name
        self._paths = RunPaths(spec.run_uri)
        self._followed: set[str] = set()
        self._reasons: dict[str, str] = {}
        self._start = time.monotonic()
        self._ever_started = False
        self._first_attempt = attempts.last_attempt(self._paths)
        self._threads: list[threading.Thread] = []

    def run(self) -> int:
        """The job's exit code: 0 where all pods succeeded, that of the run's error otherwise. Raises LaunchError."""
        while True:
            job, pods = self._cluster.read_job(self._name), self._cluster.list_pods(self._name)
            self._watch(pods)
            if self._launcher.interrupted:
                return Preempted.exit_code
            if job is None:
                raise LaunchError("somebody deleted the job", where=self._name, fix="resume the run")
            conditions = {c["type"] for c in job.get("status", {}).get("conditions", []) if c["status"] == "True"}
            if conditions & {"Succeeded", "Failed"}:
                self._finish_logs()
                return self._failure_code(pods) if "Failed" in conditions else 0
            self._check_budgets()
            time.sleep(POLL_SECONDS)

    def _watch(self, pods: list[Pod]) -> None:
        for pod in pods:
            self._ever_started |= pod.started
            if pod.started and pod.uid not in self._followed:
                self._followed.add(pod.uid)
                thread = threading.Thread(target=self._write_log, args=(pod.name, pod.uid), daemon=True)
                thread.start()
                self._threads.append(thread)
            if pod.reason and self._reasons.get(pod.name) != pod.reason:
                to_log(f"{pod.name} waits: {pod.reason}")
            self._reasons[pod.name] = pod.reason

    def _write_log(self, pod_name: str, uid: str) -> None:
        for line in self._cluster.follow_log(pod_name, uid):
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

    def _finish_logs(self) -> None:
        for thread in self._threads:
            thread.join(timeout=10.0)

    def _check_budgets(self) -> None:
        """Ends a job whose pods do not start, or whose attempts make no progress; the operator would go on for ever."""
        limit = self._config.launch.kubernetes.start_timeout_seconds
        if not self._ever_started and time.monotonic() - self._start > limit:
            reasons = "; ".join(sorted({reason for reason in self._reasons.values() if reason})) or "no reason is known"
            raise LaunchError(f"no pod started within {limit:.0f} s: {reasons}", where=self._name)
        failed = attempts.num_without_progress(self._paths, since=self._first_attempt)
        if failed > self._config.launch.max_restarts_without_progress + 1:
            raise LaunchError(
                f"{failed} attempts in a row without a new checkpoint", where=self._name, fix="see the log"
            )

    def _failure_code(self, pods: list[Pod]) -> int:
        document = storage.read_json_if_exists(self._paths.error)
        if document is not None:
            return int(document["exit_code"])
        codes = [pod.exit_code for pod in pods if pod.exit_code]
        return codes[0] if codes else BUG_CODE
