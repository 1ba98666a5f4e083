"""A Kubernetes namespace in memory: what an API server answers, and what the others in a cluster do, on script.

It keeps the rules that a launcher meets: uids and versions, 409 for a second object of a name, preconditions, owners
that take along what they own (at once, and silently, where they do not exist), pods that need a while to go. Nobody
acts by themselves: a test is operator, kubelet, scheduler and Kueue.
"""

import copy
import functools
import itertools
import re
import threading
import time
from datetime import datetime, timezone

JOB_NAME_LABEL, INDEX_LABEL = "training.kubeflow.org/job-name", "training.kubeflow.org/replica-index"
WORKLOAD_JOB_LABEL, QUEUE_LABEL = "kueue.x-k8s.io/job-uid", "kueue.x-k8s.io/queue-name"
NAME = "train"
KINDS = ("pytorchjobs", "pods", "events", "workloads", "workflows", "nodes")
PATH = re.compile(rf"/apis?/(?:[^/]+/)?v[^/]+/(?:namespaces/{NAME}/)?({'|'.join(KINDS)})(?:/([^/]+?)(?:/status)?)?")


DISCOVERY = "/apis/kubeflow.org/v1"
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


class Refused(Exception):  # noqa: N818 - an answer
    """An answer that is an error."""

    def __init__(self, status, reason, message=""):
        self.status = status
        self.body = {"kind": "Status", "status": "Failure", "code": status, "reason": reason}
        self.body["message"] = message or reason
        super().__init__(reason)


