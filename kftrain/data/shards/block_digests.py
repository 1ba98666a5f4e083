"""Tables of digests: `train-000000.blocks` holds the sha256 of every 192 KiB of a shard, one after another.

By it a part of a shard is verified without reading the rest. The manifest names the table's own digest. A table costs
163 kB for each GB of a shard.
"""

from __future__ import annotations

import hashlib

DIGEST_BLOCK_BYTES = 192 << 10
"""Bytes of a shard that have one digest. The samples that lie side by side in a range of the training order come to a
few MiB: larger blocks would make a reader fetch much that it does not need."""

HASHED_BYTES = 3 * DIGEST_BLOCK_BYTES
"""Bytes of a shard that are hashed at once: small enough for the cache of a processor."""

DIGEST_BYTES = hashlib.sha256().digest_size


def count_digest_blocks(num_bytes: int) -> int:
    """Count the blocks of a shard."""
    return -(-num_bytes // DIGEST_BLOCK_BYTES)


def hash_blocks(content: bytes | memoryview) -> bytes:
    """Return the table of a content that begins with a block; that of several ones, in order, is theirs joined."""
    view, starts = memoryview(content), range(0, len(content), DIGEST_BLOCK_BYTES)
    return b"".join(hashlib.sha256(view[start : start + DIGEST_BLOCK_BYTES]).digest() for start in starts)
