"""The launcher of Kubernetes: a job of any kind, created or adopted, followed until it has ended, and deleted.

An operator restarts pods by their exit codes but neither counts nor times anything reliably; that is done here. A
launcher that is killed leaves the job: the next one adopts it. One that ends in any other way deletes it.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from types import FrameType

import yaml

from kftrain.config import Config
from kftrain.core import storage
from kftrain.core.progress import to_log
from kftrain.errors import FailureClass, FencedError, KftrainError, LaunchError, Preempted
from kftrain.launch.base import Launcher, Request
from kftrain.launch.kubernetes import diagnosis, ownership
from kftrain.launch.kubernetes.control import ClusterJobs, delete_jobs
from kftrain.launch.kubernetes.diagnosis import JobFailedError
from kftrain.launch.kubernetes.fabric import build_resources, require_devices
from kftrain.launch.kubernetes.kinds import load_kind, load_kinds
from kftrain.launch.kubernetes.kinds.kind import Kind
from kftrain.launch.kubernetes.lease import Lease, create_or_adopt, delete_held, has_pods_at_work, release_pods
from kftrain.launch.kubernetes.states import State
from kftrain.launch.kubernetes.watcher import Watcher
from kftrain.launch.kubernetes.workflow import TerminateWatch
from kftrain.launch.spec import LAUNCHER_TIMEOUT_ENV, JobSpec
from kftrain.process.signals import INTERRUPT, STOP, handle_signals
from kftrain.run.best_effort import REPORT_SECONDS, best_effort
from kftrain.run.error import ErrorDocument, read_error
from kftrain.run.heartbeat import Heartbeat
from kftrain.run.job_tasks import JOB_TASKS, SHARDING, TRAINING
from kftrain.run.paths import RunPaths

POLL_SECONDS = 1.0
GOING_SECONDS = 300.0
LAUNCHER_TIMEOUT_SECONDS = 1800
"""A job whose launcher has been silent for so long commits and ends; only where the launcher runs in the cluster."""

NEEDED = ("create", "get", "list", "delete")
"""Verbs that a launcher needs for its jobs; it can do without the others."""


class ClusterLauncher(ClusterJobs, Launcher):
    """Runs the jobs of a run on the cluster of the kubeconfig or, in a pod, of its service account."""

    def __init__(self, config: Config) -> None:
        tasks = (TRAINING, SHARDING) if config.data.shard_pods > 1 else (TRAINING,)
        kinds = [load_kind(config.launch.backend, task) for task in tasks]
        super().__init__(kinds, config.launch.kubernetes.namespace)
        self._is_terminated = False
        """True once somebody terminates the pipeline run: then this process has seconds left."""
        self._config = config
        self._wake = threading.Event()

    def check(self) -> None:
        """Raise LaunchError if this account cannot create such jobs on the cluster: see `Launcher.check`."""
        for cluster in self.clusters:
            kind = cluster.kind
            if not cluster.knows_jobs():
                what = f"this cluster has no {kind.name}s ({kind.api_version})"
                raise LaunchError(what, where="launch.backend", fix=kind.install)
            refused = [verb for verb in NEEDED if not cluster.is_allowed(verb)]
            if refused:
                what = f"the account of this launcher may not {', '.join(refused)} {kind.name}s"
                fix = "give it a role with these verbs, or leave launch.kubernetes.namespace empty"
                raise LaunchError(what, where=f"namespace {cluster.namespace}", fix=fix)
        self._require_fabric()

    def _require_fabric(self) -> None:
        """Raise LaunchError if the nodes lack what the fabric needs, as far as this account may see them."""
        settings = self._config.launch.kubernetes
        if settings.fabric.check_nodes and build_resources(settings.fabric):
            nodes = self.clusters[0].list_nodes()
            if nodes is not None:
                require_devices(settings, self._config.launch.nodes, nodes)

    def build(self, spec: JobSpec) -> Request:
        """Build the document of the job. `run` adds its owner and the mark of the launch: see `Launcher.build`."""
        document = self._load_kind(spec).build(spec, self._config)
        return Request(document, f"---\n{yaml.safe_dump(document, sort_keys=False)}")

    def clean(self, paths: RunPaths, job_id: str) -> list[str]:
        """Delete a run's jobs of every kind: a run that cannot be read does not name its own. See `Launcher.clean`."""
        everything = ClusterJobs(load_kinds(), self._config.launch.kubernetes.namespace)
        return delete_jobs(everything.clusters, self._config, paths, job_id)

    def run(self, spec: JobSpec) -> int:
        """Run one job, whose restarts the operator makes, and delete it in the end: see `Launcher.run`.

        Raises LaunchError, StorageError where the attempts were used up because storage is full or away, and
        FencedError where another launch holds the job, or a job with another specification holds the run: that job is
        left alone.
        """
        kind = self._load_kind(spec)
        self._cluster = next(cluster for cluster in self.clusters if cluster.kind is kind)
        self._cluster.retry_policy.hurried = lambda: self.interrupted
        with handle_signals((INTERRUPT, *STOP), self._on_signal):
            try:
                return self._run(spec)
            except JobFailedError as failed:
                raise failed.error from None
            except LaunchError as error:
                if not self.interrupted:
                    raise
                to_log(f"warning: {error.line}")
                return Preempted.exit_code

    def prepare(self, spec: JobSpec) -> None:
        """Connect to the cluster, and prepare nothing else: a pod that waits would hold its GPUs."""
        _ = self.clusters

    def _load_kind(self, spec: JobSpec) -> Kind:
        return load_kind(self._config.launch.backend, JOB_TASKS[spec.task])

    def _run(self, spec: JobSpec) -> int:
        """Create or adopt the job, follow it to its end and delete it; return its exit code."""
        paths = RunPaths(spec.run_uri)
        owner, kfp_run_id = ownership.find_owner(self._cluster)
        if self._cluster.own_namespace:
            timeout = {LAUNCHER_TIMEOUT_ENV: str(LAUNCHER_TIMEOUT_SECONDS)}
            spec = dataclasses.replace(spec, environment={**spec.environment, **timeout})
        document = self._cluster.kind.build(spec, self._config, kfp_run_id, owner)
        name = document["metadata"]["name"]
        with Heartbeat(paths), TerminateWatch(self._cluster, owner, self._on_terminate):
            lease = create_or_adopt(self._cluster, document, lambda: self.interrupted)
            if lease is None:
                return Preempted.exit_code
            watcher, code = None, 0
            where = f"job {name} in namespace {self._cluster.namespace}"
            try:
                to_log(f"{where}: {spec.size}")
                watcher = Watcher(self._cluster, self._config, spec, lease, self._wake)
                code = self._follow(watcher, spec, paths)
            finally:
                is_own = self._end(lease)  # on every way out: a job that nobody follows would hold its GPUs
                if watcher is not None:  # only now: workers that commit have something to say
                    watcher.close(wait=not self._is_terminated)
        if code and not is_own:
            raise FencedError(f"{FencedError.BY_LAUNCHER} by now", where=where)
        if code and self._is_terminated:
            error = Preempted("somebody terminated the run in the Kubeflow UI", where=paths.uri)
            _publish_failure(paths, diagnosis.summarize_launch(spec.task, FailureClass.TERMINATED, error))
            raise error
        return code

    def _follow(self, watcher: Watcher, spec: JobSpec, paths: RunPaths) -> int:
        """Look at the job until it has ended or this process is told to stop; publish why it failed, if it did."""
        try:
            while not self.interrupted:
                state = watcher.look()
                if state is State.SUCCEEDED:
                    return 0
                if state is State.FAILED:
                    summary = watcher.diagnose()
                    if summary.exit_code == FencedError.exit_code:
                        raise FencedError(FencedError.BY_ATTEMPT, where=paths.uri)
                    _publish_failure(paths, summary)
                    return summary.exit_code
                self._wake.wait(POLL_SECONDS)
                self._wake.clear()
        except JobFailedError as failed:
            summary = diagnosis.summarize_launch(spec.task, failed.kind, failed.error, failed.last_summary)
            _publish_failure(paths, summary)
            raise
        return Preempted.exit_code

    def _end(self, lease: Lease) -> bool:
        """Delete the job and wait until its pods are gone, so that the next attempt does not meet them.

        While the pipeline run is being terminated there is no time to wait, and no next attempt. Returns False if
        another launch holds the job by now.
        """
        try:
            if not delete_held(self._cluster, lease):
                return False
            deadline = time.monotonic() + GOING_SECONDS
            while (
                not self._is_terminated and has_pods_at_work(self._cluster, lease.name) and time.monotonic() < deadline
            ):
                release_pods(self._cluster, lease.name)
                time.sleep(POLL_SECONDS)
        except KftrainError as error:  # what ended the job is the better error
            to_log(f"warning: the job may still be there: {error.line}; kftrain gc removes it")
        return True

    def _on_terminate(self) -> None:
        self._is_terminated = True
        self.interrupted = True
        self._wake.set()
        to_log("the pipeline run is being terminated: its job is deleted now")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Note the signal, without a lock: the handler may have interrupted the thread that holds it."""
        self.interrupted = True


def _publish_failure(paths: RunPaths, summary: ErrorDocument) -> None:
    """Publish the summary of a failure, also as the run's error where the workers wrote none or another one."""
    with best_effort("why the job failed could not be written", REPORT_SECONDS):
        storage.publish_json(paths.failure, summary.to_dict())
        error = read_error(paths.error)
        if error is None or error.line != summary.line:
            storage.publish_json(paths.error, summary.to_dict())
    to_log(f"failed: {summary.failure_class.value}: {summary.line}")
