"""How much of a log is kept. Imports nothing: every process reads it before it can print."""

from __future__ import annotations

MAX_LOG_BYTES = 64 << 20
"""A log that grows beyond loses its middle: PID 1 of a pod must fill neither memory nor disk."""

MIDDLE = b"\n[the middle of this log was left out: it was too long]\n"


def shortened(content: bytes, limit: int = MAX_LOG_BYTES) -> bytes:
    """A log of at most `limit` bytes: what is longer keeps its first and last quarter of them."""
    if len(content) <= limit:
        return content
    head, _, _ = content[: limit // 4].partition(MIDDLE)
    return head + MIDDLE + content[-(limit // 4) :]
