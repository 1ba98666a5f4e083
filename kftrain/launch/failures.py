"""What a launcher raises when it gives a job up itself."""

from __future__ import annotations

from kftrain.advice import FailureClass, remedy
from kftrain.contracts import FailureSummary
from kftrain.errors import LaunchError


class JobFailedError(LaunchError):
    """The launcher gave a job up, for a reason of a known class."""

    def __init__(self, what: str, kind: FailureClass, *, where: str, found: FailureSummary | None = None) -> None:
        super().__init__(what, where=where, fix=remedy(kind))
        self.kind, self.found = kind, found
        """`found` is the summary of the last attempt, where attempts have failed."""
