"""The error of a process: what kind it is, and left for the supervisor before anything else takes time."""

from __future__ import annotations

import contextlib
import os
import re
import sys

from kftrain.core import storage
from kftrain.errors import (
    FailureClass,
    GpuMemoryError,
    KftrainError,
    LostPeerError,
    RetryableError,
    StorageAwayError,
    UserCodeError,
)
from kftrain.launch.spec import ERROR_FILE_ENV
from kftrain.run.advice import make_fix
from kftrain.run.error import ErrorDocument
from kftrain.worker.root_cause import LOST_PEER

_TORCH_LOST_PEER = re.compile(r"gloo/|Gloo |Connection closed by peer|NCCL|ProcessGroup(Gloo|NCCL)|c10d|TCPStore")
"""torch's wording for a lost peer, which no message of a user's code has by chance."""

_LOST_PEER = re.compile(rf"{_TORCH_LOST_PEER.pattern}|DistStore|Connection (closed|reset)|Broken pipe")
"""Wording of a RuntimeError, outside of a user's code, whose connection to a peer broke."""


def leave_error(error: Exception) -> tuple[KftrainError | None, ErrorDocument]:
    """Write an error for the supervisor, unless one is there; return it as `classify` says, and as its document."""
    known = classify(error)
    document = ErrorDocument.of(known or error, rank=int(os.environ.get("RANK", "0")))
    if ERROR_FILE_ENV in os.environ:
        with contextlib.suppress(OSError):  # it exists; or the disk is full, and the exit code says enough
            storage.create_json(os.environ[ERROR_FILE_ENV], document.to_dict())
    return known, document


def classify(error: BaseException) -> KftrainError | None:
    """Return the expected failure behind an exception; None for a bug."""
    if "torch" in sys.modules:  # else it failed before, and torch may be what cannot be imported
        known = _classify_torch(error)
        if known is not None:
            return known
    if isinstance(error, KftrainError):
        return error
    if storage.is_full(error):
        return storage.make_full_error(error)
    if storage.is_outage(error):
        return StorageAwayError(
            f"storage cannot be reached: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
        )
    return None


def _classify_torch(error: BaseException) -> KftrainError | None:
    """Return the expected failure behind an error of torch: out of GPU memory or a lost peer; else None."""
    import torch
    import torch.distributed as dist

    cause = error.__cause__ if isinstance(error, KftrainError) and error.__cause__ else error
    if isinstance(cause, torch.OutOfMemoryError):
        return GpuMemoryError("out of GPU memory", fix=make_fix(FailureClass.GPU_MEMORY))
    wording = _TORCH_LOST_PEER if isinstance(error, UserCodeError) else _LOST_PEER
    lost = isinstance(cause, dist.DistError) or (isinstance(cause, RuntimeError) and wording.search(str(cause)))
    if lost and not isinstance(error, RetryableError):
        return LostPeerError(f"{LOST_PEER}: {str(cause).splitlines()[0][:160]}")
    return None
