"""Tensors of a checkpoint, row by row, however the processes had cut them; the checkpoints are made by hand."""

import io
import itertools
import pickle

import pytest
import torch
from helpers.documents import entry_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from kftrain.checkpoint import chunks
from kftrain.checkpoint.chunks import StoredChunks
from kftrain.core import storage
from kftrain.errors import CheckpointError


def stored(folder, whole, rectangles):
    """A checkpoint made by hand of one tensor, cut into rectangles: where each begins, and its shape."""
    folder.mkdir(parents=True, exist_ok=True)
    content, places = io.BytesIO(), {}
    for offsets, sizes in rectangles:
        start = content.tell()
        chunk = io.BytesIO()
        torch.save(whole[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))].clone(), chunk)
        content.write(chunk.getvalue())
        index = MetadataIndex("model.w", torch.Size(offsets))
        places[index] = _StorageInfo("__0_0.distcp", start, content.tell() - start)
    listed = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in rectangles]
    entry = TensorStorageMetadata(TensorProperties.create_from_tensor(whole), whole.size(), listed)
    metadata = Metadata({"model.w": entry}, storage_data=places, storage_meta=StorageMeta())
    (folder / "__0_0.distcp").write_bytes(content.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    files = {name: entry_of(storage.join(str(folder), name)) for name in storage.list_names(str(folder))}
    return StoredChunks(str(folder), files, "model.")


@st.composite
def grids(draw):
    """A tensor cut along its rows and columns, unevenly; the cuts of the columns may differ from rows to rows."""
    num_rows, num_columns = draw(st.integers(1, 9)), draw(st.integers(1, 6))
    rectangles = []
    for first, last in cuts(draw, num_rows):
        for left, right in cuts(draw, num_columns):
            inner = cuts(draw, last - first) if draw(st.booleans()) else [(0, last - first)]
            rectangles += [((first + a, left), (b - a, right - left)) for a, b in inner]
    return (num_rows, num_columns), draw(st.permutations(rectangles))


def cuts(draw, length):
    places = sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=3))})
    return list(itertools.pairwise(places))


@given(grids(), st.sampled_from([1, 30, 1 << 20]))
@settings(max_examples=60, deadline=None)
def test_the_rows_are_those_of_the_tensor_however_it_was_cut(tmp_path_factory, case, block_bytes):
    shape, rectangles = case
    whole = torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "BLOCK_BYTES", block_bytes)
        found = stored(tmp_path_factory.mktemp("c"), whole, rectangles)
        blocks = list(found.rows("w"))
    assert torch.equal(torch.cat(blocks), whole)
    joined = [block for block in blocks if not any(tuple(block.shape) == sizes for _, sizes in rectangles)]
    assert all(block.numel() * 4 <= max(block_bytes, 4 * shape[1]) for block in joined)


def test_numbers_that_no_chunk_has_are_missed(tmp_path):
    found = stored(tmp_path, torch.ones(4, 4), [((0, 0), (4, 2)), ((0, 2), (3, 2))])
    with pytest.raises(CheckpointError, match="each number of a tensor once"):
        list(found.rows("w"))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
def test_a_scalar_and_nothing_at_all(tmp_path, shape):
    found = stored(tmp_path, torch.full(shape, 3.0), [((0,) * len(shape), shape)])
    assert [block.tolist() for block in found.rows("w")] == ([3.0] if shape == () else [])
