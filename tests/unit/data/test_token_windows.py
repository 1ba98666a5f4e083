"""A stream of tokens is cut when it is read: the oracle is one array of all tokens, as a memmap would hold it."""

import numpy as np
import pytest
from helpers.splits import open_split
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain.core import storage
from kftrain.data import windows
from kftrain.data.assets import find_storage_root, keep_assets, read_assets
from kftrain.data.schema import Block, Field, SampleSchema, Window
from kftrain.data.shards.manifest import Manifest, Split, content_digest
from kftrain.data.shards.writer import SplitWriter
from kftrain.data.windows import TokenWindows, cut_windows
from kftrain.errors import DataError

FILL = 9999
SCHEMA = SampleSchema((Field("tokens", "uint16"),))


def written(folder, blocks, schema=SCHEMA, shard_size_bytes=1 << 16):
    """A training split of these blocks, each with one of a row for validation."""
    splits = {}
    for split, own in (("train", blocks), ("validation", blocks[:1])):
        with SplitWriter(folder, split, schema, shard_size_bytes) as writer:
            for number, block in enumerate(own):
                writer.write(Block(f"b{number}", {schema.fields[0].name: block}))
            splits[split] = writer.finish()
    manifest = Manifest(
        dataset_digest=content_digest(schema, {}, splits),
        sample_schema=schema,
        task_kind="language_modeling",
        task_settings={},
        splits={name: Split(shards=shards) for name, shards in splits.items()},
        source="s",
        source_listing_digest="0",
        baselines={},
    )
    uri = str(folder / "manifest.json")
    storage.publish_json(uri, manifest.to_dict())
    return uri


def windows_of(stream, length):
    """Each token but the first is a target once: rows of `length` inputs and one more, by hand."""
    rows = [stream[start : start + length + 1].tolist() for start in range(0, len(stream) - 1, length)]
    return np.array([row + [FILL] * (length + 1 - len(row)) for row in rows], np.uint16).reshape(-1, length + 1)


def view(uri, length):
    return TokenWindows(open_split(uri, "train"), Window(length + 1, length, {"tokens": FILL}))


@settings(derandomize=True, max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 50), st.integers(1 << 11, 1 << 13))
def test_windows_are_those_of_the_joined_stream(tmp_path_factory, sizes, length, shard_size_bytes):
    stream = np.arange(sum(sizes), dtype=np.uint16)
    blocks = np.split(stream, np.cumsum(sizes)[:-1])
    found = view(written(tmp_path_factory.mktemp("w"), blocks, shard_size_bytes=shard_size_bytes), length)
    expected = windows_of(stream, length)
    assert found.num_samples == len(expected)
    if len(expected):
        order = np.random.default_rng(0).permutation(len(expected))
        read = found.read(order)["tokens"]
        assert read.dtype == np.uint16 and np.array_equal(read, expected[order])
        targets = found.read(np.arange(len(expected)))["tokens"][:, 1:].ravel()
        assert np.array_equal(targets[targets != FILL], stream[1:])


def test_a_dataset_of_several_shards_and_long_blocks_is_read_like_a_memmap(tmp_path):
    stream = np.random.default_rng(1).integers(0, 300, 200_000).astype(np.uint16)
    uri = written(tmp_path, np.split(stream, range(30_000, 200_000, 30_000)), shard_size_bytes=1 << 17)
    stream.tofile(tmp_path / "joined.bin")
    joined = np.memmap(tmp_path / "joined.bin", np.uint16)
    for length in (7, 256, 5000, 45_000):
        found = view(uri, length)
        samples = np.random.default_rng(2).integers(0, found.num_samples - 1, 40)
        expected = joined[samples[:, None] * length + np.arange(length + 1)]
        assert np.array_equal(found.read(samples)["tokens"], expected)
    assert len(open_split(uri, "train")._shards) > 2


def test_rows_of_before_are_read_as_they_are(tmp_path):
    schema = SampleSchema((Field("tokens", "uint16", (9,)),))
    rows = np.arange(27, dtype=np.uint16).reshape(3, 9)
    dataset = open_split(written(tmp_path, [rows], schema), "train")
    assert cut_windows(dataset, Window(9, 8, {"tokens": FILL})) is dataset
    assert np.array_equal(cut_windows(dataset, None).read(np.array([2, 0]))["tokens"], rows[[2, 0]])


@pytest.mark.parametrize(("num_rows", "expected"), [(0, 0), (1, 0), (2, 1), (9, 1), (10, 2), (17, 2), (18, 3)])
def test_no_window_is_without_a_target(num_rows, expected):
    assert windows.count_windows(num_rows, Window(9, 8)) == expected


def test_files_of_a_dataset_are_found_by_what_is_in_them(tmp_path):
    settings_ = {"assets": keep_assets(str(tmp_path), {"tokenizer.json": b"{}"})}
    root = find_storage_root(f"{tmp_path}/shards/{'0' * 64}/manifest.json")
    assert read_assets(root, settings_) == {"tokenizer.json": b"{}"} and read_assets(root, {}) == {}
    (path,) = tmp_path.glob("assets/*/tokenizer.json")
    assert path.parent.name == settings_["assets"]["tokenizer.json"]
    path.write_bytes(b"[]")
    with pytest.raises(DataError, match="its content has changed"):
        read_assets(root, settings_)
    assert keep_assets(str(tmp_path), {"tokenizer.json": b"{}"}) and path.read_bytes() == b"{}"
    path.unlink()
    with pytest.raises(DataError, match="missing"):
        read_assets(root, settings_)
    for name, digest in (("../x", "0" * 64), ("x", "../../x"), ("x", 3)):
        with pytest.raises(DataError, match="no file that a dataset may name"):
            read_assets(root, {"assets": {name: digest}})
