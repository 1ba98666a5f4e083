"""The PyTorchJob of the Kubeflow training operator, version 1.

The shape is the one that restarts and succeeds truthfully: workers only, without elasticPolicy (so all pods must
succeed for the job to succeed), `restartPolicy: ExitCode` (codes from 128 on get a new pod), `cleanPodPolicy: Running`
(a finished pod's log stays readable). Without a Master the operator adds no init container, which the Pod Security
standard `restricted` would refuse.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kftrain.config import Config
from kftrain.launch.kubernetes import pod
from kftrain.launch.kubernetes.kinds.kind import Kind, Object
from kftrain.launch.spec import WORKER, JobSpec, require_workers_alone

TTL_SECONDS = 24 * 60 * 60
"""Seconds after which a finished job is deleted: a safety net, as the launcher deletes its jobs itself."""


class PyTorchJob(Kind):
    """The kind of job of `launch.backend=pytorchjob`, `kubeflow.org/v1`."""

    name = "PyTorchJob"
    group = "kubeflow.org"
    version = "v1"
    plural = "pytorchjobs"
    operator = "training operator"
    creation_failures = frozenset(("FailedCreatePod", "FailedCreateService"))
    install = "install version 1 of the Kubeflow training operator"
    container = "pytorch"  # the operator's webhook wants this name
    job_name_label = "training.kubeflow.org/job-name"
    index_label = "training.kubeflow.org/replica-index"
    role_label = "training.kubeflow.org/replica-type"
    suspend_path = ("spec", "runPolicy", "suspend")

    def build_specification(self, spec: JobSpec, config: Config) -> Object:
        """Build the `spec` with the training operator's own models: see `Kind.build_specification`."""
        from kubeflow.training import models
        from kubernetes.client import ApiClient

        # Its other place, Master, is none for a role beside the workers: such a job succeeds when that one does.
        require_workers_alone(spec, "a PyTorchJob")
        settings = config.launch.kubernetes
        document = ApiClient().sanitize_for_serialization(
            models.KubeflowOrgV1PyTorchJobSpec(
                nproc_per_node=str(spec.workers.processes_per_node),
                run_policy=models.KubeflowOrgV1RunPolicy(
                    clean_pod_policy="Running",
                    ttl_seconds_after_finished=TTL_SECONDS,
                    suspend=True if settings.queue else None,  # the queue lets it go
                ),
                pytorch_replica_specs={
                    "Worker": models.KubeflowOrgV1ReplicaSpec(
                        replicas=spec.workers.replicas,
                        restart_policy="ExitCode",
                        template=pod.build_template(self, spec, spec.workers, settings),
                    )
                },
            )
        )
        assert isinstance(document, dict)
        return document

    def build_address(self, spec: JobSpec) -> str:
        """Return the host name of worker 0: the operator makes a service for each pod."""
        return f"{self.make_job_name(spec)}-{WORKER}-0"

    def list_replicas(self, job: Mapping[str, Any]) -> Iterable[tuple[str, int, Mapping[str, Any]]]:
        """Return a group for each replica type, with the operator's defaults: see `Kind.list_replicas`."""
        specs = job["spec"].get("pytorchReplicaSpecs") or {}
        return [(name.lower(), spec.get("replicas", 1), spec.get("template") or {}) for name, spec in specs.items()]


KIND = PyTorchJob()
