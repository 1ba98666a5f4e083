"""The section `launch.ray`: the Ray cluster, and what a job asks of each of its nodes."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from kftrain.settings.section import Amount, Count, KeepsTraining, Section


def _require_http(address: str) -> str:
    if address and not address.startswith(("http://", "https://")):
        raise ValueError("it is no address of Ray's dashboard, such as http://head:8265 (ray:// is another protocol)")
    return address.rstrip("/")


class RayConfig(Section):
    """A job of a Ray cluster."""

    address: KeepsTraining[Annotated[str, AfterValidator(_require_http)]] = ""
    """Address of the cluster's dashboard, which takes jobs; empty: the one of this machine, at Ray's usual port."""
    cpus_per_node: KeepsTraining[Count] = 1
    """CPUs, as Ray counts them, on every node."""
    gpus_per_node: KeepsTraining[Amount] = 0
    """GPUs on every node; 0 computes on the CPU."""
    resources: KeepsTraining[dict[str, Annotated[float, Field(gt=0)]]] = Field(default={})
    """Further resources that every node must have, such as `accelerator_type:A100: 0.001`."""
    python: KeepsTraining[Annotated[str, Field(min_length=1)]] = "python"
    """Python with kftrain and Ray on the nodes."""

    @property
    def dashboard(self) -> str:
        """Address of the dashboard, given or not."""
        return self.address or "http://127.0.0.1:8265"
