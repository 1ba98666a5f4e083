"""The cluster as the launcher sees it: PyTorchJobs, their pods, their logs. Only this talks to an API server.

Every call has a timeout. What the API server answers with an error becomes a LaunchError; a missing object is None.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kftrain.errors import LaunchError
from kftrain.launch.pytorchjob import API_VERSION

GROUP, VERSION = API_VERSION.split("/")
PLURAL = "pytorchjobs"
JOB_NAME_LABEL = "training.kubeflow.org/job-name"
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
CALL_TIMEOUT_SECONDS = (5.0, 30.0)
LOG_TIMEOUT_SECONDS = (5.0, 60.0)
RECONNECT_SECONDS = 1.0
NOT_FOUND, CONFLICT = 404, 409


@dataclass(frozen=True)
class Pod:
    """What matters of a worker pod."""

    name: str
    uid: str
    index: int
    phase: str
    reason: str
    """Why it does not run yet, in the scheduler's or the kubelet's words; empty: it runs or has run."""
    started: bool
    """Whether its container has run, so that there is a log."""
    exit_code: int | None
    """Of the container, once it has ended."""


class Cluster:
    """One namespace of a cluster, by the kubeconfig or, in a pod, by its service account."""

    def __init__(self, namespace: str = "") -> None:
        client, default_namespace = _connect()
        self.namespace = namespace or default_namespace
        self._jobs, self._pods = client.CustomObjectsApi(), client.CoreV1Api()
        self._api_exception = client.exceptions.ApiException

    def create_job(self, document: dict[str, Any]) -> bool:
        """Creates a job; False where one of this name exists. Unknown fields are refused. Raises LaunchError."""
        try:
            self._jobs.create_namespaced_custom_object(
                GROUP,
                VERSION,
                self.namespace,
                PLURAL,
                document,
                field_validation="Strict",
                _request_timeout=CALL_TIMEOUT_SECONDS,
            )
        except self._api_exception as error:
            if error.status == CONFLICT:
                return False
            raise self._launch_error("the API server refused the job", error) from error
        return True

    def read_job(self, name: str) -> dict[str, Any] | None:
        """A job as it is now. Raises LaunchError."""
        try:
            found = self._jobs.get_namespaced_custom_object(
                GROUP, VERSION, self.namespace, PLURAL, name, _request_timeout=CALL_TIMEOUT_SECONDS
            )
        except self._api_exception as error:
            if error.status == NOT_FOUND:
                return None
            raise self._launch_error("the job cannot be read", error) from error
        assert isinstance(found, dict)
        return found

    def list_job_names(self, selector: str) -> list[str]:
        """Names of the jobs with these labels. Raises LaunchError."""
        try:
            found = self._jobs.list_namespaced_custom_object(
                GROUP, VERSION, self.namespace, PLURAL, label_selector=selector, _request_timeout=CALL_TIMEOUT_SECONDS
            )
        except self._api_exception as error:
            raise self._launch_error("the jobs cannot be listed", error) from error
        return [item["metadata"]["name"] for item in found["items"]]

    def delete_job(self, name: str) -> None:
        """Deletes a job; its pods get SIGTERM and their grace. Nothing happens where there is none."""
        try:
            self._jobs.delete_namespaced_custom_object(
                GROUP,
                VERSION,
                self.namespace,
                PLURAL,
                name,
                propagation_policy="Background",
                _request_timeout=CALL_TIMEOUT_SECONDS,
            )
        except self._api_exception as error:
            if error.status != NOT_FOUND:
                raise self._launch_error("the job cannot be deleted", error) from error

    def list_pods(self, job_name: str) -> list[Pod]:
        """The job's pods, by index. Raises LaunchError."""
        try:
            found = self._pods.list_namespaced_pod(
                self.namespace, label_selector=f"{JOB_NAME_LABEL}={job_name}", _request_timeout=CALL_TIMEOUT_SECONDS
            )
        except self._api_exception as error:
            raise self._launch_error("the job's pods cannot be listed", error) from error
        return sorted((_pod(item) for item in found.items), key=lambda pod: pod.index)

    def follow_log(self, pod_name: str, uid: str) -> Iterator[str]:
        """Lines of a pod's log until its container has ended; connects again where the connection breaks.

        `uid`: of this very pod; the one that takes its place after a restart has the same name.
        """
        last = ""
        while True:
            pod = self._read_pod(pod_name)
            if pod is None or pod.uid != uid:
                return
            ended = pod.exit_code is not None
            for stamped in self._log_lines(pod_name):
                stamp, _, line = stamped.partition(" ")
                stamp = _sortable(stamp)
                if stamp > last:  # the log begins anew with every connection
                    last = stamp
                    yield line
            if ended:
                return
            time.sleep(RECONNECT_SECONDS)

    def _read_pod(self, name: str) -> Pod | None:
        try:
            return _pod(self._pods.read_namespaced_pod(name, self.namespace, _request_timeout=CALL_TIMEOUT_SECONDS))
        except self._api_exception as error:
            if error.status == NOT_FOUND:
                return None
            raise self._launch_error(f"pod {name} cannot be read", error) from error

    def _log_lines(self, pod_name: str) -> Iterator[str]:
        """Lines with their times, until the container ends, the connection breaks or nothing comes for a while."""
        try:
            response = self._pods.read_namespaced_pod_log(
                pod_name,
                self.namespace,
                container="pytorch",
                follow=True,
                timestamps=True,
                _preload_content=False,
                _request_timeout=LOG_TIMEOUT_SECONDS,
            )
        except self._api_exception:
            return
        with response:
            yield from _lines(response)

    def _launch_error(self, what: str, error: Any) -> LaunchError:
        message = " ".join(str(error.body or error.reason).split())
        return LaunchError(f"{what}: {error.status} {message[:500]}", where=f"namespace {self.namespace}")


