"""`drift.json`: what has changed between the dataset of a run and an earlier one."""

from __future__ import annotations

from typing import Literal

from kftrain.run.documents import Document, DocumentPart

Figures = tuple[float, float]
"""Mean and standard deviation."""


class ProfiledDataset(DocumentPart):
    """The size of a dataset's training split."""

    manifest_uri: str
    num_records: int
    content_bytes: int
    num_samples: int


class DriftShift(DocumentPart):
    """A bin of a distribution, and the share of the values in it."""

    bin: str
    before: float
    now: float


class DriftedDistribution(DocumentPart):
    """How one distribution has changed."""

    name: str
    psi: float
    """Population stability index."""
    js_distance: float
    """Jensen-Shannon distance, from 0 to 1."""
    chance_psi: float
    """What chance alone exceeds once in twenty times."""
    num_bins: int
    level: Literal["none", "some", "large"]
    shifts: list[DriftShift]
    before: Figures | None = None
    now: Figures | None = None


class Drift(Document):
    """The content of `drift.json`."""

    before: ProfiledDataset
    now: ProfiledDataset
    some: float
    """The index from which on a change is called so."""
    large: float
    distributions: list[DriftedDistribution]
    """The one that has changed most comes first."""

    @property
    def drifted(self) -> list[DriftedDistribution]:
        """Those that have changed."""
        return [each for each in self.distributions if each.level != "none"]

    @property
    def metrics(self) -> dict[str, float]:
        """What can be compared between runs: the largest index, and how many distributions have changed."""
        largest = {"drift_largest_psi": self.distributions[0].psi} if self.distributions else {}
        return {**largest, "drifted_distributions": float(len(self.drifted))}

    @property
    def line(self) -> str:
        """All of it in one line."""
        if not self.drifted:
            return "no drift against the dataset before"
        return "drift: " + ", ".join(f"{each.level} in {each.name} (PSI {each.psi:.2g})" for each in self.drifted)