def time_stamp(seconds_from_now=0.0):
    """An RFC 3339 time as objects bear it, in whole seconds."""
    return datetime.fromtimestamp(time.time() + seconds_from_now, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def is_over(pod):
    """Whether a pod's container has ended."""
    return pod["status"]["phase"] in ("Succeeded", "Failed")


def _locked(method):
    @functools.wraps(method)
    def call(self, *arguments, **options):
        with self.changed:
            return method(self, *arguments, **options)

    return call


class Namespace:
    """The objects of one namespace, and its nodes."""

    def __init__(self):
        self.changed = threading.Condition(threading.RLock())
        """Held while objects change; notified of every change."""
        self.objects = {kind: {} for kind in KINDS}
        self.pod_changes = []
        """(type, pod) in order, for the watches."""
        self.logs = {}
        """Pod uid -> [(time, line)]."""
        self.holds_pods = False
        """Whether pods that are deleted stay until `release_pods`; otherwise they end with 143 and go at once."""
        self.num_looks = 0
        """How often a job was read."""
        self.created = []
        """Names of all jobs that were ever created."""
        self.forced = []
        """Names of the pods that somebody took away without their grace."""
        self.has_operator = True
        """Whether the definition of PyTorchJobs is installed."""
        self.forbidden = set()
        """What whoever asks may not do with them."""
        self._numbers = itertools.count(1)

    # -- the API server -----------------------------------------------------------------------------------------------

    @_locked
    def answer(self, verb, path, query=None, body=None):
        """(status, document) of a request that is not a stream."""
        if path.rstrip("/") == DISCOVERY:
            return self._discovery()
        if path == REVIEWS:
            return 201, {**body, "status": {"allowed": self._is_allowed(body["spec"]["resourceAttributes"])}}
        known = PATH.fullmatch(path)
        if known is None:
            return 404, {"kind": "Status", "code": 404, "reason": "NotFound", "message": "no such resource"}
        kind, name = known.groups()
        try:
            if verb == "POST":
                return 201, self.create(kind, body)
            if name is None:
                return 200, {"items": copy.deepcopy(self.select(kind, query or {}))}
            self.num_looks += (verb, kind) == ("GET", "pytorchjobs")
            found = self.get(kind, name)
            if verb == "PATCH":
                self._require(found, {key: value for key, value in body.get("metadata", {}).items() if key == "uid"})
                self.patch(kind, name, body)
            if verb == "DELETE":
                self._require(found, (body or {}).get("preconditions", {}))
                self.delete(kind, name, options=body)
            return 200, copy.deepcopy(found)
        except Refused as refused:
            return refused.status, refused.body

    def _discovery(self):
        if not self.has_operator:
            return 404, {"kind": "Status", "code": 404, "reason": "NotFound", "message": "not found"}
        resource = {"name": "pytorchjobs", "namespaced": True, "kind": "PyTorchJob", "singularName": "", "verbs": []}
        return 200, {"kind": "APIResourceList", "groupVersion": "kubeflow.org/v1", "resources": [resource]}

    def _is_allowed(self, asked):
        wanted = {"namespace": NAME, "group": "kubeflow.org", "resource": "pytorchjobs"}
        return wanted.items() <= asked.items() and asked["verb"] not in self.forbidden

    def get(self, kind, name):
        """The object itself. Raises Refused."""
        if name not in self.objects[kind]:
            raise Refused(404, "NotFound", f'{kind} "{name}" not found')
        return self.objects[kind][name]

    def select(self, kind, query):
        """Objects that fit the selectors of a list request."""
        wanted = [part.partition("=") for part in query.get("labelSelector", "").split(",") if part]
        fields = query.get("fieldSelector", "")
        assert fields in ("", "type=Warning"), fields

        def fits(item):
            labels = item["metadata"].get("labels", {})
            return all(key in labels and (not sign or labels[key] == value) for key, sign, value in wanted)

        return [item for item in self.objects[kind].values() if fits(item)]

    @_locked
    def create(self, kind, document):
        """Keeps a new object; its owner takes it along at once where that does not exist. Returns it as created."""
        document = copy.deepcopy(document)
        metadata = document["metadata"]
        if metadata["name"] in self.objects[kind]:
            raise Refused(409, "AlreadyExists", f'{kind} "{metadata["name"]}" already exists')
        number = next(self._numbers)
        metadata |= {"uid": f"uid-{number}", "creationTimestamp": time_stamp(), "namespace": NAME}
        self.objects[kind][metadata["name"]] = document
        self._note(kind, document, "ADDED")
        created = copy.deepcopy(document)
        if kind == "pytorchjobs":
            self.created.append(metadata["name"])
            uids = {item["metadata"]["uid"] for item in self.objects["workflows"].values()}
            if any(owner["uid"] not in uids for owner in metadata.get("ownerReferences", [])):
                self.delete(kind, metadata["name"])
        return created

    @_locked
    def patch(self, kind, name, patch):
        """Merges; a job that is suspended by it loses its pods."""
        item = self.get(kind, name)
        _merge(item, patch)
        self._note(kind, item, "MODIFIED")
        if kind == "pytorchjobs" and item["spec"]["runPolicy"].get("suspend") and "suspend" in str(patch.get("spec")):
            self._take_pods(item)
            self.condition(name, "Suspended")

    @_locked
    def delete(self, kind, name, options=None):
        """Deletes in the background: what it owns goes afterwards, pods with their grace."""
        item = self.get(kind, name)
        if kind == "pods":
            self._delete_pod(item, options or {})
            return
        del self.objects[kind][name]
        self._note(kind, item, "DELETED")
        for owned in ("pytorchjobs", "pods"):
            for child in list(self.objects[owned].values()):
                owners = child["metadata"].get("ownerReferences", [])
                if any(owner["uid"] == item["metadata"]["uid"] for owner in owners):
                    self.delete(owned, child["metadata"]["name"])

    def _require(self, item, preconditions):
        for key, value in preconditions.items():
            if item["metadata"][key] != value:
                raise Refused(409, "Conflict", f"the {key} in the precondition ({value}) does not match")

    def _delete_pod(self, pod, options):
        grace = options.get("gracePeriodSeconds", 30)
        if grace and not is_over(pod):
            pod["metadata"].setdefault("deletionTimestamp", time_stamp(grace))
            self._note("pods", pod, "MODIFIED")
            if self.holds_pods:
                return
            self.end_pod(pod["metadata"]["name"], 143)
        if not grace:
            self.forced.append(pod["metadata"]["name"])
        if self.objects["pods"].pop(pod["metadata"]["name"], None):
            self._note("pods", pod, "DELETED")

    @_locked
    def release_pods(self):
        """Pods that were deleted while they are held go now."""
        held, self.holds_pods = self.holds_pods, False
        for pod in [pod for pod in self.objects["pods"].values() if "deletionTimestamp" in pod["metadata"]]:
            self._delete_pod(pod, {})
        self.holds_pods = held

    def _note(self, kind, item, change):
        item["metadata"]["resourceVersion"] = str(next(self._numbers))
        if kind == "pods":
            self.pod_changes.append((change, copy.deepcopy(item)))
        self.changed.notify_all()

    # -- the training operator ----------------------------------------------------------------------------------------

    @_locked
    def make_pods(self, job_name):
        """Creates the pods that a job lacks: Pending, seen by no scheduler. Returns their names."""
        job = self.get("pytorchjobs", job_name)
        worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
        owner = {"kind": "PyTorchJob", "name": job_name, "uid": job["metadata"]["uid"]}
        names = [f"{job_name}-worker-{index}" for index in range(worker["replicas"])]
        for index, name in enumerate(names):
            if name not in self.objects["pods"]:
                labels = {JOB_NAME_LABEL: job_name, INDEX_LABEL: str(index)}
                metadata = {"name": name, "labels": labels, "ownerReferences": [owner]}
                spec = {"schedulerName": "default-scheduler"}
                self.create("pods", {"metadata": metadata, "spec": spec, "status": {"phase": "Pending"}})
        self.condition(job_name, "Created")
        return names

    @_locked
    def run_pods(self, job_name):
        """Brings all pods of a job to run, each on a node of its own; returns their names."""
        names = self.make_pods(job_name)
        for index, name in enumerate(names):
            if self.get("pods", name)["status"]["phase"] == "Pending":
                self.run_pod(name, f"node-{index + 1}")
        self.condition(job_name, "Running")
        return names

    @_locked
    def recreate(self, pod_name, run=True):
        """Replaces a pod that has failed, as `restartPolicy: ExitCode` does."""
        job_name = self.get("pods", pod_name)["metadata"]["labels"][JOB_NAME_LABEL]
        self.delete("pods", pod_name)
        self.make_pods(job_name)
        if run:
            self.run_pod(pod_name)

    @_locked
    def finish(self, job_name, code=0):
        """All workers end with this code; the job has Succeeded or Failed."""
        for name in self.run_pods(job_name):
            if not is_over(self.get("pods", name)):
                self.end_pod(name, code)
        self.condition(job_name, "Failed" if code else "Succeeded")

    @_locked
    def condition(self, job_name, kind, status="True"):
        """Sets one condition of a job."""
        job = self.get("pytorchjobs", job_name)
        conditions = job.setdefault("status", {}).setdefault("conditions", [])
        conditions[:] = [c for c in conditions if c["type"] != kind] + [{"type": kind, "status": status}]
        self._note("pytorchjobs", job, "MODIFIED")

    @_locked
    def suspend(self, job_name, suspended=True):
        """As Kueue does it, or a person."""
        self.patch("pytorchjobs", job_name, {"spec": {"runPolicy": {"suspend": suspended}}})
        self.condition(job_name, "Suspended", str(suspended))

    def _take_pods(self, job):
        for pod in self.select("pods", {"labelSelector": f"{JOB_NAME_LABEL}={job['metadata']['name']}"}):
            self.delete("pods", pod["metadata"]["name"])

    # -- scheduler and kubelet ----------------------------------------------------------------------------------------

    @_locked
    def set_pod(self, pod_name, node="", phase="Pending", conditions=(), **state):
        """Sets what is known of a pod: `conditions` as (type, status, reason, message), `state` of its container."""
        pod = self.get("pods", pod_name)
        known = {c["type"]: c for c in pod["status"].get("conditions", [])}
        for kind, status, *words in conditions:
            known[kind] = {"type": kind, "status": status, **dict(zip(("reason", "message"), words, strict=False))}
        pod["status"] |= {"phase": phase, "conditions": list(known.values())}
        if state:
            pod["status"]["containerStatuses"] = [{"name": "pytorch", "state": state}]
        if node:
            pod["spec"]["nodeName"] = node
        self._note("pods", pod, "MODIFIED")

    def run_pod(self, pod_name, node="node-1"):
        """The pod runs."""
        conditions = [("PodScheduled", "True"), ("Ready", "True")]
        self.set_pod(pod_name, node, "Running", conditions, running={"startedAt": time_stamp()})

    def end_pod(self, pod_name, code, reason="", message="", seconds_ago=0.0):
        """The pod's container ends."""
        reason = reason or ("Error" if code else "Completed")
        ended = {"exitCode": code, "reason": reason, "message": message, "finishedAt": time_stamp(-seconds_ago)}
        self.set_pod(pod_name, "", "Failed" if code else "Succeeded", [("Ready", "False")], terminated=ended)

    @_locked
    def write(self, pod_name, *lines, stamp=""):
        """The pod prints lines, each a microsecond after the one before, or all at `stamp`."""
        log = self.logs.setdefault(self.get("pods", pod_name)["metadata"]["uid"], [])
        for line in lines:
            fraction = f"{next(self._numbers) * 1000:09d}".rstrip("0")  # as Go prints it
            log.append((stamp or f"2026-11-21T10:00:00.{fraction}Z", line))
        self.changed.notify_all()

    def step(self, job_name, step, target_step):
        """Worker 0 says that it has taken a step."""
        self.write(f"{job_name}-worker-0", f"kftrain| step {step}/{target_step} loss 1.0 | 10 samples/s, 1 s left")

    # -- the rest -----------------------------------------------------------------------------------------------------

    @_locked
    def warn(self, uid, reason, message):
        """A warning event about an object."""
        name = f"event-{next(self._numbers)}"
        about = {"uid": uid}
        event = {"metadata": {"name": name}, "involvedObject": about, "reason": reason, "message": message}
        self.create("events", {**event, "type": "Warning"})

    @_locked
    def queue(self, job_name, message="", active=True, **conditions):
        """Kueue's Workload of a job as it waits: `message` of QuotaReserved, further conditions as (status, reason)."""
        job = self.get("pytorchjobs", job_name)["metadata"]
        assert QUEUE_LABEL in job["labels"]
        shown = [{"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": message}]
        for kind, (status, reason) in conditions.items():
            shown.append({"type": kind, "status": status, "reason": reason, "message": f"{reason} it is"})
        metadata = {"name": f"pytorchjob-{job_name}", "labels": {WORKLOAD_JOB_LABEL: job["uid"]}}
        self.objects["workloads"].pop(metadata["name"], None)
        workload = {"metadata": metadata, "spec": {"active": active}, "status": {"conditions": shown}}
        self.create("workloads", workload)

    @_locked
    def clear(self):
        """The end of the test: nothing is there any more."""
        for items in self.objects.values():
            items.clear()
        self.changed.notify_all()

    def pods(self):
        """Names of the pods that there are."""
        return sorted(self.objects["pods"])

    def jobs(self):
        """Names of the jobs that there are."""
        return sorted(self.objects["pytorchjobs"])


def _merge(item, patch):
    for key, value in patch.items():
        if value is None:
            item.pop(key, None)
        elif isinstance(value, dict):
            _merge(item.setdefault(key, {}), value)
        else:
            item[key] = value
