"""Describes a registered version as a KServe InferenceService: a document for `kubectl apply`. Pure.

The container is the image that `mlflow models generate-dockerfile` describes: it has the version's environment and
serves MLflow's protocol on port 8080 (`/ping`, `/invocations`). The weights it reads from the storage root when it
starts, with the secrets that training has.
"""

from __future__ import annotations

import re
from typing import Any

from kftrain.config import Config
from kftrain.core.plugins import is_plugin
from kftrain.errors import ConfigError
from kftrain.registry.reference import Reference
from kftrain.trust import KINDS_VARIABLE

PORT = 8080
MAX_NAME_CHARACTERS = 63


def describe_inference_service(config: Config, version: int, reference: Reference, image: str) -> dict[str, Any]:
    """Return the InferenceService that serves a version, as a document for Kubernetes.

    `image`: image of the container. Raises ConfigError for a model whose name Kubernetes does not take.
    """
    pods = config.launch.kubernetes
    container: dict[str, Any] = {
        "name": "kserve-container",
        "image": image,
        "imagePullPolicy": pods.image_pull_policy,
        "ports": [{"containerPort": PORT, "protocol": "TCP"}],
        "env": _list_variables(config),
        "envFrom": [{"secretRef": {"name": name, "optional": True}} for name in pods.secrets],
        "readinessProbe": {"httpGet": {"path": "/ping", "port": PORT}, "periodSeconds": 5, "failureThreshold": 60},
        "resources": {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"memory": "2Gi"}},
        "volumeMounts": [{"name": "scratch", "mountPath": "/tmp"}, *pods.volume_mounts],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    predictor: dict[str, Any] = {
        "minReplicas": 1,
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [_drop_empty(container)],
        "imagePullSecrets": [{"name": name} for name in pods.image_pull_secrets],
        "volumes": [{"name": "scratch", "emptyDir": {"sizeLimit": pods.scratch}}, *pods.volumes],
    }
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": _drop_empty(
            {
                "name": _make_service_name(config.model_name),
                "namespace": pods.namespace,
                "labels": {"app.kubernetes.io/managed-by": "kftrain"},
                "annotations": {
                    "kftrain/model": f"{config.model_name}/{version}",
                    "kftrain/export": reference.export_uri,
                    "kftrain/export-digest": reference.export_digest,
                },
            }
        ),
        "spec": {"predictor": _drop_empty(predictor)},
    }


def _list_variables(config: Config) -> list[dict[str, str]]:
    """Return the variable that lets the server build the user's own classes; without it, loading refuses them."""
    own = [kind for kind in (config.task.kind, config.model.kind) if is_plugin(kind)]
    return [{"name": KINDS_VARIABLE, "value": ",".join(own)}] if own else []


def _make_service_name(model_name: str) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", model_name.lower()).strip("-")
    if not name or not name[0].isalpha() or len(name) > MAX_NAME_CHARACTERS:
        what, fix = "cannot be the name of a service", "begin with a letter"
        raise ConfigError(what, where="registry.model_name", value=model_name, fix=fix)
    return name


def _drop_empty(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value not in ("", [], {})}
