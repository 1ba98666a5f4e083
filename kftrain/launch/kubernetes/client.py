"""The cluster as launchers and people see it: this alone, and `job_client.py` for jobs, talks to an API server.

Every call has a timeout. What passes (429, 5xx, connections that break, an API server that is restarted, the training
operator's webhook without an endpoint) is waited out for ten minutes, with one line when it begins and one when it
ends. What does not pass becomes a LaunchError; a missing object is None. Sources that only explain (events, Kueue's
Workloads, nodes, logs) may be forbidden: that costs one warning that names the verb, and the launcher goes on without.

Answers are plain JSON; `observation.py` makes something of it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from kftrain.core.progress import Progress, to_log
from kftrain.errors import LaunchError
from kftrain.launch.kubernetes.retry import FORBIDDEN_SECONDS, PASSING, UNAUTHORIZED, RetryPolicy, format_message

WORKLOADS = ("kueue.x-k8s.io", "v1beta1", "workloads")
WORKFLOWS = ("argoproj.io", "v1alpha1", "workflows")
WORKLOAD_JOB_LABEL = "kueue.x-k8s.io/job-uid"
LIST_WORKLOADS = "list workloads.kueue.x-k8s.io"
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

STREAM_TIMEOUT_SECONDS = (5.0, 60.0)
EXPLAIN_OUTAGE_SECONDS = 5.0
"""Seconds for which calls to a source that only explains are repeated: they must not hold up what matters."""

FORBIDDEN, NOT_FOUND, CONFLICT = 403, 404, 409
IDENTITY_CHARACTERS = 16

Object = dict[str, Any]


class Cluster:
    """Calls to the API server for one namespace, by the kubeconfig or, in a pod, by its service account."""

    def __init__(self, namespace: str = "", warn: Progress = to_log) -> None:
        from kubernetes import client

        configuration, default_namespace = _connect()
        self.namespace = namespace or default_namespace
        self.identity = identify_cluster(configuration)
        """Digest that tells this cluster from others, see `identify_cluster`."""
        self.own_namespace = default_namespace if SERVICE_ACCOUNT.exists() else ""
        """Namespace of the pod that this process runs in; empty outside a cluster."""
        api_client = client.ApiClient(configuration)
        self._custom = client.CustomObjectsApi(api_client)
        self._core = client.CoreV1Api(api_client)
        self._access = client.AuthorizationV1Api(api_client)
        self._api_exception = client.exceptions.ApiException
        self.retry_policy = RetryPolicy(self._api_exception, warn)
        self._warn = warn
        self._lock = threading.Lock()
        self._forbidden: set[str] = set()
        self._refused_since: dict[str, float] = {}
        """Verb -> monotonic time of the first refusal since the last success; infinite while the verb is allowed."""
        self._silent: set[str] = set()
        """Verbs that got no answer when they were asked last."""
        self._warned: set[str] = set()
        self._always_asked: frozenset[str] = frozenset()
        """Verbs that are tried again even where they are forbidden."""

    # -- pods ---------------------------------------------------------------------------------------------------------

    def read_pod(self, name: str, namespace: str = "") -> Object | None:
        """Return a pod of the jobs' namespace, or of `namespace`; None where it is gone. Raises LaunchError."""
        reading = self._json(self._core.read_namespaced_pod)
        what, place = f"pod {name} cannot be read", namespace or self.namespace
        pod: Object | None = self._ask(what, (NOT_FOUND,), reading, name, place)
        return pod

    def fail_pod(self, name: str, uid: str) -> bool:
        """Set a pod's phase to Failed in the place of its node, which must be known to be dead.

        Returns False where this account may not, or where the pod is gone.
        """
        body = {"metadata": {"uid": uid}, "status": {"phase": "Failed", "reason": "NodeLost"}}
        patch = self._json(self._core.patch_namespaced_pod_status)
        verb = "patch pods/status"
        return self._explain(verb, EXPLAIN_OUTAGE_SECONDS, patch, name, self.namespace, body) is not None

    def force_delete_pod(self, name: str, uid: str) -> bool:
        """Delete a pod from the API server without asking its node, which must be known to be dead.

        Returns False where this account may not, or where somebody else deleted the pod first.
        """
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}
        delete = self._json(self._core.delete_namespaced_pod)
        return self._explain("delete pods", EXPLAIN_OUTAGE_SECONDS, delete, name, self.namespace, body=body) is not None

    # -- what explains ------------------------------------------------------------------------------------------------

    def list_warnings(self) -> list[Object]:
        """Return the warning events of the namespace; none where this account may not read them."""
        listing = self._json(self._core.list_namespaced_event)
        selector = {"field_selector": "type=Warning"}
        return self._explain("list events", EXPLAIN_OUTAGE_SECONDS, listing, self.namespace, **selector) or []

    def find_workload(self, job_uid: str) -> Object | None:
        """Return Kueue's Workload of a job; None where there is none or this account may not read it."""
        selector = f"{WORKLOAD_JOB_LABEL}={job_uid}"
        listing = self._custom.list_namespaced_custom_object
        workloads = self._explain(
            LIST_WORKLOADS, EXPLAIN_OUTAGE_SECONDS, listing, *self._locate(WORKLOADS), label_selector=selector
        )
        return workloads[0] if workloads else None

    def patch_workload(self, name: str, patch: Object) -> bool:
        """Merge `patch` into a Kueue Workload; False where the Workload is gone. Raises LaunchError."""
        return self._patch("the Workload cannot be changed", WORKLOADS, name, patch)

    @property
    def sees_workloads(self) -> bool:
        """True if the API server answered the last question about Workloads and this account may read them."""
        return LIST_WORKLOADS not in self._forbidden and LIST_WORKLOADS not in self._silent

    def read_node(self, name: str) -> Object | None:
        """Return a node; None where it is gone or this account may not read it."""
        answer = self._explain("get nodes", EXPLAIN_OUTAGE_SECONDS, self._json(self._core.read_node), name)
        return answer if isinstance(answer, dict) else None

    def list_nodes(self) -> list[Object] | None:
        """Return all nodes; None where this account may not list them, which is said."""
        answer = self._explain("list nodes", EXPLAIN_OUTAGE_SECONDS, self._json(self._core.list_node))
        return answer if isinstance(answer, list) else None

    def read_workflow(self, name: str, retried: bool = True) -> Object | None:
        """Return an Argo Workflow of this namespace; None where it is gone or this account may not read it.

        During an outage the call raises LaunchError after ten minutes, or with `retried=False` returns None within
        seconds.
        """
        reading, seconds = self._custom.get_namespaced_custom_object, None if retried else EXPLAIN_OUTAGE_SECONDS
        answer = self._explain("get workflows", seconds, reading, *self._locate(WORKFLOWS), name)
        return answer if isinstance(answer, dict) else None

    @property
    def sees_workflows(self) -> bool:
        """True if the API server answered the last question about a Workflow and this account may read it."""
        return not {"get workflows"} & (self._forbidden | self._silent)

    # -- how ----------------------------------------------------------------------------------------------------------

    def _locate(self, kind: tuple[str, ...]) -> tuple[str, str, str, str]:
        return kind[0], kind[1], self.namespace, kind[2]

    def _ask(
        self, what: str, answers: Collection[int], method: Callable[..., Any], *arguments: Any, **options: Any
    ) -> Any:
        """Call; return None where the status of an error is one of `answers`. Raises LaunchError, which says `what`."""
        try:
            return self.retry_policy.call(method, *arguments, **options)
        except self._api_exception as error:
            if error.status in answers:
                return None
            raise self._make_refusal(what, error) from error

    def _patch(self, what: str, kind: tuple[str, ...], name: str, patch: Object) -> bool:
        method = self._custom.patch_namespaced_custom_object
        return self._ask(what, (NOT_FOUND,), method, *self._locate(kind), name, patch) is not None

    def _explain(
        self, verb: str, seconds: float | None, method: Callable[..., Any], *arguments: Any, **options: Any
    ) -> Any:
        """Call a source that only explains; return its items, or None where it is forbidden, absent or silent.

        The call is repeated for `seconds`, and is left out once this process was told to stop. With `seconds=None` it
        is repeated as long as any call that matters, and raises LaunchError after that outage.
        """
        if verb in self._forbidden or (seconds is not None and self.retry_policy.hurried()):
            return None
        self._silent.discard(verb)
        try:
            answer = self.retry_policy.call(method, *arguments, outage_seconds=seconds, **options)
        except self._api_exception as error:
            if error.status not in (NOT_FOUND, CONFLICT):
                self._silent.add(verb)
                self._say_forbidden(verb, error)
            return None
        except LaunchError:
            self._silent.add(verb)
            if seconds is None:
                raise
            return None
        self._note_allowed(verb)
        return answer.get("items", answer)

    def _note_allowed(self, verb: str) -> None:
        with self._lock:
            self._refused_since[verb] = float("inf")

    def _say_forbidden(self, verb: str, error: Any) -> None:
        """Warn once that a call fails, and remember a forbidden verb so that `_explain` leaves it out.

        A verb that was allowed before gets a minute first: an API server that has just started, or a webhook that is
        away, refuses it for a moment. Verbs in `_always_asked` are never left out.
        """
        with self._lock:
            since = self._refused_since.get(verb, float("-inf"))
            self._refused_since[verb] = min(since, time.monotonic())
            if error.status == FORBIDDEN and time.monotonic() - self._refused_since[verb] < FORBIDDEN_SECONDS:
                return
            known = verb in self._warned
            self._warned.add(verb)
            if error.status == FORBIDDEN and verb not in self._always_asked:
                self._forbidden.add(verb)
        if not known:
            why = "may not" if error.status == FORBIDDEN else f"{format_message(error)}: cannot"
            self._warn(f"{why} {verb} in namespace {self.namespace}: some of what happens stays unknown")

    def _json(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a typed method of the client so that it returns plain JSON."""

        @functools.wraps(method)
        def call(*arguments: Any, **options: Any) -> Any:
            return json.loads(method(*arguments, _preload_content=False, **options).data)

        return call

    def _stream(self, verb: str, path: str, query: list[tuple[str, str]], limit: int | None = None) -> Iterator[bytes]:
        """Yield the lines of a streamed answer until it ends. Raises ConnectionError: the caller connects again."""
        import urllib3

        if verb in self._forbidden:
            return
        try:
            with self._open_stream(path, query) as response:
                self._note_allowed(verb)
                yield from _split_lines(response, limit)
        except self._api_exception as error:
            if error.status == FORBIDDEN:
                self._say_forbidden(verb, error)
            elif error.status == UNAUTHORIZED or error.status in PASSING:
                raise ConnectionError(format_message(error)) from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise ConnectionError(f"{verb}: {type(error).__name__}") from error

    def _open_stream(self, path: str, query: list[tuple[str, str]]) -> Any:
        return self._core.api_client.call_api(
            path,
            "GET",
            query_params=query,
            auth_settings=["BearerToken"],
            _preload_content=False,
            _return_http_data_only=True,
            _request_timeout=STREAM_TIMEOUT_SECONDS,
        )

    def _make_refusal(self, what: str, error: Any, kind: type[LaunchError] = LaunchError) -> LaunchError:
        return kind(f"{what}: {format_message(error)}", where=f"namespace {self.namespace}")


def _split_lines(response: Any, limit: int | None) -> Iterator[bytes]:
    """Split a response into lines with their newlines, each cut to `limit` bytes; a torn last line has no newline."""
    rest = b""
    for chunk in response.stream():
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line[:limit] + b"\n"
        rest = rest[:limit]  # of a line without an end, no more than what is shown is kept
    if rest:
        yield rest


def _connect() -> tuple[Any, str]:
    """Return the client's configuration for the API server and the default namespace. Raises LaunchError."""
    from kubernetes import client, config

    configuration = client.Configuration()
    configuration.retries = False  # urllib3 would repeat calls unseen, and sleep as long as a server asks for
    try:
        if SERVICE_ACCOUNT.exists():
            config.load_incluster_config(client_configuration=configuration)
            return configuration, SERVICE_ACCOUNT.read_text().strip()
        path = os.environ.get("KUBECONFIG") or None  # the client itself reads the variable only when it is imported
        config.load_kube_config(path, client_configuration=configuration)
        _, context = config.list_kube_config_contexts(path)
    except config.ConfigException as error:
        raise LaunchError(f"no cluster: {error}", where="launch.backend", fix="set KUBECONFIG") from error
    return configuration, context["context"].get("namespace") or "default"


def identify_cluster(configuration: Any) -> str:
    """Return a digest that tells a cluster from others: of its authority's certificate, else of its address."""
    path = configuration.ssl_ca_cert
    known = Path(path).read_bytes().strip() if path else str(configuration.host).encode()
    return hashlib.sha256(known).hexdigest()[:IDENTITY_CHARACTERS]
