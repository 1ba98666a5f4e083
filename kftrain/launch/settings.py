"""The section `launch`."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from kftrain.core.credentials import SECRET_VARIABLES
from kftrain.launch.backends import BACKENDS, BackendName
from kftrain.launch.kubernetes.settings import KubernetesConfig
from kftrain.launch.ray_settings import RayConfig
from kftrain.launch.slurm_settings import SlurmConfig
from kftrain.settings.section import Amount, Count, KeepsTraining, Section

_OUR_VARIABLES = re.compile(
    "KFTRAIN_.*|KFP_.*|SLURM_.*|SBATCH_.*|RAY_.*|PET_.*|TORCHELASTIC_.*|MASTER_(ADDR|PORT)|(GROUP_|LOCAL_|ROLE_)?(RANK|WORLD_SIZE)"
    "|HOME|PYTHONUNBUFFERED|AWS_CA_BUNDLE|REQUESTS_CA_BUNDLE|SSL_CERT_FILE"
)
"""Variables of the workers' environment that launcher, supervisor, torchrun or the training operator set."""


def _require_free(name: str) -> str:
    if name in SECRET_VARIABLES:
        raise ValueError("its value would be kept and shown; put it into a secret (launch.kubernetes.secrets)")
    if _OUR_VARIABLES.fullmatch(name) or not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError("it is set by kftrain, or is no name of a variable; choose another one")
    return name


VariableName = Annotated[str, AfterValidator(_require_free)]
"""Name of an environment variable that kftrain leaves to users."""


class LaunchConfig(Section):
    """Training and evaluation jobs: where they run, and on how many machines."""

    backend: KeepsTraining[BackendName] = "local"
    """Place of the processes: `local`, this machine; `pytorchjob`, pods of the Kubeflow training operator (version
    1); `trainjob`, pods of Kubeflow Trainer (version 2); `jobset`, pods of a JobSet; `slurm`, nodes of a Slurm
    cluster; `ray`, nodes of a Ray cluster; `rayjob`, pods of a Ray cluster that KubeRay makes for the job."""
    kubernetes: KubernetesConfig = KubernetesConfig()
    """The pods of a job; the local backend has none."""
    nodes: KeepsTraining[Count] = 1
    """Number of machines for one job."""
    processes_per_node: KeepsTraining[Literal["auto"] | Count] = "auto"
    """Processes on each machine; `auto`: one per GPU, or 2 without GPUs. For a cluster the GPUs are
    `kubernetes.gpus_per_node`."""
    environment: KeepsTraining[dict[VariableName, str]] = Field(default={})
    """Additional environment variables of the workers, such as `NCCL_DEBUG`. Variables that kftrain sets are refused,
    and so are credentials: they come from secrets."""
    max_restarts_without_progress: KeepsTraining[Amount] = 3
    """Attempts in a row that may fail without a new checkpoint before the job is given up."""
    timeout_seconds: KeepsTraining[Annotated[float, Field(gt=0)]] = 600.0
    """Time that a process may wait for another one in a collective operation; a longer wait is a hang and ends the
    attempt. A process that no other one on its node waits for may take twice as long between two operations."""
    slurm: SlurmConfig = SlurmConfig()
    """The options of a job of a Slurm cluster."""
    ray: RayConfig = RayConfig()
    """The Ray cluster, and what a job asks of it."""

    device_memory_gib: KeepsTraining[Annotated[float, Field(ge=0)]] = 0.0
    """Memory of a GPU, or of a process without one, for `parallel.layout: auto`; 0: not known."""

    @model_validator(mode="after")
    def _stays_within_nvlink(self) -> LaunchConfig:
        if self.nodes > 1 and self.kubernetes.fabric.kind == "nvlink":
            raise ValueError("kubernetes.fabric.kind nvlink joins the GPUs of one machine: set nodes to 1")
        return self

    @property
    def is_remote(self) -> bool:
        """True if jobs run on other machines; else they run below the launcher, in its environment."""
        return BACKENDS[self.backend].is_remote

    @property
    def has_pods(self) -> bool:
        """True if jobs are pods, which have the settings of `kubernetes`."""
        return BACKENDS[self.backend].has_pods

    @property
    def gpus_per_node(self) -> int:
        """GPUs required per node; 0 uses whatever is present."""
        if self.has_pods:
            return self.kubernetes.gpus_per_node
        return {"slurm": self.slurm.gpus_per_node, "ray": self.ray.gpus_per_node}.get(self.backend, 0)
