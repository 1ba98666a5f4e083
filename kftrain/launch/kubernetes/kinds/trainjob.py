"""The TrainJob of Kubeflow Trainer, version 2.3, on the TrainingRuntime `kftrain` of `manifests/overlays/trainer`.

A TrainJob has no pod template: it names a runtime and patches some fields of the runtime's. The runtime has no torch
policy, so that our agent starts the processes instead of torchrun; Trainer makes a JobSet of it, with one Indexed Job.
What differs from job to job is in the TrainJob, what is the same for all is in the runtime, and a setting that has no
place in a patch is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kftrain.config import Config
from kftrain.errors import LaunchError
from kftrain.launch.kubernetes import pod
from kftrain.launch.kubernetes.kinds.kind import Kind, Object
from kftrain.launch.kubernetes.settings import KubernetesConfig
from kftrain.launch.spec import WORKER, JobSpec, require_workers_alone

RUNTIME = "kftrain"
"""Name of our TrainingRuntime."""

MANAGER = "kftrain.io/launcher"
"""Owner of our patch: Trainer wants a path below a domain."""

NODES = "node"
"""Name of the runtime's replicated job, and of the container in its pods; Trainer wants it."""

PATCHED = ("volumes", "nodeSelector", "affinity", "tolerations", "imagePullSecrets", "terminationGracePeriodSeconds")
"""Fields of a pod that depend on the configuration and that a patch may set."""

RUNTIME_SETTINGS = ("image_pull_policy", "secrets", "priority_class")
"""Settings that only a runtime can express. Ours has their defaults."""


class TrainJob(Kind):
    """The kind of job of `launch.backend=trainjob`, `trainer.kubeflow.org/v1alpha1`."""

    name = "TrainJob"
    group = "trainer.kubeflow.org"
    version = "v1alpha1"
    plural = "trainjobs"
    operator = "controller of Kubeflow Trainer"
    creation_failures = frozenset(("TrainJobResourcesCreationFailed", "JobCreationFailed", "FailedCreate"))
    install = "install Kubeflow Trainer 2.3"
    replaces_failed_pods = True
    container = NODES
    job_name_label = "jobset.sigs.k8s.io/jobset-name"
    index_label = "batch.kubernetes.io/job-completion-index"
    max_name_length = 46  # JobSet wants `<job>-node-0-<index>-<5 characters>` to fit into 63

    def build_specification(self, spec: JobSpec, config: Config) -> Object:
        """Build the `spec`: the runtime's name, the trainer and our patch. See `Kind.build_specification`."""
        _require_expressible(spec, config.launch.kubernetes)
        template = pod.build_template(self, spec, spec.workers, config.launch.kubernetes)
        (container,) = template["spec"]["containers"]
        patch = {key: template["spec"][key] for key in PATCHED if key in template["spec"]}
        patch["containers"] = [{"name": NODES, "volumeMounts": container["volumeMounts"]}]
        pods = {"metadata": template["metadata"], "spec": patch}
        job = {"name": NODES, "template": {"spec": {"template": pods}}}
        return {
            "runtimeRef": {"apiGroup": self.group, "kind": "TrainingRuntime", "name": RUNTIME},
            "trainer": {
                "image": container["image"],
                "command": container["command"],
                "env": container["env"],
                "numNodes": spec.workers.replicas,
                "resourcesPerNode": container["resources"],
            },
            "runtimePatches": [
                {"manager": MANAGER, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}}}
            ],
        }

    def build_address(self, spec: JobSpec) -> str:
        """Return the host name of worker 0, below the service that the JobSet has for all its pods."""
        name = self.make_job_name(spec)
        return f"{name}-{NODES}-0-0.{name}"

    def list_replicas(self, job: Mapping[str, Any]) -> Iterable[tuple[str, int, Mapping[str, Any]]]:
        """Return the nodes, of whose template a TrainJob says the container alone: see `Kind.list_replicas`."""
        trainer = job["spec"].get("trainer") or {}
        return [(WORKER, trainer.get("numNodes") or 1, {"spec": {"containers": [trainer]}})]

    def list_part_names(self, job: Mapping[str, Any]) -> Iterable[str]:
        """Return the names of the JobSet, which is the job's, and of its Job: see `Kind.list_part_names`."""
        name = job["metadata"]["name"]
        return [name, f"{name}-{NODES}-0"]


def _require_expressible(spec: JobSpec, settings: KubernetesConfig) -> None:
    """Raise LaunchError for a role, a queue or a setting of the pods that a TrainJob has no place for."""
    require_workers_alone(spec, "the runtime of our TrainJobs")
    if settings.queue:
        fix = "leave it empty, or launch by launch.backend=pytorchjob"
        what = "no version of Kueue was tried with TrainJobs of Trainer 2.3"
        raise LaunchError(what, where="launch.kubernetes.queue", value=settings.queue, fix=fix)
    for key in RUNTIME_SETTINGS:
        if getattr(settings, key) != type(settings).model_fields[key].default:
            fix = f"leave it out, and edit the TrainingRuntime {RUNTIME} of the namespace"
            what = f"a TrainJob cannot say it: it belongs to the TrainingRuntime {RUNTIME}"
            raise LaunchError(what, where=f"launch.kubernetes.{key}", value=str(getattr(settings, key)), fix=fix)


KIND = TrainJob()
