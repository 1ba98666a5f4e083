"""The limit of a log, and the cut that keeps one below it. Imports nothing: every process needs it before it prints."""

from __future__ import annotations

MAX_LOG_BYTES = 64 << 20
"""Bytes beyond which a log loses its middle: PID 1 of a pod must fill neither memory nor disk."""

MIDDLE = b"\n[the middle of this log was left out: it was too long]\n"


def shorten_log(content: bytes, limit: int = MAX_LOG_BYTES) -> bytes:
    """Cut a log to its first and last `limit // 4` bytes where it is longer than `limit` bytes."""
    if len(content) <= limit:
        return content
    head, _, _ = content[: limit // 4].partition(MIDDLE)
    return head + MIDDLE + content[-(limit // 4) :]
