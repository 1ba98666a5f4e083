"""The model's tensors in a checkpoint, each row by row: whatever layout it was written in, nobody holds a whole model.

A checkpoint has each tensor in chunks, rectangles of it: what one process had. A chunk that spans whole rows is handed
out as it is; where several lie side by side, their rows are put together, a bounded number at a time. So what is in
memory is one chunk, which one training process had in its memory, too, and one block of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view

from kftrain.checkpoint import reader
from kftrain.checkpoint.tensor_files import TensorForm
from kftrain.core import storage
from kftrain.errors import CheckpointError
from kftrain.run.commit import FileEntry

BLOCK_BYTES = 256 << 20
"""Rows that are put together from chunks side by side are handed out in blocks of this size."""


class StoredChunks:
    """The tensors of a committed checkpoint below a prefix of their names, without it."""

    def __init__(self, uri: str, files: Mapping[str, FileEntry], prefix: str) -> None:
        """`files`: of its manifest, which were verified; no other is read. Raises CheckpointError."""
        self._uri = uri
        self._prefix = prefix
        self._metadata: Metadata = reader.reader(uri, files).read_metadata()
        self._tensors = {
            name.removeprefix(prefix): entry
            for name, entry in self._metadata.state_dict_metadata.items()
            if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
        }
        self.forms = {
            name: TensorForm(entry.properties.dtype, tuple(entry.size)) for name, entry in sorted(self._tensors.items())
        }
        """Name -> dtype and shape."""

    def rows(self, name: str) -> Iterator[torch.Tensor]:
        """Blocks of rows, one after the other, from the first to the last. Raises CheckpointError."""
        form, chunks = self.forms[name], self._tensors[name].chunks
        if not form.num_bytes:
            return
        if not form.shape:
            yield self._read_chunk(name, chunks[0])
            return
        # From where one chunk begins to where the next does: a chunk that fills such a range needs no copy.
        starts = sorted({0, *(int(chunk.offsets[0]) for chunk in chunks)})
        for first, last in zip(starts, [*starts[1:], form.shape[0]], strict=True):
            touching = [c for c in chunks if c.offsets[0] < last and first < c.offsets[0] + c.sizes[0]]
            if len(touching) == 1 and tuple(touching[0].sizes) == (last - first, *form.shape[1:]):
                yield self._read_chunk(name, touching[0])
            else:
                yield from self._join_chunks(name, touching, range(first, last))

    def _join_chunks(self, name: str, chunks: Sequence[ChunkStorageMetadata], rows: range) -> Iterator[torch.Tensor]:
        # A chunk is read anew for each block that it touches: time is spent so that only one is in memory at a time.
        form = self.forms[name]
        row_bytes = form.num_bytes // form.shape[0]
        for block in _blocks(rows, max(1, BLOCK_BYTES // max(1, row_bytes))):
            whole = torch.empty((len(block), *form.shape[1:]), dtype=form.dtype)
            num_missing = whole.numel()  # a hole would hand out memory that nobody has written
            for chunk in chunks:
                first = max(block.start, chunk.offsets[0])
                last = min(block.stop, chunk.offsets[0] + chunk.sizes[0])
                if first >= last:
                    continue
                columns = [slice(a, a + n) for a, n in zip(chunk.offsets[1:], chunk.sizes[1:], strict=True)]
                place = (slice(first - block.start, last - block.start), *columns)
                own = self._read_chunk(name, chunk)[first - chunk.offsets[0] : last - chunk.offsets[0]]
                whole[place] = own
                num_missing -= own.numel()
            if num_missing:
                raise CheckpointError(
                    "the checkpoint does not hold each number of a tensor once", where=self._uri, value=name
                )
            yield whole

    def _read_chunk(self, name: str, chunk: ChunkStorageMetadata) -> torch.Tensor:
        """Read one chunk. What stands in the file is unpickled in torch's safe way, as DCP does it."""
        index = MetadataIndex(self._prefix + name, chunk.offsets)
        place: Any = (self._metadata.storage_data or {}).get(index)
        if place is None or place.transform_descriptors:  # transformed: none of ours is
            raise CheckpointError("the checkpoint does not say where a tensor lies", where=self._uri, value=name)
        with storage.open_read(storage.join(self._uri, place.relative_path)) as stream:
            content: Any = _create_file_view(stream, place.offset, place.length)  # type: ignore[arg-type]
            tensor: torch.Tensor = torch.load(content, map_location="cpu", weights_only=True)
        if tuple(tensor.shape) != tuple(chunk.sizes) or tensor.dtype != self.forms[name].dtype:
            raise CheckpointError("a tensor is not the one that the metadata describes", where=self._uri, value=name)
        return tensor


def _blocks(rows: range, size: int) -> Iterator[range]:
    for start in range(rows.start, rows.stop, size):
        yield range(start, min(start + size, rows.stop))
