"""The section `launch.kubernetes`: the pods of a job on a cluster, and how long they may take."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from kftrain import __version__
from kftrain.settings.section import Amount, Count, KeepsTraining, Section

Quantity = Annotated[str, BeforeValidator(lambda value: str(value) if isinstance(value, int | float) else value)]
"""Amount of a resource as Kubernetes writes it, `2`, `500m`, `4Gi`; a number becomes text."""

Seconds = Annotated[float, Field(gt=0)]
Rate = Annotated[float, Field(ge=0)]


FabricName = Literal["none", "ethernet", "infiniband", "roce", "efa", "nvlink"]
"""Network between the GPUs of a job; see `fabric.py`."""


class FabricConfig(Section):
    """The network between the GPUs of a job."""

    kind: KeepsTraining[FabricName] = "none"
    """Preset of variables, devices and /dev/shm for the pods of training and evaluation; `kftrain run --dry-run` shows
    each value with its reason. `launch.environment` stands over it. `none` sets nothing."""
    resources: KeepsTraining[dict[str, Quantity]] = Field(default={})
    """Resources of a pod in place of the preset's, such as `rdma/ib: 1`: clusters name their devices as they like."""
    check_nodes: KeepsTraining[bool] = True
    """Refuse a job if the nodes of the cluster do not have these resources. False where nodes come on demand."""
    runs_as_root: KeepsTraining[bool] = False
    """Run workers as root with the capability IPC_LOCK, where machines limit locked memory: other users have no use of
    the capability. Namespaces with Pod Security `baseline` or `restricted` refuse such pods. Else a worker on such a
    machine ends at once with an error."""

    between_nodes_gbps: KeepsTraining[Rate] = 0.0
    """Gigabits per second that a node can send to others, for `parallel.layout: auto` and `kftrain bandwidth`; 0: as
    the preset has it, 25 for `ethernet`, 400 for `infiniband` and `efa`, 200 for `roce`, else 10."""
    within_node_gbps: KeepsTraining[Rate] = 0.0
    """Gigabits per second that a process can send to others on its node; 0: 250, and 2400 on machines with NVLink."""

    @model_validator(mode="after")
    def _refuse_root_without_need(self) -> FabricConfig:
        if self.runs_as_root and self.kind not in ("infiniband", "roce", "efa"):
            raise ValueError(f"runs_as_root must be false: {self.kind} locks no memory")
        return self


class KubernetesConfig(Section):
    """The pods of a job on a cluster."""

    namespace: KeepsTraining[str] = ""
    """Namespace of the jobs; empty: that of the launcher's pod, or of the kubeconfig's context."""
    trainer_image: KeepsTraining[str] = f"kftrain-trainer:{__version__}"
    """Image of the workers: kftrain's, or one that is built from it."""
    image_pull_policy: KeepsTraining[Literal["IfNotPresent", "Always", "Never"]] = "IfNotPresent"
    """Condition under which a node fetches the image."""
    image_pull_secrets: KeepsTraining[tuple[str, ...]] = ()
    """Names of secrets with registry credentials."""
    secrets: KeepsTraining[tuple[str, ...]] = ("kftrain-storage", "kftrain-mlflow")
    """Names of secrets whose keys become environment variables; missing secrets are left out."""
    ca_bundle: KeepsTraining[str] = ""
    """Name of a config map whose `ca.crt` lists certificates to trust, for your own object stores and MLflow
    servers."""
    cpu: KeepsTraining[Quantity] = "2"
    """CPUs of one worker pod, requested and limited."""
    memory: KeepsTraining[Quantity] = "4Gi"
    """Memory of one worker pod, requested and limited."""
    shared_memory: KeepsTraining[Quantity] = "auto"
    """Size of /dev/shm, which NCCL and data loaders use; counts as memory. `auto`: 1Gi, and with a fabric of machines
    with several GPUs 1Gi for each GPU."""
    scratch: KeepsTraining[Quantity] = "100Gi"
    """Size of /tmp, which holds the shards that were read; a pod that fills it is evicted."""
    gpus_per_node: KeepsTraining[Amount] = 0
    """GPUs of one worker pod; 0 computes on the CPU."""
    gpu_resource: KeepsTraining[str] = "nvidia.com/gpu"
    """Name of the GPU resource, or of a MIG slice: `nvidia.com/mig-1g.10gb`."""
    node_selector: KeepsTraining[dict[str, str]] = Field(default={})
    """Labels that a node must have."""
    rack_label: KeepsTraining[str] = ""
    """Label of a pod that names the rack of its node, or whatever else neighbours in the network share: processes are
    numbered rack by rack. A pod knows only its own labels: from 1.35 on Kubernetes copies the node's
    `topology.kubernetes.io/zone` to it, other labels need an admission webhook. Empty: unknown."""
    tolerations: KeepsTraining[tuple[dict[str, Any], ...]] = ()
    """Tolerations of the pods, as Kubernetes writes them."""
    affinity: KeepsTraining[dict[str, Any]] = Field(default={})
    """Affinity of the pods, as Kubernetes writes it."""
    volumes: KeepsTraining[tuple[dict[str, Any], ...]] = ()
    """Additional volumes of the pods, as Kubernetes writes them."""
    volume_mounts: KeepsTraining[tuple[dict[str, Any], ...]] = ()
    """Mounts of these volumes in the workers, as Kubernetes writes them in a container."""
    priority_class: KeepsTraining[str] = ""
    """Name of the PriorityClass of the pods."""
    queue: KeepsTraining[str] = ""
    """Name of the Kueue LocalQueue that admits the job; empty: none."""
    queue_priority: KeepsTraining[str] = ""
    """Name of the Kueue WorkloadPriorityClass of the job."""
    termination_grace_seconds: KeepsTraining[Count] = 120
    """Time to commit a checkpoint after SIGTERM before the pod is killed."""
    queue_timeout_seconds: KeepsTraining[Seconds] = 7 * 24 * 3600.0
    """Time in a queue before the job is given up; it counts neither as starting nor as training."""
    start_timeout_seconds: KeepsTraining[Seconds] = 900.0
    """Time from admission to the first training step (nodes, images, rendezvous), also after a restart. Verification of
    the data and outages of storage do not count."""
    training_timeout_seconds: KeepsTraining[Seconds] = 30 * 24 * 3600.0
    """Time of training over all attempts, after which the job commits a checkpoint and ends."""
    fabric: FabricConfig = FabricConfig()
    """The network over which the pods of a job reach each other, and what they need for it."""

    @field_validator("gpu_resource")
    @classmethod
    def _is_no_tpu(cls, value: str) -> str:
        if "tpu" in value.lower():
            raise ValueError("there is no training on TPUs: it needs torch's XLA backend, and our images have CUDA's")
        return value
