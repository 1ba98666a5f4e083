"""The section `launch.kubernetes`: the pods of a job on a cluster, and how long they may take."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from kftrain import __version__
from kftrain.settings.section import Amount, Count, KeepsTraining, Section

Quantity = Annotated[str, BeforeValidator(lambda value: str(value) if isinstance(value, int | float) else value)]
"""Amount of a resource as Kubernetes writes it, `2`, `500m`, `4Gi`; a number becomes text."""

Seconds = Annotated[float, Field(gt=0)]


class KubernetesConfig(Section):
    """The pods of a job on a cluster."""

    namespace: KeepsTraining[str] = ""
    """Where jobs are created; empty: that of the launcher's pod, or of the kubeconfig's context."""
    trainer_image: KeepsTraining[str] = f"kftrain-trainer:{__version__}"
    """Image of the workers: ours, or one that is built from it."""
    image_pull_policy: KeepsTraining[Literal["IfNotPresent", "Always", "Never"]] = "IfNotPresent"
    """When a node fetches the image."""
    image_pull_secrets: KeepsTraining[tuple[str, ...]] = ()
    """Names of secrets with registry credentials."""
    secrets: KeepsTraining[tuple[str, ...]] = ("kftrain-storage", "kftrain-mlflow")
    """Names of secrets whose keys become environment variables; one that does not exist is left out."""
    ca_bundle: KeepsTraining[str] = ""
    """Name of a config map with `ca.crt`: certificates to trust, for object stores and MLflow servers of your own."""
    cpu: KeepsTraining[Quantity] = "2"
    """CPUs of one worker pod, requested and limited."""
    memory: KeepsTraining[Quantity] = "4Gi"
    """Memory of one worker pod, requested and limited."""
    shared_memory: KeepsTraining[Quantity] = "1Gi"
    """Size of /dev/shm, through which NCCL and data loaders talk; counts as memory."""
    scratch: KeepsTraining[Quantity] = "100Gi"
    """Size of /tmp, where shards are kept that were read; a pod that fills it is evicted."""
    gpus_per_node: KeepsTraining[Amount] = 0
    """GPUs of one worker pod; 0: it computes on the CPU."""
    gpu_resource: KeepsTraining[str] = "nvidia.com/gpu"
    """Name of the GPU resource, also of a MIG slice: `nvidia.com/mig-1g.10gb`."""
    node_selector: KeepsTraining[dict[str, str]] = Field(default={})
    """Labels that a node must have."""
    rack_label: KeepsTraining[str] = ""
    """Label of a pod that tells the rack of its node, or whatever else neighbours in the network share: processes are
    numbered rack by rack. A pod knows labels of its own only; Kubernetes copies `topology.kubernetes.io/zone` of the
    node to it from 1.35 on, other labels need an admission webhook. Empty: unknown."""
    tolerations: KeepsTraining[tuple[dict[str, Any], ...]] = ()
    """Tolerations, as in a pod."""
    affinity: KeepsTraining[dict[str, Any]] = Field(default={})
    """Affinity, as in a pod."""
    volumes: KeepsTraining[tuple[dict[str, Any], ...]] = ()
    """Further volumes, as in a pod."""
    volume_mounts: KeepsTraining[tuple[dict[str, Any], ...]] = ()
    """Where the workers mount them, as in a container."""
    priority_class: KeepsTraining[str] = ""
    """PriorityClass of the pods."""
    queue: KeepsTraining[str] = ""
    """Kueue LocalQueue that admits the job."""
    queue_priority: KeepsTraining[str] = ""
    """Kueue WorkloadPriorityClass of the job."""
    termination_grace_seconds: KeepsTraining[Count] = 120
    """Time to commit a checkpoint after SIGTERM, before the pod is killed."""
    queue_timeout_seconds: KeepsTraining[Seconds] = 7 * 24 * 3600.0
    """Time in a queue before the job is given up; it counts neither as starting nor as training."""
    start_timeout_seconds: KeepsTraining[Seconds] = 900.0
    """Time from admission to the first training step (nodes, images, rendezvous), also after a restart; not that in
    which the data is verified, or storage is away."""
    training_timeout_seconds: KeepsTraining[Seconds] = 30 * 24 * 3600.0
    """Time of training over all attempts; then the job commits and ends."""

    @field_validator("gpu_resource")
    @classmethod
    def _is_no_tpu(cls, value: str) -> str:
        if "tpu" in value.lower():
            raise ValueError("there is no training on TPUs: it needs torch's XLA backend, and our images have CUDA's")
        return value
