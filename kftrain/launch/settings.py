"""The section `launch`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kftrain.launch.backends import BACKENDS, BackendName
from kftrain.launch.kubernetes.settings import KubernetesConfig
from kftrain.settings.section import Amount, Count, Section


class LaunchConfig(Section):
    """Where training and evaluation jobs run."""

    backend: BackendName = "local"
    """`local`: processes of this machine; `pytorchjob`: pods of the Kubeflow training operator."""
    kubernetes: KubernetesConfig = KubernetesConfig()
    """The pods of a job; the local backend has none."""
    nodes: Count = 1
    """Machines of one job."""
    processes_per_node: Literal["auto"] | Count = "auto"
    """Processes on each; `auto`: one per GPU, or 2 without any. A cluster's GPUs are `kubernetes.gpus_per_node`."""
    max_restarts_without_progress: Amount = 3
    """Attempts in a row that may fail without a new checkpoint before the job is given up."""
    timeout_seconds: Annotated[float, Field(gt=0)] = 600.0
    """How long a process may wait for another one in a collective operation; one that nobody on its node waits for may
    take twice as long between two. A hang ends the attempt."""

    @property
    def has_pods(self) -> bool:
        """Whether jobs are pods, which have `kubernetes`; others run below their launcher, in its environment."""
        return BACKENDS[self.backend].has_pods

    @property
    def gpus_per_node(self) -> int:
        """GPUs that each machine must have; 0: those that it has are used."""
        return self.kubernetes.gpus_per_node if self.has_pods else 0
