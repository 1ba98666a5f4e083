"""The tensors of an export: each process reads its parts of them, and every byte is checked.

One process alone reads each file once, from the first byte to the last, and hashes what it reads: the bytes that were
checked are the ones that are loaded. Of several processes each hashes some of the files, and reads its own parts once
all of them are known to be good; that nobody has replaced a file in between is seen by its size and version. Where the
processes do not see the same versions (each machine has a copy of its own), each hashes all files.

Which files there are says the manifest, which tensors are in them say their headers. The index is for other programs.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kftrain.checkpoint.tensor_files import (
    PIECE_BYTES,
    Part,
    StoredTensor,
    TensorForm,
    copy_part,
    pass_over,
    read_header,
    row_range,
)
from kftrain.core import storage
from kftrain.errors import CheckpointError
from kftrain.run import commit
from kftrain.run.commit import FileEntry
from kftrain.run.export import ExportManifest, list_tensor_entries

if TYPE_CHECKING:
    import torch

    from kftrain.parallel.world import World

READ_FAILED = "the export could not be read"


@dataclass(frozen=True)
class WantedPart:
    """A part of a tensor, and where it goes."""

    part: Part
    target: torch.Tensor
    """Contiguous, of the part's shape; of another type or on another device its numbers are converted."""


class ExportTensors:
    """The tensors of one export, whose files are open."""

    def __init__(self, uri: str, files: list[_OpenFile]) -> None:
        self._uri = uri
        self._files = files
        self.forms: dict[str, TensorForm] = {}
        """Name -> dtype and shape, from the headers, whose digests are not checked yet."""
        for file in files:
            for name, stored in file.tensors.items():
                if name in self.forms:
                    raise CheckpointError("two files of the export hold the same tensor", where=uri, value=name)
                self.forms[name] = stored.form

    def load(self, wanted: Mapping[str, WantedPart], world: World | None = None) -> None:
        """Fill the targets; they are good only when this has returned.

        `world`: the processes that load the same export, and call this together. Raises CheckpointError.
        """
        if world is None or world.size == 1:
            for file in self._files:
                file.load_all(wanted)
            return
        # Versions, digests, parts, versions again: who reads a file is not who has hashed it, so equal versions before
        # and after are what says that it was the same file. Each phase ends on all processes before the next begins.
        versions: dict[str, tuple[int, str]] = {}
        world.agree(lambda: versions.update(self._read_versions()))
        are_shared = all(others == versions for others in world.gather_slowly(versions))
        share = (world.rank, world.size) if are_shared else (0, 1)
        entries = {file.name: file.entry for file in self._files}
        world.agree(lambda: commit.verify_files(self._uri, entries, share))
        world.agree(lambda: self._load_parts(wanted, versions))

    def _load_parts(self, wanted: Mapping[str, WantedPart], versions: dict[str, tuple[int, str]]) -> None:
        for file in self._files:
            file.load_parts(wanted)
        now = self._read_versions()
        changed = next((name for name in versions if now[name] != versions[name]), None)
        if changed is not None:
            where = storage.join(self._uri, changed)
            raise CheckpointError("a file of the export was changed while it was read", where=where)

    def _read_versions(self) -> dict[str, tuple[int, str]]:
        try:
            return {file.name: storage.size_and_version(file.uri) for file in self._files}
        except FileNotFoundError as error:
            raise CheckpointError("a file of the export is missing", where=self._uri) from error


@contextlib.contextmanager
def open_tensors(uri: str, manifest: ExportManifest, world: World | None = None) -> Iterator[ExportTensors]:
    """Open the tensors of an export. Raises CheckpointError if a file is missing, or is not what its header says.

    `world`: processes that call this together, and fail together.
    """
    with contextlib.ExitStack() as stack:
        exports: list[ExportTensors] = []
        if world is None:
            exports.append(_open_files(uri, manifest, stack))
        else:
            world.agree(lambda: exports.append(_open_files(uri, manifest, stack)))
        yield exports[0]


def _open_files(uri: str, manifest: ExportManifest, stack: contextlib.ExitStack) -> ExportTensors:
    # One buffer for all files: each piece is copied to where it goes before the next one is read.
    buffer, entries = memoryview(bytearray(PIECE_BYTES)), list_tensor_entries(uri, manifest.files)
    return ExportTensors(uri, [_OpenFile(uri, name, entry, stack, buffer) for name, entry in entries.items()])


class _OpenFile:
    """File of tensors that is opened once, and hashed while it is read, as long as it is read in order."""

    def __init__(self, uri: str, name: str, entry: FileEntry, stack: contextlib.ExitStack, buffer: memoryview) -> None:
        self.name = name
        self.entry = entry
        self.uri = storage.join(uri, name)
        self._buffer = buffer
        self._digest = hashlib.sha256()
        self._is_hashed = True
        commit.require_size(self.uri, entry)  # first: the header is held against so many bytes
        try:
            self._stream = stack.enter_context(storage.open_read(self.uri))
        except FileNotFoundError as error:
            raise CheckpointError("a file is missing", where=self.uri) from error
        # By `_read`, so that the header is hashed as the tensors are.
        self.tensors: dict[str, StoredTensor] = read_header(self._read, entry.bytes, self.uri)

    def load_all(self, wanted: Mapping[str, WantedPart]) -> None:
        """Read all that is left of the file. Raises CheckpointError where it is not the one of the manifest."""
        # From the first byte to the last, without seeking, also what nobody wants: the digest is of all of it.
        for name, stored in self.tensors.items():
            num_bytes, own = stored.form.num_bytes, wanted.get(name)
            if own is None:
                pass_over(num_bytes, self._read)
                continue
            row_bytes, rows = row_range(stored.form, own.part)
            pass_over(rows.start * row_bytes, self._read)
            copy_part(stored.form, own.part, self._read, own.target)
            pass_over(num_bytes - rows.stop * row_bytes, self._read)
        if (digest := self._digest.hexdigest()) != self.entry.sha256:
            raise CheckpointError(
                "a file is damaged: its sha256 differs from the manifest", where=self.uri, value=digest
            )

    def load_parts(self, wanted: Mapping[str, WantedPart]) -> None:
        """Read what is wanted, and no more; the digest was checked before, by some process."""
        self._is_hashed = False  # parts are read out of order, and not all of them
        for name, stored in self.tensors.items():
            if own := wanted.get(name):
                row_bytes, rows = row_range(stored.form, own.part)
                with storage.simplify_errors(self.uri, READ_FAILED):
                    self._stream.seek(stored.start + rows.start * row_bytes)
                copy_part(stored.form, own.part, self._read, own.target)

    def _read(self, num_bytes: int) -> memoryview:
        view, done = self._buffer[:num_bytes], 0
        with storage.simplify_errors(self.uri, READ_FAILED):
            while done < num_bytes:
                count = self._stream.readinto(view[done:])  # type: ignore[attr-defined]
                if not count:
                    raise CheckpointError("a file has become shorter while it was read", where=self.uri)
                done += count
        if self._is_hashed:
            self._digest.update(view)
        return view
