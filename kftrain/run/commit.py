"""The commit protocol: how a folder of files becomes a checkpoint, and how a reader knows.

    step-00000100-a2/            100 steps done, written by attempt 2; never written to again
      __0_0.distcp …             sharded state (torch.distributed.checkpoint)
      .metadata
      history.json               the training curve up to here
      manifest.json              every file's bytes and sha256; step, samples consumed, digests, world size
      COMMITTED                  sha256 of manifest.json; written last

A folder without COMMITTED does not exist for readers, whatever it holds. A writer never reuses a folder: the attempt is
part of the name. Because COMMITTED holds the manifest's digest and the manifest the digest of every file, one flipped
bit anywhere is found before anything is loaded; the reader then walks back to the checkpoint before.

Nothing here imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator

from kftrain.config import ORDERS
from kftrain.core import storage
from kftrain.errors import CheckpointError, OldOrderError, OtherTrainingError
from kftrain.run import attempts, documents
from kftrain.run.paths import RunPaths
from kftrain.run.selection import BestEvaluation

MANIFEST = "manifest.json"
COMMITTED = "COMMITTED"
HISTORY = "history.json"
_NAME = re.compile(r"step-(\d{8,})-a(\d+)")


class FileEntry(documents.DocumentPart):
    """The size and sha256 of one file of a checkpoint or an export, as its manifest lists them."""

    bytes: int
    sha256: str


def _require_plain_name(name: str) -> str:
    if name in ("", ".", "..") or re.search(r"[/\\\x00-\x1f\x7f]", name):
        raise ValueError(f"{name!r} is not a plain file name")
    return name


Files = dict[Annotated[str, AfterValidator(_require_plain_name)], FileEntry]
"""File name -> its entry. A name with a slash is refused, so that no manifest reaches into another folder."""


PARTS_BEFORE = {"model": 1, "optimizer": 1}
"""Parts of the state in a manifest that names none: it was written before checkpoints had other parts."""


class CheckpointManifest(documents.Document):
    """`manifest.json` of a checkpoint: its files, and which training and which step they are the state of."""

    step: int
    samples_consumed: int
    attempt: int
    world_size: int
    dataset_digest: str
    training_digest: str
    training_identity: dict[str, Any]
    """The fields under the training digest, in full: lets a refusal name those that differ."""
    files: Files
    parts: dict[str, int] = PARTS_BEFORE
    """Names of the parts of the state, and the versions of their forms."""
    bad_samples: tuple[int, ...] = ()
    """Numbers of the training samples that were left out so far because they cannot be decoded."""
    selection: BestEvaluation | None = None
    """The best evaluation so far, where the best checkpoint is kept."""
    batch_norm_samples: int | None = None
    """Samples of a step that share the statistics of batch norms; None: the model trains no batch norm, or the
    checkpoint was written before manifests said this."""


@dataclass(frozen=True, order=True)
class CheckpointName:
    """The name of a checkpoint's folder; ordered by step, then attempt."""

    step: int
    attempt: int

    def __str__(self) -> str:
        """Return the folder's name; steps of up to eight digits sort as text."""
        return f"step-{self.step:08d}-a{self.attempt}"

    @classmethod
    def parse(cls, name: str) -> CheckpointName | None:
        """Read a folder's name, the inverse of `str`; None for names that no writer gives, such as more zeros."""
        match = _NAME.fullmatch(name)
        parsed = cls(int(match[1]), int(match[2])) if match else None
        return parsed if str(parsed) == name else None


def make_entry(text: str) -> FileEntry:
    """Compute the entry of a file that will hold this text in UTF-8."""
    return FileEntry(bytes=len(text.encode()), sha256=storage.sha256_text(text))


def commit(paths: RunPaths, name: CheckpointName, manifest: CheckpointManifest) -> str:
    """Publish the manifest, then COMMITTED if the attempt still holds the run; return the checkpoint's digest.

    Call on one process, when all files of all processes are durable. Raises FencedError.
    """
    uri = storage.join(paths.checkpoints, str(name))
    content = storage.dump_json(manifest.to_dict())
    digest = storage.sha256_text(content)
    storage.publish(storage.join(uri, MANIFEST), content)
    # Asked as late as can be: a fenced attempt may leave files behind, which no reader looks at, but never the marker.
    attempts.require_held(paths, name.attempt)
    storage.publish(storage.join(uri, COMMITTED), digest + "\n")
    return digest


def list_committed(paths: RunPaths) -> list[CheckpointName]:
    """List all committed checkpoints of a run, newest first; each one costs a look for its marker."""
    return list(_iterate_newest_first(paths))


def find_last_step(paths: RunPaths) -> int:
    """Return the step of the newest committed checkpoint; 0 where there is none."""
    return next((name.step for name in _iterate_newest_first(paths)), 0)


def _iterate_newest_first(paths: RunPaths) -> Iterator[CheckpointName]:
    """Yield committed checkpoints; look for a marker only when the next one is wanted."""
    names = filter(None, (CheckpointName.parse(name) for name in storage.list_names(paths.checkpoints)))
    for name in sorted(names, reverse=True):
        if storage.exists(storage.join(paths.checkpoints, str(name), COMMITTED)):
            yield name


