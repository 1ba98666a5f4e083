"""The PyTorchJob of a job, as data. Building it is pure: a dry run prints it, golden files test it.

The shape is the one that restarts and succeeds truthfully: workers only, without elasticPolicy (so all pods must
succeed for the job to succeed), `restartPolicy: ExitCode` (codes from 128 on get a new pod), `cleanPodPolicy: Running`
(a finished pod's log stays readable). It starts in a namespace that enforces the Pod Security standard `restricted`,
because without a Master the operator adds no init container. A pod reads its node rank from its own replica-index
label; all meet at worker 0.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

from kftrain import storage
from kftrain.config import Config, KubernetesConfig
from kftrain.contracts import RunPaths
from kftrain.errors import LaunchError
from kftrain.launch.spec import ADDRESS_ENV, NODE_RANK_ENV, JobSpec

API_VERSION = "kubeflow.org/v1"
KIND = "PyTorchJob"

MAX_NAME_LENGTH = 52
"""Services are called `<job>-worker-<index>` and must fit into 63 characters."""

RUN_LABEL, TASK_LABEL, KFP_RUN_LABEL = "kftrain.io/run", "kftrain.io/task", "kftrain.io/kfp-run"
DIGEST_ANNOTATION = "kftrain.io/spec-digest"

REPLICA_INDEX = "metadata.labels['training.kubeflow.org/replica-index']"
USER_ID = 1000
"""The user of our images."""

SECRETS = ("kftrain-storage", "kftrain-mlflow")
"""Optional secrets; their keys become environment variables of the workers."""

TTL_SECONDS = 24 * 60 * 60
"""A safety net: the launcher deletes its jobs itself."""


def job_name(spec: JobSpec) -> str:
    """The job's name, the same for every attempt and every launcher: from the run and the task alone.

    A DNS-1035 label of at most 52 characters; a long run id is cut and made unique by a digest.
    """
    name = f"{RunPaths(spec.run_uri).run_id}-{spec.task}"
    name = name if name[0].isalpha() else f"r{name}"
    if len(name) <= MAX_NAME_LENGTH:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    kept = name[: MAX_NAME_LENGTH - len(spec.task) - len(digest) - 2].rstrip("-")
    return f"{kept}-{digest}-{spec.task}"


def build(spec: JobSpec, config: Config, kfp_run_id: str = "") -> dict[str, Any]:
    """The PyTorchJob that runs `spec`, ready for the API server. Raises LaunchError where it cannot work."""
    from kubeflow.training import models

    settings = config.launch.kubernetes
    _require_reachable(config)
    job = models.KubeflowOrgV1PyTorchJob(
        api_version=API_VERSION,
        kind=KIND,
        metadata={"name": job_name(spec), "labels": _labels(spec, settings, kfp_run_id)},
        spec=models.KubeflowOrgV1PyTorchJobSpec(
            nproc_per_node=str(spec.processes_per_node),
            run_policy=models.KubeflowOrgV1RunPolicy(
                clean_pod_policy="Running", ttl_seconds_after_finished=TTL_SECONDS
            ),
            pytorch_replica_specs={
                "Worker": models.KubeflowOrgV1ReplicaSpec(
                    replicas=spec.nodes, restart_policy="ExitCode", template=_template(spec, settings, kfp_run_id)
                )
            },
        ),
    )
    document = _plain(job)
    document["metadata"]["annotations"] = {DIGEST_ANNOTATION: storage.digest_json(document)[:16]}
    return document


def _plain(job: Any) -> dict[str, Any]:
    """The model as the JSON that the API server takes."""
    from kubernetes.client import ApiClient

    document = ApiClient().sanitize_for_serialization(job)
    assert isinstance(document, dict)
    return document


def _require_reachable(config: Config) -> None:
    """Refuses what pods cannot reach: a folder or an sqlite file of this machine."""
    if storage.is_local(config.run.storage_root) and not config.launch.kubernetes.volumes:
        raise LaunchError(
            "worker pods cannot reach a folder of this machine",
            where="run.storage_root",
            value=config.run.storage_root,
            fix="use an object store (s3://…), or mount a volume there by launch.kubernetes.volumes",
        )
    if not config.tracking.uri.startswith(("http://", "https://")):
        raise LaunchError(
            "worker pods cannot reach an sqlite file of this machine",
            where="tracking.uri",
            value=config.tracking.uri,
            fix="use an MLflow server, http://…",
        )


def label_value(text: str) -> str:
    """A text as the value of a Kubernetes label."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)[:63].strip("-_.")


def _labels(spec: JobSpec, settings: KubernetesConfig, kfp_run_id: str) -> dict[str, str]:
    labels = {RUN_LABEL: label_value(RunPaths(spec.run_uri).run_id), TASK_LABEL: spec.task}
    if kfp_run_id:
        labels[KFP_RUN_LABEL] = label_value(kfp_run_id)
    if settings.queue:
        labels["kueue.x-k8s.io/queue-name"] = settings.queue
    return labels


def _template(spec: JobSpec, settings: KubernetesConfig, kfp_run_id: str) -> dict[str, Any]:
    pod: dict[str, Any] = {
        "containers": [_container(spec, settings)],
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": settings.termination_grace_seconds,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "tolerations": [*_lost_node_tolerations(), *settings.tolerations],
        "volumes": [
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": settings.shared_memory}},
            {"name": "scratch", "emptyDir": {}},
            *settings.volumes,
        ],
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {"training.kubeflow.org/job-name": job_name(spec)}},
            }
        ],
    }
    if settings.node_selector:
        pod["nodeSelector"] = settings.node_selector
    if settings.priority_class:
        pod["priorityClassName"] = settings.priority_class
    if settings.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in settings.image_pull_secrets]
    # The operator does not copy a job's labels to its pods; the queue's label belongs to the job alone.
    labels = {key: value for key, value in _labels(spec, settings, kfp_run_id).items() if "kueue" not in key}
    return {"metadata": {"labels": labels, "annotations": {"sidecar.istio.io/inject": "false"}}, "spec": pod}


def _container(spec: JobSpec, settings: KubernetesConfig) -> dict[str, Any]:
    limits = {"cpu": settings.cpu, "memory": settings.memory}
    if settings.gpus_per_node:
        limits[settings.gpu_resource] = str(settings.gpus_per_node)
    environment = {
        **spec.environment,
        ADDRESS_ENV: f"{job_name(spec)}-worker-0",
        "HOME": "/tmp",
        "PYTHONUNBUFFERED": "1",
    }
    return {
        "name": "pytorch",  # the operator's webhook wants this name
        "image": settings.trainer_image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": ["kftrain", *spec.worker_arguments()],
        "env": [
            *({"name": name, "value": value} for name, value in sorted(environment.items())),
            {"name": NODE_RANK_ENV, "valueFrom": {"fieldRef": {"fieldPath": REPLICA_INDEX}}},
        ],
        "envFrom": [{"secretRef": {"name": name, "optional": True}} for name in SECRETS],
        "resources": {"limits": limits, "requests": limits},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "shared-memory", "mountPath": "/dev/shm"},
            {"name": "scratch", "mountPath": "/tmp"},
            *settings.volume_mounts,
        ],
    }


def _lost_node_tolerations() -> list[dict[str, Any]]:
    """A pod on a lost node is marked for deletion after a minute, not after the default of five."""
    return [
        {"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60}
        for key in ("not-ready", "unreachable")
    ]
