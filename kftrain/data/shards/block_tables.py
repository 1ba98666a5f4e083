"""Makes the tables of digests that a dataset lacks: one that a release before has written, or that has lost some."""

from __future__ import annotations

import contextlib
import hashlib

from kftrain.core import storage
from kftrain.data.shards import manifest as manifests
from kftrain.data.shards.block_digests import HASHED_BYTES, hash_blocks
from kftrain.data.shards.manifest import Manifest, Shard, Split
from kftrain.data.shards.verified import make_changed_error, require_content


def mend_tables(manifest_uri: str, manifest: Manifest) -> tuple[Manifest, int]:
    """Write each table that is missing or damaged; return the manifest that names all of them, and how many came.

    That is published at `manifest_uri` if any came. Raises DataError where a shard is not what the manifest says, and
    OSError where nothing may be written.
    """
    num_written = 0

    def mend(shard: Shard) -> Shard:
        nonlocal num_written
        if _has_table(manifest_uri, shard):
            return shard
        table = _hash_shard(manifests.shard_uri(manifest_uri, shard), shard)
        storage.publish(manifests.blocks_uri(manifest_uri, shard), table)
        num_written += 1
        return shard.model_copy(update={"blocks_sha256": storage.sha256_bytes(table)})

    splits = {name: Split(shards=[mend(shard) for shard in split.shards]) for name, split in manifest.splits.items()}
    if num_written:  # last: a manifest names nothing that is not there
        manifest = manifest.model_copy(update={"splits": splits})
        manifests.publish_manifest(manifest_uri, manifest)
    return manifest, num_written


def _has_table(manifest_uri: str, shard: Shard) -> bool:
    uri = manifests.blocks_uri(manifest_uri, shard)
    with manifests.reading(uri), contextlib.suppress(FileNotFoundError):
        return bool(shard.blocks_sha256) and storage.sha256_file(uri) == shard.blocks_sha256
    return False


def _hash_shard(uri: str, shard: Shard) -> bytes:
    """Return the table of a shard that is what the manifest says. Raises DataError."""
    digest, table, fix = hashlib.sha256(), bytearray(), manifests.choose_fix(shard)
    with manifests.reading(uri, fix), storage.open_read(uri) as stream:
        while chunk := stream.read(HASHED_BYTES):
            digest.update(chunk)
            table += hash_blocks(chunk)
    if digest.hexdigest() != shard.sha256:
        require_content(uri, shard.sha256, fix)
        raise make_changed_error(uri, "what is read of it is not always what it holds", fix, -1)
    return bytes(table)
