"""Shards that nobody has touched since they were found whole are not hashed again before they are reused.

    <folder of the manifest>/seen.json    digest of the states of the dataset's files, as they were then

The state of a file is its time of modification and of change and its inode or, in an object store, its entity tag and
its version. Bits that a disk turns by itself change none of them: training hashes what it reads, and a job that has
failed for its data makes the next sharding hash everything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping

from kftrain.core import storage
from kftrain.core.progress import Progress
from kftrain.data.shards import verify
from kftrain.data.shards.manifest import MANIFEST_NAME, Manifest, read_manifest
from kftrain.errors import DataError
from kftrain.run.best_effort import best_effort

_HASHED_AGAIN = "the shards will be hashed again before they are reused"


def note_written(uri: str, manifest: Manifest, reused: Collection[str]) -> None:
    """Note a dataset that has just been written. `reused`: digests of its parts that were there, and were not hashed.

    It is noted only if those are as they were when the dataset before it, which has them, too, was found whole.
    """
    with best_effort(_HASHED_AGAIN):
        states = verify.check_listing(uri, manifest)
        if reused:
            before = _locate(uri, manifest.parent or manifest.dataset_digest)
            known = {where: states.get(where, "") for where in verify.describe_files(before, read_manifest(before))}
            unread = {where for where in states if where.rsplit("/", 2)[1] in reused}
            if not (unread <= known.keys() and _is_noted(before, known)):
                return
        storage.publish_json(_build_uri(uri), _describe(states))


def require_unchanged(uri: str, manifest: Manifest, rehash: bool, progress: Progress) -> None:
    """List the files of a dataset, and hash all of them unless they are as they were when they were found whole.

    Those of a mixture are its components'; adopted ones are hashed for `rehash` alone. Raises DataError that names the
    first that is missing or has another content.
    """
    for place in (_locate(uri, component.dataset_digest) for component in manifest.components):
        require_unchanged(place, read_manifest(place), rehash, progress)
    if manifest.components:
        return
    states = verify.check_listing(uri, manifest)
    if not rehash and (manifest.is_adopted or _is_noted(uri, states)):
        return
    progress(f"hashing the {len(states):,} files of the shards: they may have changed")
    verify.verify_shards(uri, manifest)
    with best_effort(_HASHED_AGAIN):
        storage.publish_json(_build_uri(uri), _describe(states))


@contextlib.contextmanager
def forget_if_damaged(uri: str, manifest: Manifest) -> Iterator[None]:
    """Let the files of a dataset be hashed before they are reused if the block finds that its data is damaged."""
    try:
        yield
    except DataError:
        with best_effort("the shards may be taken for whole when they are reused: set data.rehash"):
            for place in (uri, *(_locate(uri, component.dataset_digest) for component in manifest.components)):
                storage.remove(_build_uri(place))
        raise


def _is_noted(uri: str, states: Mapping[str, str]) -> bool:
    with contextlib.suppress(DataError, FileNotFoundError):
        return all(states.values()) and storage.read_json(_build_uri(uri)) == _describe(states)
    return False


def _describe(states: Mapping[str, str]) -> dict[str, str]:
    return {"states": storage.digest_json(list(states.values()))}


def _build_uri(manifest_uri: str) -> str:
    return storage.join(manifest_uri.rsplit("/", 1)[0], "seen.json")


def _locate(uri: str, dataset_digest: str) -> str:
    """Return the URI of the manifest of another dataset, whose folder lies beside that of a manifest."""
    return storage.join(uri.rsplit("/", 2)[0], dataset_digest, MANIFEST_NAME)
