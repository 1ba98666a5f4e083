"""A user's own code: what names it, and how its exceptions become exit code 16, not a bug of ours."""

from __future__ import annotations

import os
import sys
import traceback

from kftrain.errors import KftrainError, UserCodeError, print_traceback


def is_plugin(kind: str) -> bool:
    """Tell whether a `kind` names a user's `module:attr` rather than a built-in."""
    return ":" in kind and "/" not in kind


def search_current_folder() -> None:
    """Let modules of the current folder be found."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # at the end: a user's file must not hide an installed package


class user_code:  # noqa: N801 - used as a function; a generator would cost a small model's step a tenth of its time
    """Context of a user's code: what it raises becomes a UserCodeError with its line; the traceback goes to stderr."""

    __slots__ = ("_where",)

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        # SystemExit, too: who ended the process here would leave the others to wait for it.
        if not isinstance(error, Exception | SystemExit) or isinstance(error, KftrainError):
            return
        print_traceback(error)
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise UserCodeError(
            f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})",
            where=self._where,
            fix="its traceback is in the log",
        ) from error
