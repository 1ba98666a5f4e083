"""The RayJob of KubeRay 1.6: a Ray cluster for one attempt of a job, a pod for each node, taken away when it ends.

KubeRay waits until all pods are there, then submits the driver that every job on Ray has (`ray_driver`). What it prints
is the log of the head's pod. `backoffLimit` is 0: the launcher counts the attempts, and makes a job of each.

KubeRay stops no training before it takes pods away, so a hook of the pods does, within their grace.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from kftrain.config import Config
from kftrain.core import storage
from kftrain.errors import Preempted
from kftrain.launch.kubernetes import pod
from kftrain.launch.kubernetes.kinds.kind import FAILED, SUCCEEDED, SUSPENDED, Kind, Object
from kftrain.launch.ray_jobs import STOP_FILE_ENV, WORKER_FILE_ENV, build_entrypoint, parse_exit_code
from kftrain.launch.spec import NODE_RANK_ENV, WORKER, JobSpec, require_workers_alone

RAY_VERSION = "2.60.0"
"""Version of Ray in our image. From 2.53 on KubeRay asks Ray itself for its health, and needs no wget in the image."""

STOP_FILE, WORKER_FILE = "/tmp/kftrain-stop", "/tmp/kftrain-worker"
"""The file by which a pod's hook tells its worker to go, and the one with the worker's process id."""

STOP_WORKER = f"touch {STOP_FILE}; while kill -0 $(cat {WORKER_FILE}); do sleep 0.2; done"

HEAD_SECONDS = 600
"""Seconds for which a pod waits for the head's, asking every two seconds; Ray would give up after 40."""

STORE_BYTES = 100_000_000
"""Size of Ray's object store, through which lines pass and nothing else; it lies in /dev/shm, beside NCCL's."""

TTL_SECONDS = 10 * 60
"""Seconds that the pods of a job are kept which has ended, for their logs; the launcher takes them away sooner."""

_FAILURES = ("RayCluster", "HeadPod", "WorkerPod", "Service")
_INVALID = ("InvalidRayJobSpec", "InvalidRayJobMetadata", "InvalidRayClusterSpec", "InvalidRayClusterMetadata")


