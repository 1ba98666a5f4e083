"""The base of the kinds of jobs: all that differs between kinds; the rest of the launcher is the same for all.

A kind is a file that derives from `Kind`: the specification of its document, where its pods say which worker they are,
how its conditions are called, and where it is suspended. It decides nothing and calls nobody.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from kftrain.config import Config
from kftrain.core import storage
from kftrain.launch.kubernetes.labels import (
    DIGEST_ANNOTATION,
    KFP_RUN_LABEL,
    PRIORITY_LABEL,
    QUEUE_LABEL,
    RUN_LABEL,
    TASK_LABEL,
    make_label_value,
)
from kftrain.launch.kubernetes.reachable import require_reachable
from kftrain.launch.spec import WORKER, JobSpec
from kftrain.run.paths import RunPaths

Object = dict[str, Any]
"""A JSON object as the API server sends and takes it."""

SUCCEEDED, FAILED, SUSPENDED = "Succeeded", "Failed", "Suspended"
"""Conditions of a job that the launcher acts on, in our words."""

ENDED = frozenset((SUCCEEDED, FAILED))


class Kind(ABC):
    """A kind of job: what the launcher must know about one Kubernetes resource. It is stateless."""

    name: ClassVar[str]
    """Value of `kind` in the documents of its jobs."""
    group: ClassVar[str]
    version: ClassVar[str]
    plural: ClassVar[str]
    """Name of the resource in the paths of the API server."""
    operator: ClassVar[str]
    """Name of the operator that makes a job's pods, in words that follow *the*."""
    creation_failures: ClassVar[frozenset[str]]
    """Reasons of the events by which the operator says that it could not make what a job needs."""
    install: ClassVar[str]
    """The fix for a cluster that has no such kind."""
    container: ClassVar[str] = "worker"
    """Name of the container in a pod."""
    job_name_label: ClassVar[str]
    """Label of a pod that holds the name of its job."""
    index_label: ClassVar[str]
    """Label of a pod that holds its number within its role."""
    role_label: ClassVar[str] = ""
    """Label of a pod that holds its role; empty for a kind with one role only."""
    replaces_failed_pods: ClassVar[bool] = False
    """True for pods of a Job of Kubernetes: with its failure policy it replaces none whose phase says Running."""
    has_worker_codes: ClassVar[bool] = True
    """True if pods end with the exit codes of workers; False if they run something else, whose code says nothing."""
    is_one_attempt: ClassVar[bool] = False
    """True if the first failure ends a job, so that each attempt is a job of its own."""
    suspend_path: ClassVar[tuple[str, ...]] = ("spec", "suspend")
    """Keys that lead to the field by which queues and people take the pods away."""
    max_name_length: ClassVar[int] = 52
    """Characters of a job's name: pods and host names, `<job>-<role>-<index>` or so, must fit into 63."""
    condition_names: ClassVar[Mapping[str, str]] = {"Complete": SUCCEEDED, "Completed": SUCCEEDED}
    """Words of kinds for Succeeded, Failed and Suspended, where they differ from ours: its word -> ours."""

    @abstractmethod
    def build_specification(self, spec: JobSpec, config: Config) -> Object:
        """Build the `spec` of the job's document, with pods from `pod.build_template`. Pure."""

    def build_address(self, spec: JobSpec) -> str:
        """Return the host name of worker 0, where all meet; by default none: they do not, or learn it on the way."""
        return ""

    @abstractmethod
    def list_replicas(self, job: Mapping[str, Any]) -> Iterable[tuple[str, int, Mapping[str, Any]]]:
        """Return role, number and template of each group of equal pods, for a job that anybody may have written."""

    def count_replicas(self, job: Mapping[str, Any]) -> dict[str, int]:
        """Return role -> number of pods, for a job that anybody may have written."""
        counts = Counter[str]()
        for role, num_pods, _ in self.list_replicas(job):
            counts[role] += num_pods
        return dict(counts) or {WORKER: 1}

    def list_pod_templates(self, job: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
        """Return the pod templates of a job, one for each group of equal pods."""
        return [template for _, _, template in self.list_replicas(job)]

    def list_part_names(self, job: Mapping[str, Any]) -> Iterable[str]:
        """Return the names of objects between job and pods whose events say why there are no pods; none by default."""
        return ()

    @property
    def api_version(self) -> str:
        """Value of `apiVersion` in the documents of its jobs: group and version."""
        return f"{self.group}/{self.version}"

    @property
    def index_field(self) -> str:
        """Path of the field from which a pod reads its own number."""
        return f"metadata.labels['{self.index_label}']"

    def make_job_name(self, spec: JobSpec) -> str:
        """Name a job by its run and its task alone, so that every attempt and every launcher finds the same name.

        A DNS-1035 label of at most `max_name_length` characters; a long run id is cut and made unique by a digest.
        """
        name = f"{RunPaths(spec.run_uri).run_id}-{spec.task}"
        name = name if name[0].isalpha() else f"r{name}"
        if len(name) <= self.max_name_length:
            return name
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        kept = name[: self.max_name_length - len(spec.task) - len(digest) - 2].rstrip("-")
        return f"{kept}-{digest}-{spec.task}"

    def build(self, spec: JobSpec, config: Config, kfp_run_id: str = "", owner: Object | None = None) -> Object:
        """Build the document of the job that runs `spec`, ready for the API server.

        `kfp_run_id`: the Kubeflow run that it belongs to, for a label; `owner`: an owner reference, as Kubernetes
        deletes the job with its owner. Raises LaunchError if its pods could not reach storage or MLflow, or if the kind
        has no place for a role.
        """
        require_reachable(config)
        specification = self.build_specification(spec, config)
        metadata: Object = {
            "name": self.make_job_name(spec),
            "labels": _build_job_labels(spec, config, kfp_run_id),
            "annotations": {DIGEST_ANNOTATION: storage.digest_json(specification)[:16]},
        }
        if owner is not None:
            metadata["ownerReferences"] = [owner]
        return {"apiVersion": self.api_version, "kind": self.name, "metadata": metadata, "spec": specification}

    def make_pod_selector(self, job_name: str) -> str:
        """Build the label selector of a job's pods."""
        return f"{self.job_name_label}={job_name}"

    def read_index(self, pod: Mapping[str, Any]) -> int | None:
        """Return a pod's number within its role; None for somebody else's pod that bears the label of the job."""
        text = (pod["metadata"].get("labels") or {}).get(self.index_label, "0")
        return int(text) if re.fullmatch("[0-9]{1,6}", text) else None

    def read_role(self, pod: Mapping[str, Any]) -> str:
        """Return the role of a pod, in lower case; `worker` without a label."""
        return str((pod["metadata"].get("labels") or {}).get(self.role_label, WORKER)).lower()

    def read_conditions(self, job: Mapping[str, Any]) -> frozenset[str]:
        """Return the conditions of a job that are true, those that the launcher acts on in our words."""
        conditions = (job.get("status") or {}).get("conditions") or []
        return frozenset(self.condition_names.get(c["type"], c["type"]) for c in conditions if c["status"] == "True")

    def read_failure(self, job: Mapping[str, Any]) -> tuple[int, str] | None:
        """Return the exit code of a job that failed, and the operator's words; None where its pods tell, by default."""
        return None

    def is_suspended(self, job: Mapping[str, Any]) -> bool:
        """Tell whether the field at `suspend_path` says that the job is to have no pods."""
        value: Any = job
        for key in self.suspend_path:
            value = (value or {}).get(key)
        return bool(value)

    def build_suspension(self, is_suspended: bool) -> Object:
        """Build the patch that takes a job's pods away, or lets the job go on."""
        patch: Any = is_suspended
        for key in reversed(self.suspend_path):
            patch = {key: patch}
        assert isinstance(patch, dict)
        return patch

    def read_config_digest(self, job: Mapping[str, Any]) -> str:
        """Return the digest of the configuration that a job was started for; empty if its workers were told none."""
        containers = (
            container for template in self.list_pod_templates(job) for container in template["spec"]["containers"]
        )
        pairs = (pair for container in containers for pair in itertools.pairwise(container.get("command") or []))
        return next((value for option, value in pairs if option == "--digest"), "")


def build_run_labels(spec: JobSpec) -> dict[str, str]:
    """Build the labels of a job and of its pods; pods get their own, because operators copy none."""
    return {RUN_LABEL: make_label_value(RunPaths(spec.run_uri).run_id), TASK_LABEL: spec.task}


def _build_job_labels(spec: JobSpec, config: Config, kfp_run_id: str) -> dict[str, str]:
    """Build the labels of a job, with those of queue and pipeline run, which its specification does not hold."""
    settings = config.launch.kubernetes
    optional = {
        KFP_RUN_LABEL: make_label_value(kfp_run_id),
        QUEUE_LABEL: settings.queue,
        PRIORITY_LABEL: settings.queue_priority,
    }
    return {**build_run_labels(spec), **{label: value for label, value in optional.items() if value}}
