"""`drift.json`: what has changed between the dataset of a run and an earlier one."""

from __future__ import annotations

from typing import Literal

from kftrain.run.documents import Document, DocumentPart

Figures = tuple[float, float]
"""Mean and standard deviation of a numeric column."""


class ProfiledDataset(DocumentPart):
    """The size of a dataset's training split."""

    manifest_uri: str
    num_records: int
    content_bytes: int
    num_samples: int


class DriftShift(DocumentPart):
    """A bin of a distribution, and the shares of the values in it, from 0 to 1, before and now."""

    bin: str
    before: float
    now: float


class DriftedDistribution(DocumentPart):
    """The change of one distribution: its two indices, a level in words, and the bins that moved."""

    name: str
    psi: float
    """Population stability index; 0 where nothing has changed."""
    js_distance: float
    """Jensen-Shannon distance, from 0 to 1."""
    chance_psi: float
    """Population stability index that chance alone exceeds once in twenty times."""
    num_bins: int
    level: Literal["none", "some", "large"]
    shifts: list[DriftShift]
    before: Figures | None = None
    now: Figures | None = None


class Drift(Document):
    """The content of `drift.json`: two datasets, and every distribution that was compared between them."""

    before: ProfiledDataset
    now: ProfiledDataset
    some: float
    """Smallest population stability index that is called `some`; `large` is that of the next level."""
    large: float
    distributions: list[DriftedDistribution]
    """Every distribution that was compared, the most changed one first."""

    @property
    def drifted(self) -> list[DriftedDistribution]:
        """Distributions whose level is not `none`, the most changed one first."""
        return [distribution for distribution in self.distributions if distribution.level != "none"]

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics that runs are compared by: the largest index, and the number of changed distributions."""
        largest = {"drift_largest_psi": self.distributions[0].psi} if self.distributions else {}
        return {**largest, "drifted_distributions": float(len(self.drifted))}

    @property
    def line(self) -> str:
        """The changed distributions in one line, each with its level and index."""
        if not self.drifted:
            return "no drift against the dataset before"
        return "drift: " + ", ".join(
            f"{distribution.level} in {distribution.name} (PSI {distribution.psi:.2g})" for distribution in self.drifted
        )