class KubeRayJob(Kind):
    """The kind of job of `launch.backend=rayjob`, `ray.io/v1`."""

    name = "RayJob"
    group = "ray.io"
    version = "v1"
    plural = "rayjobs"
    operator = "KubeRay operator"
    creation_failures = frozenset((*(f"FailedToCreate{what}" for what in _FAILURES), *_INVALID))
    install = "install the KubeRay operator, version 1.6"
    job_name_label = "kftrain.io/job"
    index_label = "ray.io/node-type"
    has_worker_codes = False
    is_one_attempt = True
    max_name_length = 47  # KubeRay's own limit
    condition_names: ClassVar = {"Complete": SUCCEEDED, "Failed": FAILED, "Suspended": SUSPENDED}

    def build_specification(self, spec: JobSpec, config: Config) -> Object:
        """Build the `spec`: the cluster, and the driver as its entrypoint. See `Kind.build_specification`."""
        require_workers_alone(spec, "a RayJob")  # the driver places equal nodes
        settings = config.launch.kubernetes
        gpus = {"GPU": settings.gpus_per_node} if settings.gpus_per_node else {}
        # Pods have the environment already, and secrets; the first process of the head's pod writes the pod's log.
        entrypoint = build_entrypoint(spec, "python3", {"CPU": 1, **gpus}, environment={})
        stop_seconds = {"RAY_JOB_STOP_WAIT_TIME_S": str(settings.termination_grace_seconds)}
        return {
            "entrypoint": f"exec >/proc/1/fd/1 2>&1; {entrypoint}",
            "submissionMode": "HTTPMode",  # without a pod of its own that submits
            "backoffLimit": 0,
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": TTL_SECONDS,
            "runtimeEnvYAML": json.dumps({"env_vars": stop_seconds}),
            "metadata": {"run": spec.run_uri, "task": spec.task, "digest": spec.config_digest},
            "rayClusterSpec": self._build_cluster(spec, config),
            **({"suspend": True} if settings.queue else {}),  # the queue lets it go
        }

    def _build_cluster(self, spec: JobSpec, config: Config) -> Object:
        template, num_others = self._build_template(spec, config), spec.workers.replicas - 1
        node = {
            "rayStartParams": {
                "num-cpus": "1",  # of Ray's own count: a bundle a pod
                "num-gpus": str(config.launch.kubernetes.gpus_per_node),
                "object-store-memory": str(STORE_BYTES),
            },
            "template": template,
        }
        size = {"replicas": num_others, "minReplicas": num_others, "maxReplicas": num_others}
        return {
            "rayVersion": RAY_VERSION,
            "authOptions": {"mode": "token"},  # else every pod of the cluster can run code in these
            "headGroupSpec": node,
            "workerGroupSpecs": [{"groupName": "node", **size, **copy.deepcopy(node)}] if num_others else [],
        }

    def _build_template(self, spec: JobSpec, config: Config) -> Object:
        """Build the template of all pods: that of every kind, but KubeRay has the command, and Ray the ranks."""
        template = pod.build_template(self, spec, spec.workers, config.launch.kubernetes)
        (container,) = template["spec"]["containers"]
        del container["command"]
        container["env"] = [
            *(variable for variable in container["env"] if variable["name"] != NODE_RANK_ENV),
            {"name": STOP_FILE_ENV, "value": STOP_FILE},
            {"name": WORKER_FILE_ENV, "value": WORKER_FILE},
            {"name": "RAY_USAGE_STATS_ENABLED", "value": "0"},
            {"name": "RAY_NUM_REDIS_GET_RETRIES", "value": str(HEAD_SECONDS // 2)},
            # The hook below has waited already; Ray would ask a head that is gone, and hold up the next attempt.
            {"name": "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "value": "0"},
        ]
        container["lifecycle"] = {"preStop": {"exec": {"command": ["/bin/bash", "-c", STOP_WORKER]}}}
        template["metadata"]["labels"][self.job_name_label] = self.make_job_name(spec)
        template["spec"]["restartPolicy"] = "Never"  # a Ray that ends has lost its worker: KubeRay makes another pod
        return template

    def list_replicas(self, job: Mapping[str, Any]) -> Iterable[tuple[str, int, Mapping[str, Any]]]:
        """Return the head and the others, which are workers all alike: see `Kind.list_replicas`."""
        cluster = job["spec"].get("rayClusterSpec") or {}
        head, others = cluster.get("headGroupSpec") or {}, cluster.get("workerGroupSpecs") or []
        sizes = [(head, 1), *((group, group.get("replicas") or 0) for group in others)]
        return [(WORKER, num_pods, group.get("template") or {}) for group, num_pods in sizes]

    def list_part_names(self, job: Mapping[str, Any]) -> Iterable[str]:
        """Return the name of the Ray cluster, once KubeRay has made it up: see `Kind.list_part_names`."""
        return [name] if (name := (job.get("status") or {}).get("rayClusterName")) else []

    def read_index(self, pod: Mapping[str, Any]) -> int | None:
        """Return 0 for the head's pod, and for any other a number made of its name: KubeRay numbers none."""
        node_type = (pod["metadata"].get("labels") or {}).get(self.index_label)
        if node_type == "worker":
            return 1 + int(storage.sha256_text(pod["metadata"]["name"])[:5], 16)
        return 0 if node_type == "head" else None

    def read_conditions(self, job: Mapping[str, Any]) -> frozenset[str]:
        """Return the condition that two fields of the status make: a job that was stopped is `Complete`, too."""
        status = job.get("status") or {}
        word = status.get("jobDeploymentStatus", "")
        if word == "ValidationFailed" or (word == "Complete" and status.get("jobStatus") != "SUCCEEDED"):
            word = "Failed"
        return frozenset((self.condition_names[word],)) if word in self.condition_names else frozenset()

    def read_failure(self, job: Mapping[str, Any]) -> tuple[int, str] | None:
        """Return the exit code of the driver, which is in KubeRay's message alone: see `Kind.read_failure`."""
        if FAILED not in self.read_conditions(job):
            return None
        words = " ".join(str(job["status"].get("message") or "").split())
        if job["status"].get("jobStatus") == "STOPPED":
            return Preempted.exit_code, words
        return parse_exit_code(words), words

    def read_config_digest(self, job: Mapping[str, Any]) -> str:
        """Return the digest among the job's metadata for Ray: see `Kind.read_config_digest`."""
        return str((job["spec"].get("metadata") or {}).get("digest", ""))


KIND = KubeRayJob()
