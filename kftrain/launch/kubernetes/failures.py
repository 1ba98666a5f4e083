"""How a launcher gives a job up itself."""

from __future__ import annotations

from kftrain.errors import LaunchError, StorageError
from kftrain.run.advice import FailureClass, remedy
from kftrain.run.documents import FailureSummary


class JobFailedError(Exception):
    """The launcher gave a job up, for a reason of a known class."""

    def __init__(self, what: str, kind: FailureClass, *, where: str, found: FailureSummary | None = None) -> None:
        """`found` is the summary of the last attempt, where attempts have failed."""
        error = StorageError if found is not None and lacked_storage(found) else LaunchError
        super().__init__(what)
        self.error = error(what, where=where, fix=remedy(kind))
        """What the launcher raises: what was given up for lack of storage may be done once that is mended."""
        self.kind, self.found = kind, found


def lacked_storage(found: FailureSummary) -> bool:
    """Whether an attempt failed because storage is full or away."""
    return (found.failure_class, found.exit_code) == (FailureClass.STORAGE.value, StorageError.exit_code)
