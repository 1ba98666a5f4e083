"""The section `launch.slurm`: what a job asks of Slurm. Each key is an option of sbatch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from kftrain.settings.section import Amount, KeepsTraining, Section

START_SECONDS = 120
"""Seconds that a job needs beside its commit: Slurm's signal may come a minute early, and imports take time."""


def _require_printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("it has characters that cannot be printed")
    return text


Words = Annotated[str, AfterValidator(_require_printable)]
"""The value of an option of sbatch."""


class SlurmConfig(Section):
    """A job of a Slurm cluster."""

    partition: KeepsTraining[Words] = ""
    """Partition of the job; empty: the cluster's default."""
    account: KeepsTraining[Words] = ""
    """Account that is charged; empty: the user's default."""
    qos: KeepsTraining[Words] = ""
    """Quality of service that limits and ranks the job; empty: the account's default."""
    constraint: KeepsTraining[Words] = ""
    """Features that the nodes must have, as sbatch takes them: `a100&ib`."""
    reservation: KeepsTraining[Words] = ""
    """Reservation whose nodes the job takes."""
    gres: KeepsTraining[Words] = ""
    """Further generic resources of every node, such as `nvme:1`."""
    exclusive: KeepsTraining[bool] = False
    """True: nobody else's jobs run on its nodes."""
    cpus_per_node: KeepsTraining[Amount] = 0
    """CPUs on every node; 0: as many as the cluster gives by default."""
    gpus_per_node: KeepsTraining[Amount] = 0
    """GPUs on every node; 0 computes on the CPU."""
    time_limit_minutes: KeepsTraining[Amount] = 0
    """Time limit of one attempt; 0: that of the partition. A longer training goes on by itself from its last commit."""
    commit_seconds: KeepsTraining[Annotated[int, Field(ge=10, le=3600)]] = 120
    """Seconds before the time limit, or before a preemption, at which the workers are told to commit."""
    python: KeepsTraining[Words] = ""
    """Python with kftrain on the nodes; empty: the path of the launcher's own, in a container `python`."""
    modules: KeepsTraining[list[Words]] = Field(default=[])
    """Environment modules that the job loads before its workers start, such as `cuda/12.4`."""
    container: KeepsTraining[Literal["", "pyxis", "apptainer"]] = ""
    """Program that runs the workers in a container; empty: they run as they are."""
    container_image: KeepsTraining[Words] = ""
    """Image with kftrain, as pyxis or apptainer names it: `registry#name:tag`, the path of a `.sqsh` or `.sif`."""
    container_mounts: KeepsTraining[list[Words]] = Field(default=[])
    """Paths in the container beside `run.storage_root`, as `source:destination`."""

    @model_validator(mode="after")
    def _require_whole_container(self) -> SlurmConfig:
        if bool(self.container) != bool(self.container_image) or (self.container_mounts and not self.container):
            raise ValueError("container and container_image are set together, container_mounts only with them")
        return self
