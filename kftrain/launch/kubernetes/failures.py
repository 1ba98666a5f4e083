"""How a launcher gives a job up itself."""

from __future__ import annotations

from kftrain.errors import FailureClass, LaunchError, StorageError
from kftrain.run.advice import fix_of
from kftrain.run.error import ErrorDocument


class JobFailedError(Exception):
    """The launcher gave a job up, for a reason of a known class."""

    def __init__(self, what: str, kind: FailureClass, *, where: str, found: ErrorDocument | None = None) -> None:
        """`found` is the summary of the last attempt, where attempts have failed."""
        error = StorageError if found is not None and lacked_storage(found) else LaunchError
        super().__init__(what)
        self.error = error(what, where=where, fix=fix_of(kind)).of_class(kind)
        """Error that the launcher raises: StorageError, worth another try, for lack of storage; else LaunchError."""
        self.kind = kind
        self.found = found


def lacked_storage(summary: ErrorDocument) -> bool:
    """Tell whether an attempt failed because storage is full or cannot be reached."""
    return (summary.failure_class, summary.exit_code) == (FailureClass.STORAGE, StorageError.exit_code)
