"""A schedule as a CronJob of Kubernetes, for clusters without Kubeflow's scheduler: the same file, the same runs."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import yaml

from kftrain.core import storage
from kftrain.errors import ConfigError
from kftrain.schedule import cron
from kftrain.schedule.spec import Schedule

SERVICE_ACCOUNT = "kftrain-scheduled"
"""Account of the runs' pods where the schedule names none; its rights stand in manifests/base/scheduled.yaml."""

SECRETS = ("kftrain-storage", "kftrain-mlflow", "kftrain-alert")
CONFIG_FILE = "config.yaml"
MOUNT = "/etc/kftrain"

RETRIED_CODES = (137, 143)
"""Exit codes of pods that were killed or told to go, and are started again; others have said why they failed."""

MAX_NAME_LENGTH = 52
"""Characters in the name of a CronJob: its Jobs append eleven to it."""


def build_objects(schedule: Schedule, image: str, now: datetime, namespace: str = "") -> list[dict[str, Any]]:
    """Build the ConfigMap with the configuration, and the CronJob. Raises ConfigError for what a CronJob cannot do."""
    file, name = schedule.file, f"kftrain-{schedule.name}"
    every = cron.convert_to_utc(cron.parse_cron(file.cron), cron.load_zone(file.time_zone), now)
    if every.seconds != (0,):
        raise ConfigError("a CronJob starts at the full minute", where="cron", value=file.cron, fix="begin it with 0")
    if len(name) > MAX_NAME_LENGTH:
        raise ConfigError(
            "too long for a CronJob", where="name", value=schedule.name, fix=f"{MAX_NAME_LENGTH - 8} characters or less"
        )
    text = schedule.config.to_yaml()
    metadata = {"name": name, "labels": {"app.kubernetes.io/name": "kftrain", "kftrain.io/schedule": schedule.name}}
    if namespace:
        metadata["namespace"] = namespace
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {CONFIG_FILE: text}},
        {
            "apiVersion": "batch/v1",
            "kind": "CronJob",
            "metadata": metadata,
            "spec": {
                "schedule": str(every).removeprefix("0 "),
                "timeZone": "Etc/UTC",
                "concurrencyPolicy": "Forbid",
                "startingDeadlineSeconds": 3600,
                "successfulJobsHistoryLimit": 3,
                "failedJobsHistoryLimit": 3,
                "jobTemplate": {"spec": _build_job(schedule, image, name, storage.sha256_text(text)[:16])},
            },
        },
    ]


def render(schedule: Schedule, image: str, now: datetime, namespace: str = "") -> str:
    """Write the objects as YAML for `kubectl apply -f -`. Raises ConfigError, as `build_objects` does."""
    return yaml.safe_dump_all(build_objects(schedule, image, now, namespace), sort_keys=False, width=120)


def _build_job(schedule: Schedule, image: str, name: str, digest: str) -> dict[str, Any]:
    return {
        "backoffLimit": 3,
        "activeDeadlineSeconds": 30 * 24 * 3600,
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": list(RETRIED_CODES)}},
            ]
        },
        "template": {
            "metadata": {"annotations": {"sidecar.istio.io/inject": "false", "kftrain.io/config": digest}},
            "spec": _build_pod(schedule, image, name),
        },
    }


def _build_pod(schedule: Schedule, image: str, name: str) -> dict[str, Any]:
    job_name = {"fieldRef": {"fieldPath": "metadata.labels['batch.kubernetes.io/job-name']"}}
    container = {
        "name": "run",
        "image": image,
        "command": ["kftrain", "schedule", "fire", "--config", f"{MOUNT}/{CONFIG_FILE}"],
        "env": [{"name": "KFTRAIN_JOB", "valueFrom": job_name}, {"name": "HOME", "value": "/tmp"}],
        "envFrom": [{"secretRef": {"name": secret, "optional": True}} for secret in SECRETS],
        "resources": {"requests": {"cpu": "1", "memory": "2Gi"}},
        "volumeMounts": [
            {"name": "config", "mountPath": MOUNT, "readOnly": True},
            {"name": "scratch", "mountPath": "/tmp"},
        ],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    return {
        "serviceAccountName": schedule.file.service_account or SERVICE_ACCOUNT,
        "restartPolicy": "Never",
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [
            {"name": "config", "configMap": {"name": name}},
            {"name": "scratch", "emptyDir": {"sizeLimit": schedule.config.launch.kubernetes.scratch}},
        ],
    }
