"""The section `run`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kftrain.settings.section import Amount, ChangesTraining, KeepsTraining, Section


class RunConfig(Section):
    """Name of the run and place of its files."""

    name: KeepsTraining[Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$")]] = "kftrain"
    """Short name, also part of job names: at most 40 lower-case letters, digits and dashes."""
    seed: ChangesTraining[Amount] = 0
    """Seed of the initial weights, the data order and dropout."""
    storage_root: KeepsTraining[str] = "."
    """Folder or URI in an object store below which shards and runs are kept."""
