"""The PyTorchJob of a job, as data. Building it is pure: a dry run prints it, golden files test it.

The shape is the one that restarts and succeeds truthfully: workers only, without elasticPolicy (so all pods must
succeed for the job to succeed), `restartPolicy: ExitCode` (codes from 128 on get a new pod), `cleanPodPolicy: Running`
(a finished pod's log stays readable). It starts in a namespace that enforces the Pod Security standard `restricted`,
because without a Master the operator adds no init container. A pod reads its node rank from its own replica-index
label; all meet at worker 0.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping
from typing import Any

from kftrain import storage
from kftrain.config import Config
from kftrain.launch.kubernetes.reachable import require_reachable
from kftrain.launch.kubernetes.settings import KubernetesConfig
from kftrain.launch.spec import ADDRESS_ENV, NODE_NAME_ENV, NODE_RANK_ENV, JobSpec
from kftrain.run.paths import RunPaths

API_VERSION = "kubeflow.org/v1"
KIND = "PyTorchJob"

MAX_NAME_LENGTH = 52
"""Services are called `<job>-worker-<index>` and must fit into 63 characters."""

RUN_LABEL, TASK_LABEL, KFP_RUN_LABEL = "kftrain.io/run", "kftrain.io/task", "kftrain.io/kfp-run"
QUEUE_LABEL, PRIORITY_LABEL = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"
DIGEST_ANNOTATION = "kftrain.io/spec-digest"
"""Digest of the specification as we built it: webhooks change the stored one."""

REPLICA_INDEX = "metadata.labels['training.kubeflow.org/replica-index']"
USER_ID = 1000
"""The user of our images."""

CA_FOLDER = "/etc/kftrain/ca"
CA_VARIABLES = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")
"""By which the clients of object stores and of MLflow find certificates."""

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


def build(spec: JobSpec, config: Config, kfp_run_id: str = "", owner: dict[str, Any] | None = None) -> dict[str, Any]:
    """The PyTorchJob that runs `spec`, ready for the API server. Raises LaunchError where it cannot work.

    Args:
        spec: The job.
        config: Its configuration.
        kfp_run_id: The Kubeflow run that it belongs to, for a label.
        owner: An owner reference: with the owner the job goes.
    """
    from kubeflow.training import models

    settings = config.launch.kubernetes
    require_reachable(config)
    job = models.KubeflowOrgV1PyTorchJob(
        api_version=API_VERSION,
        kind=KIND,
        metadata={"name": job_name(spec), "labels": _job_labels(spec, settings, kfp_run_id)},
        spec=models.KubeflowOrgV1PyTorchJobSpec(
            nproc_per_node=str(spec.processes_per_node),
            run_policy=models.KubeflowOrgV1RunPolicy(
                clean_pod_policy="Running",
                ttl_seconds_after_finished=TTL_SECONDS,
                suspend=True if settings.queue else None,  # the queue lets it go
            ),
            pytorch_replica_specs={
                "Worker": models.KubeflowOrgV1ReplicaSpec(
                    replicas=spec.nodes, restart_policy="ExitCode", template=_template(spec, settings)
                )
            },
        ),
    )
    document = _plain(job)
    document["metadata"]["annotations"] = {DIGEST_ANNOTATION: storage.digest_json(document["spec"])[:16]}
    if owner is not None:
        document["metadata"]["ownerReferences"] = [owner]
    return document


def started_for(job: Mapping[str, Any]) -> str:
    """Digest of the configuration that a job was started for; empty where its workers were told none."""
    containers = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    pairs = (pair for container in containers for pair in itertools.pairwise(container.get("command") or []))
    return next((value for option, value in pairs if option == "--digest"), "")


def _plain(job: Any) -> dict[str, Any]:
    """The model as the JSON that the API server takes."""
    from kubernetes.client import ApiClient

    document = ApiClient().sanitize_for_serialization(job)
    assert isinstance(document, dict)
    return document


def label_value(text: str) -> str:
    """A text as the value of a Kubernetes label."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)[:63].strip("-_.")


def _labels(spec: JobSpec) -> dict[str, str]:
    """Of the job and of its pods, to which the operator copies none."""
    return {RUN_LABEL: label_value(RunPaths(spec.run_uri).run_id), TASK_LABEL: spec.task}


def _job_labels(spec: JobSpec, settings: KubernetesConfig, kfp_run_id: str) -> dict[str, str]:
    """Labels of the job alone; they are not part of its specification."""
    optional = {
        KFP_RUN_LABEL: label_value(kfp_run_id),
        QUEUE_LABEL: settings.queue,
        PRIORITY_LABEL: settings.queue_priority,
    }
    return {**_labels(spec), **{label: value for label, value in optional.items() if value}}


def _template(spec: JobSpec, settings: KubernetesConfig) -> dict[str, Any]:
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
            *_ca_volumes(settings),
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
    if settings.affinity:
        pod["affinity"] = settings.affinity
    if settings.priority_class:
        pod["priorityClassName"] = settings.priority_class
    if settings.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in settings.image_pull_secrets]
    return {"metadata": {"labels": _labels(spec), "annotations": {"sidecar.istio.io/inject": "false"}}, "spec": pod}


def _container(spec: JobSpec, settings: KubernetesConfig) -> dict[str, Any]:
    limits = {"cpu": settings.cpu, "memory": settings.memory}
    if settings.gpus_per_node:
        limits[settings.gpu_resource] = str(settings.gpus_per_node)
    environment = {
        **spec.environment,
        ADDRESS_ENV: f"{job_name(spec)}-worker-0",
        "HOME": "/tmp",
        "PYTHONUNBUFFERED": "1",
        **({name: f"{CA_FOLDER}/ca.crt" for name in CA_VARIABLES} if settings.ca_bundle else {}),
    }
    return {
        "name": "pytorch",  # the operator's webhook wants this name
        "image": settings.trainer_image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": ["kftrain", *spec.worker_arguments()],
        "env": [
            *({"name": name, "value": value} for name, value in sorted(environment.items())),
            {"name": NODE_RANK_ENV, "valueFrom": {"fieldRef": {"fieldPath": REPLICA_INDEX}}},
            {"name": NODE_NAME_ENV, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        ],
        "envFrom": [{"secretRef": {"name": name, "optional": True}} for name in settings.secrets],
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
            *([{"name": "ca", "mountPath": CA_FOLDER, "readOnly": True}] if settings.ca_bundle else []),
            *settings.volume_mounts,
        ],
    }


def _ca_volumes(settings: KubernetesConfig) -> list[dict[str, Any]]:
    return [{"name": "ca", "configMap": {"name": settings.ca_bundle}}] if settings.ca_bundle else []


def _lost_node_tolerations() -> list[dict[str, Any]]:
    """A pod on a lost node is marked for deletion after a minute, not after the default of five."""
    return [
        {"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60}
        for key in ("not-ready", "unreachable")
    ]
