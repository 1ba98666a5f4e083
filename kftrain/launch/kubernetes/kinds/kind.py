"""What a kind of job says of itself; everything else about jobs is the same for all kinds.

A kind is a file that derives from `Kind`: the specification of its document, where its pods say which worker they are,
how its conditions are called, and where it is suspended. It decides nothing and calls nobody.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from kftrain import storage
from kftrain.config import Config
from kftrain.launch.kubernetes.annotations import DIGEST_ANNOTATION
from kftrain.launch.kubernetes.labels import (
    KFP_RUN_LABEL,
    PRIORITY_LABEL,
    QUEUE_LABEL,
    RUN_LABEL,
    TASK_LABEL,
    label_value,
)
from kftrain.launch.kubernetes.reachable import require_reachable
from kftrain.launch.spec import WORKER, JobSpec
from kftrain.run.paths import RunPaths

Object = dict[str, Any]
"""JSON of the API server."""

SUCCEEDED, FAILED, SUSPENDED = "Succeeded", "Failed", "Suspended"
"""The conditions that a launcher knows."""

ENDED = frozenset((SUCCEEDED, FAILED))

MAX_NAME_LENGTH = 52
"""Pods and their host names are called `<job>-<role>-<index>`, or so, and must fit into 63 characters."""


class Kind(ABC):
    """A kind of job."""

    name: ClassVar[str]
    """As its `kind` says."""
    group: ClassVar[str]
    version: ClassVar[str]
    plural: ClassVar[str]
    """In the paths of the API server."""
    operator: ClassVar[str]
    """Who makes pods of a job, in words that follow *the*."""
    creation_failures: ClassVar[frozenset[str]]
    """Reasons of the events by which the operator says that it could not make what a job needs."""
    install: ClassVar[str]
    """What to do where a cluster has no such kind."""
    container: ClassVar[str] = "worker"
    """Name of the container in a pod."""
    job_name_label: ClassVar[str]
    """Of a pod: the name of its job."""
    index_label: ClassVar[str]
    """Of a pod: its number within its role."""
    role_label: ClassVar[str] = ""
    """Of a pod: its role; empty where there is one role only."""
    suspend_path: ClassVar[tuple[str, ...]] = ("spec", "suspend")
    """Of the field by which queues and people take the pods away."""
    condition_names: ClassVar[Mapping[str, str]] = {}
    """What it calls Succeeded, Failed and Suspended, where it has other words: its word -> ours."""

    @abstractmethod
    def specification(self, spec: JobSpec, config: Config) -> Object:
        """The `spec` of the job's document. Pure; the pods are `pod.template`."""

    @abstractmethod
    def address(self, spec: JobSpec) -> str:
        """The host name of worker 0, at which all meet."""

    @abstractmethod
    def replicas(self, job: Mapping[str, Any]) -> dict[str, int]:
        """Role -> how many pods it has; of a job that anybody may have written."""

    @abstractmethod
    def pod_templates(self, job: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
        """The templates of its pods, one a role."""

    @property
    def api_version(self) -> str:
        """As its document says."""
        return f"{self.group}/{self.version}"

    @property
    def index_field(self) -> str:
        """The field of a pod in which it reads its number."""
        return f"metadata.labels['{self.index_label}']"

    def job_name(self, spec: JobSpec) -> str:
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

    def build(self, spec: JobSpec, config: Config, kfp_run_id: str = "", owner: Object | None = None) -> Object:
        """The job that runs `spec`, ready for the API server. Raises LaunchError where it cannot work.

        Args:
            spec: The job.
            config: Its configuration.
            kfp_run_id: The Kubeflow run that it belongs to, for a label.
            owner: An owner reference: with the owner the job goes.
        """
        require_reachable(config)
        specification = self.specification(spec, config)
        metadata: Object = {
            "name": self.job_name(spec),
            "labels": _job_labels(spec, config, kfp_run_id),
            "annotations": {DIGEST_ANNOTATION: storage.digest_json(specification)[:16]},
        }
        if owner is not None:
            metadata["ownerReferences"] = [owner]
        return {"apiVersion": self.api_version, "kind": self.name, "metadata": metadata, "spec": specification}

    def pod_selector(self, job_name: str) -> str:
        """Selects the pods of a job."""
        return f"{self.job_name_label}={job_name}"

    def index_of(self, pod: Mapping[str, Any]) -> int | None:
        """Which of its role a pod is; None: somebody else's, which has the label of the job all the same."""
        text = (pod["metadata"].get("labels") or {}).get(self.index_label, "0")
        return int(text) if re.fullmatch("[0-9]{1,6}", text) else None

    def role_of(self, pod: Mapping[str, Any]) -> str:
        """The role of a pod."""
        return str((pod["metadata"].get("labels") or {}).get(self.role_label, WORKER)).lower()

    def conditions(self, job: Mapping[str, Any]) -> frozenset[str]:
        """The conditions that are true, in our words where they are those that a launcher knows."""
        found = (job.get("status") or {}).get("conditions") or []
        return frozenset(self.condition_names.get(c["type"], c["type"]) for c in found if c["status"] == "True")

    def is_suspended(self, job: Mapping[str, Any]) -> bool:
        """Whether its field says that no pod is wanted."""
        found: Any = job
        for key in self.suspend_path:
            found = (found or {}).get(key)
        return bool(found)

    def suspension(self, is_suspended: bool) -> Object:
        """The patch that takes its pods away, or lets it go on."""
        patch: Any = is_suspended
        for key in reversed(self.suspend_path):
            patch = {key: patch}
        assert isinstance(patch, dict)
        return patch

    def started_for(self, job: Mapping[str, Any]) -> str:
        """Digest of the configuration that a job was started for; empty where its workers were told none."""
        containers = (container for template in self.pod_templates(job) for container in template["spec"]["containers"])
        pairs = (pair for container in containers for pair in itertools.pairwise(container.get("command") or []))
        return next((value for option, value in pairs if option == "--digest"), "")


def run_labels(spec: JobSpec) -> dict[str, str]:
    """Of a job and of its pods, to which operators copy none."""
    return {RUN_LABEL: label_value(RunPaths(spec.run_uri).run_id), TASK_LABEL: spec.task}


def _job_labels(spec: JobSpec, config: Config, kfp_run_id: str) -> dict[str, str]:
    """Labels of the job alone; they are not part of its specification."""
    settings = config.launch.kubernetes
    optional = {
        KFP_RUN_LABEL: label_value(kfp_run_id),
        QUEUE_LABEL: settings.queue,
        PRIORITY_LABEL: settings.queue_priority,
    }
    return {**run_labels(spec), **{label: value for label, value in optional.items() if value}}