def read_checkpoint_manifest(uri: str) -> tuple[CheckpointManifest, str]:
    """Read the manifest of the committed checkpoint at `uri`, and its digest, checked against COMMITTED.

    Raises CheckpointError.
    """
    marker = storage.join(uri, COMMITTED)
    try:
        expected = storage.read_bytes(marker).strip()  # bytes: a damaged marker is no text
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError("not a committed checkpoint", where=uri, fix="see: kftrain checkpoints list") from error
    where = storage.join(uri, MANIFEST)
    content = documents.read_content(where, CheckpointError)
    manifest = documents.parse_document(CheckpointManifest, content, where, CheckpointError)
    actual = storage.sha256_bytes(content)  # of the bytes: what this version would write is another text than before
    if actual.encode() != expected:
        raise CheckpointError(
            "manifest.json is not the one that was committed", where=uri, value=actual, fix="use an older one"
        )
    return manifest, actual


def verify_files(uri: str, files: dict[str, FileEntry], share: tuple[int, int] = (0, 1)) -> None:
    """Check bytes and digest of every n-th file, from the i-th on, for share (i, n).

    Raises CheckpointError naming the file.
    """
    first, stride = share
    for name, expected in sorted(files.items())[first::stride]:
        where = storage.join(uri, name)
        try:
            size = storage.size_bytes(where)
            digest = storage.sha256_file(where) if size == expected.bytes else ""
        except FileNotFoundError as error:
            raise CheckpointError("a file of the checkpoint is missing", where=where) from error
        if size != expected.bytes:
            raise CheckpointError(
                f"a file has the wrong length, expected {expected.bytes} bytes", where=where, value=size
            )
        if digest != expected.sha256:
            raise CheckpointError("a file is damaged: its sha256 differs from the manifest", where=where, value=digest)


def read_verified(uri: str, expected: FileEntry) -> bytes:
    """Read a file and check the very bytes that are returned. Raises CheckpointError."""
    require_size(uri, expected)  # first: a file of another length need not be read, however long it is
    try:
        content = storage.read_bytes(uri)
    except FileNotFoundError as error:
        raise CheckpointError("a file is missing", where=uri) from error
    if (digest := storage.sha256_bytes(content)) != expected.sha256:
        raise CheckpointError("a file is damaged: its sha256 differs from the manifest", where=uri, value=digest)
    return content


def require_size(uri: str, expected: FileEntry) -> None:
    """Raise CheckpointError where a file is missing or has another length."""
    try:
        size = storage.size_bytes(uri)
    except FileNotFoundError as error:
        raise CheckpointError("a file is missing", where=uri) from error
    if size != expected.bytes:
        raise CheckpointError(f"a file has the wrong length, expected {expected.bytes} bytes", where=uri, value=size)


def has_files(uri: str, files: dict[str, FileEntry]) -> bool:
    """Tell whether every file is there with its size; no content is read."""
    try:
        return all(storage.size_bytes(storage.join(uri, name)) == entry.bytes for name, entry in files.items())
    except FileNotFoundError:
        return False


def require_same_training(manifest: CheckpointManifest, identity: dict[str, Any], uri: str) -> None:
    """Raise OtherTrainingError that names what differs if the checkpoint belongs to another training."""
    require_present_order(manifest.training_identity, uri)
    if manifest.training_identity == identity:
        return
    fields = ", ".join(
        f"{key}: {old!r} -> {new!r}" for key, old, new in list_differences(manifest.training_identity, identity)
    )
    raise OtherTrainingError(
        "the checkpoint belongs to another training",
        where=uri,
        value=fields,
        fix="start a new run, or restore these settings",
    )


def require_present_order(identity: dict[str, Any], where: str) -> None:
    """Raise OldOrderError if a training was begun under another order of samples: no step can follow its last one."""
    if identity.get("order") not in ORDERS:
        raise OldOrderError(
            f"this training was begun under another order of samples than {' and '.join(map(str, ORDERS))}",
            where=where,
            value=identity.get("order"),
            fix="finish it with the release that began it, or start a new run",
        )


def list_differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[tuple[str, Any, Any]]:
    """Compare two nested mappings; return (dotted key, old value, new value) for every difference."""
    changes: list[tuple[str, Any, Any]] = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            changes += list_differences(before, after, f"{prefix}{key}.")
        elif before != after:
            changes.append((prefix + key, before, after))
    return changes


def choose_kept(names: list[CheckpointName], keep_last: int, best_step: int, keep_every: int) -> set[CheckpointName]:
    """Choose which of the committed checkpoints, newest first, stay.

    The newest `keep_last` do, and those at `best_step` and at multiples of `keep_every`, where 0 stands for none.
    """
    forever = (name for name in names if name.step == best_step or (keep_every and name.step % keep_every == 0))
    return {*names[:keep_last], *forever}


def retire_checkpoints(paths: RunPaths, keep_last: int, attempt: int, best_step: int = 0, keep_every: int = 0) -> None:
    """Delete committed checkpoints but `choose_kept` them, and what earlier attempts left half-written.

    COMMITTED goes first, so that a reader sees a whole checkpoint or none at every moment. Call right after a commit of
    `attempt`. Raises FencedError: a newer attempt may be reading what would be deleted here.
    """
    attempts.require_held(paths, attempt)
    kept = choose_kept(list_committed(paths), keep_last, best_step, keep_every)
    for text in storage.list_names(paths.checkpoints):
        name = CheckpointName.parse(text)
        if name is None or name in kept:
            continue
        uri = storage.join(paths.checkpoints, text)
        is_committed = storage.exists(storage.join(uri, COMMITTED))
        # Without its marker, a folder of this or of a newer attempt may be a checkpoint that is being written.
        if is_committed or name.attempt < attempt:
            storage.remove(storage.join(uri, COMMITTED))
            storage.remove(uri)
