"""Numbers, and indexes, that lead out of a shard: memory there is never read."""

import mmap
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.splits import open_split
from helpers.toy_data import shard_toy, text_folder

from kftrain.data.schema import Field, SampleSchema
from kftrain.data.shards.manifest import row_bytes
from kftrain.data.shards.mapped import MappedBytes
from kftrain.data.shards.reader import _is_sound
from kftrain.errors import DataError

FIELD = Field("x", "int32", (4,))
SIZE = row_bytes(FIELD)


@pytest.mark.parametrize(
    ("index", "is_sound"),
    [
        ([[1, 512, SIZE], [1, 1536, SIZE]], True),
        ([[1, 512, SIZE], [1, 10_240 - SIZE, SIZE]], True),
        ([[1, 512, SIZE], [1, 10_241 - SIZE, SIZE]], False),
        ([[1, 512, SIZE], [1, 2**63 - 8, SIZE]], False),
        ([[1, 512, SIZE], [1, -8, SIZE]], False),
        ([[2**60, 512, 0], [1, 1536, SIZE]], False),
        ([[2**60, 512, 0], [2**60, 1536, 0]], False),
    ],
)
def test_an_index_is_sound_only_if_all_its_rows_lie_within_the_shard_whatever_overflows(index, is_sound):
    table = np.array(index, np.int64)
    shard = SimpleNamespace(num_blocks=2, num_samples=sum(row[0] for row in index), bytes=10_240)
    assert _is_sound(table, shard, SampleSchema((FIELD,))) is is_sound


@pytest.mark.parametrize("offset", [-1, 4096 - SIZE + 1, 2**40])
def test_bytes_outside_of_a_mapped_file_have_no_address(offset):
    mapped = MappedBytes(mmap.mmap(-1, 4096))
    assert len(mapped.locate(np.array([0, 4096 - SIZE]), SIZE)) == 2 and not len(mapped.locate(np.empty(0, int), SIZE))
    with pytest.raises(DataError, match="outside of their shard"):
        mapped.locate(np.array([0, offset]), SIZE)


def test_a_number_that_no_sample_has_is_refused(tmp_path):
    manifest_uri = shard_toy(text_folder(tmp_path / "texts", 60), tmp_path / "root").manifest_uri
    dataset = open_split(manifest_uri, "train")
    for numbers in ([-1], [-dataset.num_samples], [dataset.num_samples], [0, dataset.num_samples, 1]):
        with pytest.raises(IndexError, match=f"of {dataset.num_samples}$"):
            dataset.read(np.array(numbers))
    assert dataset.read(np.array([], np.int64))["data"].shape == (0, 8)
