"""The Job of Kubernetes itself, with `completionMode: Indexed`: pods that do not meet, each with a share of its own.

Jobs know no `ExitCode` policy, so a rule says the same: an error that is permanent ends the job at once, a pod that was
taken away does not count, and any other one gets a successor. How often, is for the launcher to say; the limit here
only ends a job without one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kftrain.config import Config
from kftrain.errors import FIRST_RETRYABLE_CODE
from kftrain.launch.kubernetes import pod
from kftrain.launch.kubernetes.kinds.kind import Kind, Object
from kftrain.launch.kubernetes.settings import FabricConfig
from kftrain.launch.spec import WORKER, JobSpec


class IndexedJob(Kind):
    """The kind of job of tasks whose nodes do not meet, `batch/v1`."""

    name = "Job"
    group = "batch"
    version = "v1"
    plural = "jobs"
    operator = "job controller"
    creation_failures = frozenset(("FailedCreate",))
    install = "use Kubernetes 1.28 or later"
    replaces_failed_pods = True
    job_name_label = "batch.kubernetes.io/job-name"
    index_label = "batch.kubernetes.io/job-completion-index"

    def build_specification(self, spec: JobSpec, config: Config) -> Object:
        """Build the `spec`; its pods need no GPU and do not meet: see `Kind.build_specification`."""
        settings = config.launch.kubernetes.model_copy(update={"gpus_per_node": 0, "fabric": FabricConfig()})
        template, num_pods = pod.build_template(self, spec, spec.workers, settings), spec.workers.replicas
        max_failures = num_pods * (config.launch.max_restarts_without_progress + 1)
        suspension = {"suspend": True} if settings.queue else {}  # the queue lets it go
        return {**build_job(self.container, num_pods, template, max_failures), **suspension}

    def list_replicas(self, job: Mapping[str, Any]) -> Iterable[tuple[str, int, Mapping[str, Any]]]:
        """Return the one group that there is: see `Kind.list_replicas`."""
        return [(WORKER, job["spec"].get("completions") or 1, job["spec"].get("template") or {})]


def build_job(container: str, num_pods: int, template: Object, max_failures: int) -> Object:
    """Build the `spec` of an Indexed Job of so many pods, which an error of their container ends if it is permanent."""
    permanent = {"containerName": container, "operator": "In", "values": list(range(1, FIRST_RETRYABLE_CODE))}
    return {
        "completionMode": "Indexed",
        "completions": num_pods,
        "parallelism": num_pods,
        "backoffLimit": max_failures,
        # A successor comes 10 s after its pod has failed, and twice as late each time. Without this the failures of all
        # pods count together, which fail together: the second attempt of 16 nodes would wait for ten minutes.
        "backoffLimitPerIndex": max_failures,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": permanent},
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {**template, "spec": {**template["spec"], "restartPolicy": "Never"}},
    }


KIND = IndexedJob()
