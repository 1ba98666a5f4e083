"""What lies in a shard, seen by readers that are not ours."""

import hashlib
import io
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest

from kftrain.data.schema import Block, Field, SampleSchema
from kftrain.data.shards.npy_header import encode_npy
from kftrain.data.shards.tar_writer import member_header
from kftrain.data.shards.writer import SplitWriter
from kftrain.errors import DataError

SCHEMA = SampleSchema((Field("tokens", "uint16", (5,)), Field("label", "int64")))


def block(key: str, num_rows: int, seed: int = 0) -> Block:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 60_000, (num_rows, 5)).astype(np.uint16)
    return Block(key, {"tokens": tokens, "label": rng.integers(0, 9, num_rows)})


BLOCKS = [
    block(key, 1 + number * 3, number) for number, key in enumerate(["a", "dir/b.c", "__init__", "d" * 200, "ä/../ö"])
]


def write(
    folder: Path, blocks: list[Block], shard_size_bytes: int = 1 << 20, schema: SampleSchema = SCHEMA
) -> SplitWriter:
    folder.mkdir(exist_ok=True)
    with SplitWriter(folder, "train", schema, shard_size_bytes) as writer:
        for item in blocks:
            writer.write(item)
        writer.finish()
    return writer


def test_a_header_equals_that_of_pythons_tarfile() -> None:
    info = tarfile.TarInfo("folder/" + "n" * 90)
    info.size, info.mode = 12345, 0o444
    theirs = info.tobuf(tarfile.USTAR_FORMAT)
    ours = member_header(b"folder" if theirs[345:351] == b"folder" else b"", theirs[:100].rstrip(b"\0"), 12345)
    assert ours == theirs


def test_a_long_path_uses_the_prefix_as_tarfile_does() -> None:
    info = tarfile.TarInfo("p" * 120 + "/" + "n" * 90)
    info.size, info.mode = 0, 0o444
    assert member_header(b"p" * 120, b"n" * 90, 0) == info.tobuf(tarfile.USTAR_FORMAT)


@pytest.mark.parametrize(
    "array", [np.zeros((3, 4), "<u2"), np.arange(5, dtype="<i8"), np.float32(2), np.zeros((1, 0, 7))]
)
def test_npy_content_is_read_by_numpy_and_aligned(array: np.ndarray) -> None:
    content = encode_npy(np.asarray(array))
    assert np.array_equal(np.load(io.BytesIO(content)), array)
    assert (len(content) - np.asarray(array).nbytes) % 64 == 0


def test_tarfile_reads_every_member_with_fixed_metadata(tmp_path: Path) -> None:
    write(tmp_path / "s", BLOCKS)
    with tarfile.open(tmp_path / "s" / "train-000000.tar") as archive:
        members = archive.getmembers()
        assert [m.name for m in members[:4]] == [
            "a.tokens.npy",
            "a.label.npy",
            "dir/b_x2e_c.tokens.npy",
            "dir/b_x2e_c.label.npy",
        ]
        assert {(m.mode, m.uid, m.gid, m.mtime, m.uname, m.isreg()) for m in members} == {(0o444, 0, 0, 0, "", True)}
        contents = [np.load(io.BytesIO(archive.extractfile(m).read())) for m in members]
    expected = [array for item in BLOCKS for array in (item.arrays["tokens"], item.arrays["label"])]
    assert all(np.array_equal(found, array) for found, array in zip(contents, expected, strict=True))


def test_gnu_tar_lists_the_archive_without_complaint(tmp_path: Path) -> None:
    write(tmp_path / "s", BLOCKS)
    done = subprocess.run(
        ["tar", "tf", tmp_path / "s" / "train-000000.tar"], capture_output=True, text=True, check=True
    )
    assert len(done.stdout.splitlines()) == 2 * len(BLOCKS) and not done.stderr


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_stock_webdataset_reads_equal_samples(tmp_path: Path) -> None:
    import webdataset

    writer = write(tmp_path / "s", BLOCKS * 1, 4096)
    urls = [str(tmp_path / "s" / shard.name) for shard in writer.shards]
    found = list(webdataset.WebDataset(urls, shardshuffle=False).decode())
    assert len(urls) > 1 and len(found) == len(BLOCKS)
    for sample, item in zip(found, BLOCKS, strict=True):
        assert np.array_equal(sample["tokens.npy"], item.arrays["tokens"])
        assert np.array_equal(sample["label.npy"], item.arrays["label"])