def _sortable(stamp: str) -> str:
    """An RFC 3339 time with all nine digits of its fraction, which the kubelet trims."""
    seconds, _, fraction = stamp.rstrip("Z").partition(".")
    return f"{seconds}.{fraction:0<9}"


def _lines(response: Any) -> Iterator[str]:
    import urllib3

    rest = b""
    try:
        for chunk in response.stream():
            *whole, rest = (rest + chunk).split(b"\n")
            yield from (line.decode(errors="replace") for line in whole)
    except urllib3.exceptions.HTTPError:
        return
    if rest:
        yield rest.decode(errors="replace")


def _connect() -> tuple[Any, str]:
    """The kubernetes client module, configured, and the namespace to use."""
    from kubernetes import client, config

    if NAMESPACE_FILE.exists():
        config.load_incluster_config()
        return client, NAMESPACE_FILE.read_text().strip()
    try:
        config.load_kube_config()
        _, context = config.list_kube_config_contexts()
    except config.ConfigException as error:
        raise LaunchError(
            f"no cluster: {error}", where="launch.backend", value="pytorchjob", fix="set KUBECONFIG"
        ) from error
    return client, context["context"].get("namespace", "default")


def _pod(item: Any) -> Pod:
    status = item.status
    state = next((s for s in status.container_statuses or [] if s.name == "pytorch"), None)
    terminated = state.state.terminated if state else None
    return Pod(
        name=item.metadata.name,
        uid=item.metadata.uid,
        index=int(item.metadata.labels.get("training.kubeflow.org/replica-index", "0")),
        phase=status.phase,
        reason=_waiting_reason(status, state),
        started=bool(state and (state.state.running or terminated)),
        exit_code=terminated.exit_code if terminated else None,
    )


def _waiting_reason(status: Any, state: Any) -> str:
    if state and state.state.waiting and state.state.waiting.reason not in (None, "ContainerCreating"):
        return f"{state.state.waiting.reason}: {state.state.waiting.message or ''}".rstrip(": ")
    for condition in status.conditions or []:
        if condition.type == "PodScheduled" and condition.status == "False":
            return f"{condition.reason}: {condition.message}"
    return ""
