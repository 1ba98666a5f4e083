"""The JobSet: one Indexed Job for each role, below one service, ended together; for jobs with servers beside workers.

What a failure means is said by each Job's rules, as in `indexed_job.py`: a pod that was taken away gets a successor, a
permanent error fails its Job, and with it the set, which has no restarts of its own: the launcher counts. The set is
complete when its workers are; then its controller ends the other roles.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kftrain.config import Config
from kftrain.launch.kubernetes import pod
from kftrain.launch.kubernetes.kinds import indexed_job
from kftrain.launch.kubernetes.kinds.kind import Kind, Object
from kftrain.launch.spec import WORKER, JobSpec, Role

MAX_FAILURES = 1000
"""Failures of pods that end a set without a launcher; a launcher counts them itself."""


class JobSet(Kind):
    """The kind of job of `launch.backend=jobset`, `jobset.x-k8s.io/v1alpha2`."""

    name = "JobSet"
    group = "jobset.x-k8s.io"
    version = "v1alpha2"
    plural = "jobsets"
    operator = "JobSet controller"
    creation_failures = frozenset(("JobCreationFailed", "HeadlessServiceCreationFailed", "FailedCreate"))
    install = "install JobSet 0.12"
    replaces_failed_pods = True
    job_name_label = "jobset.sigs.k8s.io/jobset-name"
    index_label = "batch.kubernetes.io/job-completion-index"
    role_label = "jobset.sigs.k8s.io/replicatedjob-name"
    max_name_length = 44  # JobSet wants `<job>-<role>-0-<index>-<5 characters>` to fit into 63

    def build_specification(self, spec: JobSpec, config: Config) -> Object:
        """Build the `spec`: a replicated job for each role. See `Kind.build_specification`."""
        return {
            "replicatedJobs": [self._build_role(spec, role, config) for role in spec.roles],
            # They meet before they are ready.
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [WORKER]},
            "failurePolicy": {"maxRestarts": 0},
            **({"suspend": True} if config.launch.kubernetes.queue else {}),  # the queue lets it go
        }

    def _build_role(self, spec: JobSpec, role: Role, config: Config) -> Object:
        template = pod.build_template(self, spec, role, config.launch.kubernetes)
        job = indexed_job.build_job(self.container, role.replicas, template, MAX_FAILURES)
        return {"name": role.name, "replicas": 1, "template": {"spec": job}}

    def build_address(self, spec: JobSpec) -> str:
        """Return the host name of worker 0, below the service that the JobSet has for all its pods."""
        name = self.make_job_name(spec)
        return f"{name}-{WORKER}-0-0.{name}"

    def list_replicas(self, job: Mapping[str, Any]) -> Iterable[tuple[str, int, Mapping[str, Any]]]:
        """Return a group for each replicated job: see `Kind.list_replicas`."""
        jobs = [(role["name"], role["template"]["spec"]) for role in job["spec"].get("replicatedJobs") or []]
        return [(name, inner.get("completions") or 1, inner.get("template") or {}) for name, inner in jobs]

    def list_part_names(self, job: Mapping[str, Any]) -> Iterable[str]:
        """Return the name of the workers' Job: see `Kind.list_part_names`."""
        return [f"{job['metadata']['name']}-{WORKER}-0"]


KIND = JobSet()
