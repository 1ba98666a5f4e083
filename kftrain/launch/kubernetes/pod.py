"""The pods of a job, as data: the same for every kind of job.

They start in a namespace that enforces the Pod Security standard `restricted`. A pod reads from its own metadata which
worker it is; all meet at worker 0.
"""

from __future__ import annotations

from typing import Any

from kftrain.launch.kubernetes.fabric import PRESETS, build_environment, build_resources, choose_shared_memory
from kftrain.launch.kubernetes.kinds.kind import Kind, build_run_labels
from kftrain.launch.kubernetes.settings import KubernetesConfig
from kftrain.launch.spec import ADDRESS_ENV, NODE_NAME_ENV, NODE_RANK_ENV, WORKER, JobSpec, Role
from kftrain.process.machine import LOCKS_MEMORY_ENV, RACK_ENV, SCRATCH_ENV

USER_ID = 1000
"""User and group id that our images run as."""

ROOT = {"runAsUser": 0, "runAsNonRoot": False, "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]}}
"""Security context of a container that may lock memory: in one of another user no added capability is in effect."""

CA_FOLDER = "/etc/kftrain/ca"
CA_VARIABLES = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")
"""Variables by which the clients of object stores and of MLflow find certificates."""


def build_template(kind: Kind, spec: JobSpec, role: Role, settings: KubernetesConfig) -> dict[str, Any]:
    """Build the template of the pods of one role of a job. Pure."""
    pod: dict[str, Any] = {
        "containers": [_build_container(kind, spec, role, settings)],
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
        "tolerations": [*_build_tolerations(), *settings.tolerations],
        "volumes": [
            {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": choose_shared_memory(settings)}},
            {"name": "scratch", "emptyDir": {"sizeLimit": settings.scratch}},
            *([{"name": "ca", "configMap": {"name": settings.ca_bundle}}] if settings.ca_bundle else []),
            *settings.volumes,
        ],
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {kind.job_name_label: kind.make_job_name(spec)}},
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
    return {
        "metadata": {"labels": build_run_labels(spec), "annotations": {"sidecar.istio.io/inject": "false"}},
        "spec": pod,
    }


def _build_container(kind: Kind, spec: JobSpec, role: Role, settings: KubernetesConfig) -> dict[str, Any]:
    limits = {"cpu": settings.cpu, "memory": settings.memory}
    if settings.gpus_per_node and role.name == WORKER:  # servers compute on CPUs
        limits[settings.gpu_resource] = str(settings.gpus_per_node)
    limits |= build_resources(settings.fabric)
    environment = {
        **build_environment(settings.fabric),
        **spec.environment,
        ADDRESS_ENV: kind.build_address(spec),
        "HOME": "/tmp",
        SCRATCH_ENV: settings.scratch,
        "PYTHONUNBUFFERED": "1",
        **({name: f"{CA_FOLDER}/ca.crt" for name in CA_VARIABLES} if settings.ca_bundle else {}),
        **({LOCKS_MEMORY_ENV: "1"} if PRESETS[settings.fabric.kind].locks_memory else {}),
    }
    return {
        "name": kind.container,
        "image": settings.trainer_image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": ["kftrain", *role.arguments],
        "env": [
            *({"name": name, "value": value} for name, value in sorted(environment.items())),
            {"name": NODE_RANK_ENV, "valueFrom": {"fieldRef": {"fieldPath": kind.index_field}}},
            {"name": NODE_NAME_ENV, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            *_build_rack_variable(settings.rack_label),
        ],
        "envFrom": [{"secretRef": {"name": name, "optional": True}} for name in settings.secrets],
        "resources": {"limits": limits, "requests": dict(limits)},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            **(ROOT if settings.fabric.runs_as_root else {"capabilities": {"drop": ["ALL"]}}),
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "shared-memory", "mountPath": "/dev/shm"},
            {"name": "scratch", "mountPath": "/tmp"},
            *([{"name": "ca", "mountPath": CA_FOLDER, "readOnly": True}] if settings.ca_bundle else []),
            *settings.volume_mounts,
        ],
    }


def _build_rack_variable(label: str) -> list[dict[str, Any]]:
    """Build the variable that tells a pod its rack; a pod without the label is in a rack without a name."""
    path = {"fieldPath": f"metadata.labels['{label}']"}
    return [{"name": RACK_ENV, "valueFrom": {"fieldRef": path}}] if label else []


def _build_tolerations() -> list[dict[str, Any]]:
    """Build tolerations that delete a pod from a lost node after a minute, not after the default of five."""
    return [
        {"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60}
        for key in ("not-ready", "unreachable")
    ]
