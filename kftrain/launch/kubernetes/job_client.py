"""The jobs of one kind, their pods and logs, as the API server has them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping

from kftrain.core.progress import Progress, to_log
from kftrain.errors import LaunchError
from kftrain.launch.kubernetes.client import CONFLICT, FORBIDDEN, NOT_FOUND, Cluster
from kftrain.launch.kubernetes.kinds.kind import Kind, Object

MAX_LINE_BYTES = 16_384
"""Bytes that are kept of a line of a log, from its beginning."""


class NotServedError(LaunchError):
    """The cluster has no such kind of job, or does not show it to this account."""


class JobClient(Cluster):
    """Calls to the API server about the jobs of one kind in one namespace, their pods and logs."""

    def __init__(self, kind: Kind, namespace: str = "", warn: Progress = to_log) -> None:
        super().__init__(namespace, warn)
        self.kind = kind
        self._resource = (kind.group, kind.version, kind.plural)
        self._patch_verb = f"patch {kind.plural}"
        self._always_asked = frozenset((self._patch_verb,))  # it tells others that this launcher lives

    def create_job(self, document: Object) -> str | None:
        """Create a job and return its uid, or None where a job of this name exists.

        If the answer to a creation is lost, the repeated call finds the job and returns None: the caller adopts it.
        Raises LaunchError, also for unknown fields.
        """
        what, create = "the API server refused the job", self._custom.create_namespaced_custom_object
        place = self._locate(self._resource)
        created = self._ask(what, (CONFLICT,), create, *place, document, field_validation="Strict")
        return None if created is None else str(created["metadata"]["uid"])

    def knows_jobs(self) -> bool:
        """Tell whether the API server has this kind of job. Raises LaunchError."""
        what, listing = "the API server does not say what it knows", self._custom.get_api_resources
        served = self._ask(what, (NOT_FOUND,), listing, self.kind.group, self.kind.version)
        return served is not None and any(resource.name == self.kind.plural for resource in served.resources)

    def is_allowed(self, verb: str) -> bool:
        """Tell whether this account may `verb` jobs; True where the API server does not say. Raises LaunchError."""
        attributes = {"namespace": self.namespace, "verb": verb, "group": self.kind.group, "resource": self.kind.plural}
        create = self._json(self._access.create_self_subject_access_review)
        answer = self._explain("review access", None, create, {"spec": {"resourceAttributes": attributes}})
        return answer is None or bool((answer.get("status") or {}).get("allowed"))

    def read_job(self, name: str) -> Object | None:
        """Return a job as it is now; None where it is gone. Raises LaunchError."""
        what, reading = "the job cannot be read", self._custom.get_namespaced_custom_object
        job: Object | None = self._ask(what, (NOT_FOUND,), reading, *self._locate(self._resource), name)
        return job

    def list_jobs(self, selector: str) -> list[Object]:
        """List the jobs with these labels. Raises LaunchError; NotServedError where this account sees no such kind."""
        listing = self._custom.list_namespaced_custom_object
        try:
            jobs = self.retry_policy.call(listing, *self._locate(self._resource), label_selector=selector)
        except self._api_exception as error:
            kind = NotServedError if error.status in (FORBIDDEN, NOT_FOUND) else LaunchError
            raise self._make_refusal("the jobs cannot be listed", error, kind) from error
        return list(jobs["items"])

    def delete_job(self, name: str, uid: str = "", version: str = "") -> None:
        """Delete a job; its pods get SIGTERM and their grace.

        A `uid` spares a later job of the same name, a resource `version` one that has changed since it was read.
        Nothing happens where no such job is there. Raises LaunchError.
        """
        options: Object = {"propagationPolicy": "Background"}
        conditions = {key: value for key, value in (("uid", uid), ("resourceVersion", version)) if value}
        if conditions:
            options["preconditions"] = conditions
        what, method = "the job cannot be deleted", self._custom.delete_namespaced_custom_object
        self._ask(what, (NOT_FOUND, CONFLICT), method, *self._locate(self._resource), name, body=options)

    def patch_job(self, name: str, patch: Object) -> bool:
        """Merge `patch` into a job; False where the job is gone. Raises LaunchError."""
        return self._patch("the job cannot be changed", self._resource, name, patch)

    def annotate_job(self, name: str, annotations: Mapping[str, str]) -> None:
        """Write annotations for people onto a job, if the API server takes them now: nothing depends on them."""
        patch = {"metadata": {"annotations": dict(annotations)}}
        method = self._custom.patch_namespaced_custom_object
        self._explain(self._patch_verb, 0.0, method, *self._locate(self._resource), name, patch)

    def take_over_job(self, name: str, metadata: Object) -> bool:
        """Merge `metadata` into a job, so that it says whose the job is now; False where that is not possible.

        False also where the job is gone or has another `uid` than `metadata` names: then nothing changes. Raises
        LaunchError after an outage.
        """
        method, patch = self._custom.patch_namespaced_custom_object, {"metadata": metadata}
        return self._explain(self._patch_verb, None, method, *self._locate(self._resource), name, patch) is not None

    def list_pods(self, job_name: str) -> list[Object]:
        """List the pods that bear the label of a job. Raises LaunchError."""
        listing, selector = self._json(self._core.list_namespaced_pod), self.kind.make_pod_selector(job_name)
        pods = self._ask("the pods cannot be listed", (), listing, self.namespace, label_selector=selector)
        return list(pods["items"])

    def watch_pods(self, job_name: str) -> Iterator[Object]:
        """Yield the job's pods as they are, then as they change, for a minute or until the connection breaks."""
        path = f"/api/v1/namespaces/{self.namespace}/pods"
        query = [("labelSelector", self.kind.make_pod_selector(job_name)), ("watch", "true"), ("timeoutSeconds", "55")]
        with contextlib.suppress(ConnectionError):
            for line in self._stream("watch pods", path, query):
                try:
                    event = json.loads(line)
                except ValueError:  # torn
                    return
                if event["type"] in ("ADDED", "MODIFIED", "DELETED"):
                    yield event["object"]

    def read_log_lines(self, pod_name: str, since: str = "", follow: bool = True) -> Iterator[bytes]:
        """Yield the lines of a pod's log with their times, from the time `since` on, until the log ends.

        Each ends with its newline, except a last one that may be torn. No line at all where there is no log (yet, or
        any more). Raises ConnectionError where the connection breaks, or where nothing comes for a minute.
        """
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod_name}/log"
        query = [("container", self.kind.container), ("follow", str(follow).lower()), ("timestamps", "true")]
        query += [("sinceTime", since)] if since else []
        yield from self._stream("get pods/log", path, query, MAX_LINE_BYTES)