def test_the_index_says_where_the_rows_of_each_field_lie(tmp_path: Path) -> None:
    write(tmp_path / "s", BLOCKS)
    index = np.load(tmp_path / "s" / "train-000000.index.npy")
    content = (tmp_path / "s" / "train-000000.tar").read_bytes()
    for (num_rows, *places), item in zip(index.tolist(), BLOCKS, strict=True):
        assert num_rows == item.num_rows
        for offset, length, name in zip(places[::2], places[1::2], ("tokens", "label"), strict=True):
            data = item.arrays[name].tobytes()
            assert content[offset : offset + length] == data and offset % 64 == 0


def test_shards_are_cut_before_they_exceed_their_size(tmp_path: Path) -> None:
    writer = write(tmp_path / "s", [block(f"k{n}", 10, n) for n in range(40)], 1 << 14)
    assert len(writer.shards) > 2
    for shard in writer.shards:
        content = (tmp_path / "s" / shard.name).read_bytes()
        assert shard.bytes == len(content) <= 1 << 14
        assert shard.sha256 == hashlib.sha256(content).hexdigest()
    assert sum(shard.num_samples for shard in writer.shards) == 400


def test_a_block_larger_than_a_shard_gets_one_of_its_own(tmp_path: Path) -> None:
    writer = write(tmp_path / "s", [block("a", 1), block("big", 9000), block("b", 1)], 1 << 16)
    assert [shard.num_samples for shard in writer.shards] == [1, 9000, 1]


def test_equal_blocks_are_equal_bytes_whatever_layout_the_arrays_have(tmp_path: Path) -> None:
    def fortran(item: Block) -> Block:
        return Block(item.key, {name: np.asfortranarray(array) for name, array in item.arrays.items()})

    first, second = write(tmp_path / "x", BLOCKS), write(tmp_path / "y", [fortran(item) for item in BLOCKS])
    assert first.shards == second.shards


def test_a_block_may_be_changed_after_it_was_written(tmp_path: Path) -> None:
    kept, changed = block("a", 4), block("a", 4)
    with SplitWriter(tmp_path, "train", SCHEMA, 1 << 16) as writer:
        writer.write(changed)
        changed.arrays["tokens"][:] = 0
        shards = writer.finish()
    assert shards == write(tmp_path / "s", [kept]).shards


@pytest.mark.parametrize(
    ("arrays", "what"),
    [
        ({"tokens": np.zeros((2, 5), np.uint16)}, r"has the fields \['tokens'\], not \['label', 'tokens'\]"),
        (
            {"tokens": np.zeros((2, 5), np.int32), "label": np.zeros(2, np.int64)},
            r"field tokens is int32 \[2, 5\], not uint16",
        ),
        (
            {"tokens": np.zeros((2, 4), np.uint16), "label": np.zeros(2, np.int64)},
            r"tokens is uint16 \[2, 4\], not .*\[2, 5\]",
        ),
        (
            {"tokens": np.zeros((2, 5), np.uint16), "label": np.zeros(3, np.int64)},
            r"field label is int64 \[3\], not .*\[2\]",
        ),
        ({"tokens": np.zeros((0, 5), np.uint16), "label": np.zeros(0, np.int64)}, "no rows"),
        ({"tokens": np.zeros((2, 5), np.uint16), "label": np.int64(3)}, r"field label is int64 \[\], not .*\[2\]"),
        ({"tokens": [[1] * 5] * 2, "label": np.zeros(2, np.int64)}, r"field tokens is int64 \[2, 5\], not uint16"),
        ({"tokens": np.uint16(1), "label": np.zeros(2, np.int64)}, "no rows"),
    ],
)
def test_a_block_that_is_not_as_its_schema_says_is_refused_by_key(tmp_path: Path, arrays: dict, what: str) -> None:
    with pytest.raises(DataError, match=what + r".*encoding 'the key'"):
        write(tmp_path / "s", [Block("the key", arrays)])
