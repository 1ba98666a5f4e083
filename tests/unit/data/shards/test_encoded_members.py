"""Fields that stay the files that they were: as others read them, as we read them, and what is refused."""

import hashlib
import io
import json
import tarfile
from pathlib import Path

import fsspec
import numpy as np
import pytest
from helpers.splits import open_split
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain.data.schema import BYTES, Block, Field, SampleSchema
from kftrain.data.shards.manifest import (
    Manifest,
    Split,
    check_schema,
    content_digest,
    index_name,
    read_manifest,
)
from kftrain.data.shards.npy_header import encode_npy
from kftrain.data.shards.verify import verify_keys, verify_shards
from kftrain.data.shards.writer import SplitWriter
from kftrain.errors import DataError

SCHEMA = SampleSchema(
    (Field("image", BYTES, extensions=("jpg", "png")), Field("label", "int64"), Field("mask", BYTES, (), ("mask.png",)))
)


def files(*contents: bytes) -> np.ndarray:
    found = np.empty(len(contents), object)
    found[:] = contents
    return found


def block(number: int) -> Block:
    rng = np.random.default_rng(number)
    arrays = {
        "image": files(rng.bytes(int(rng.integers(0, 3000)))),
        "label": np.array([number]),
        "mask": files(b"mask %d" % number),
    }
    return Block(f"dir/sample.{number:03d}", arrays, {"image": "png"} if number % 3 == 0 else {})


BLOCKS = [block(number) for number in range(60)]


def write_dataset(folder: Path, blocks: list[Block], schema: SampleSchema = SCHEMA, shard_size_bytes: int = 1 << 15):
    folder.mkdir(parents=True, exist_ok=True)
    shards = {}
    for split in ("train", "validation"):
        with SplitWriter(folder, split, schema, shard_size_bytes) as writer:
            for each in blocks:
                writer.write(each)
            shards[split] = writer.finish()
    manifest = Manifest(
        dataset_digest=content_digest(schema, {}, shards),
        sample_schema=schema,
        task_kind="x",
        task_settings={},
        splits={split: Split(shards=found) for split, found in shards.items()},
        source="x",
        source_listing_digest="",
        baselines={},
    )
    (folder / "manifest.json").write_text(json.dumps(manifest.to_dict()))
    return str(folder / "manifest.json")


@pytest.fixture(scope="module")
def manifest_uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_dataset(tmp_path_factory.mktemp("encoded") / "shards", BLOCKS)


@pytest.fixture
def remote_uri(manifest_uri: str):
    store = fsspec.filesystem("memory")
    for path in Path(manifest_uri).parent.iterdir():
        store.pipe_file(f"/encoded-shards/{path.name}", path.read_bytes())
    yield "memory://encoded-shards/manifest.json"
    store.rm("/encoded-shards", recursive=True)


def test_tarfile_finds_the_files_as_they_were(manifest_uri: str) -> None:
    found = {}
    for path in sorted(Path(manifest_uri).parent.glob("train-*.tar")):
        with tarfile.open(path) as archive:
            found |= {member.name: archive.extractfile(member).read() for member in archive}
    for number, each in enumerate(BLOCKS):
        key = f"dir/sample_x2e_{number:03d}"
        assert found.pop(f"{key}.{'png' if number % 3 == 0 else 'jpg'}") == each.arrays["image"][0]
        assert found.pop(f"{key}.mask.png") == each.arrays["mask"][0]
        assert np.load(io.BytesIO(found.pop(f"{key}.label.npy"))).tolist() == [number]
    assert not found


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_stock_webdataset_reads_them(manifest_uri: str) -> None:
    import webdataset

    urls = sorted(map(str, Path(manifest_uri).parent.glob("train-*.tar")))
    assert len(urls) > 1
    for sample, each in zip(webdataset.WebDataset(urls, shardshuffle=False), BLOCKS, strict=True):
        assert sample.get("jpg", sample.get("png")) == each.arrays["image"][0]
        assert sample["mask.png"] == each.arrays["mask"][0]


@pytest.mark.parametrize("place", ["local", "remote"])
def test_any_samples_are_read_in_any_order(manifest_uri: str, remote_uri: str, place: str) -> None:
    dataset = open_split(manifest_uri if place == "local" else remote_uri, "train")
    chosen = np.random.default_rng(0).integers(0, len(BLOCKS), 200)
    found = dataset.read(chosen)
    for name in ("image", "mask"):
        expected = [BLOCKS[number].arrays[name][0] for number in chosen]
        assert found[name].dtype == object and [bytes(each) for each in found[name]] == expected
    assert found["label"].tolist() == chosen.tolist()


def test_sizes_come_from_the_index(manifest_uri: str) -> None:
    dataset = open_split(manifest_uri, "train")
    expected = [8 + len(each.arrays["image"][0]) + len(each.arrays["mask"][0]) for each in BLOCKS]
    assert dataset.sample_bytes(np.arange(len(BLOCKS))[::-1]).tolist() == expected[::-1]


def test_keys_and_groups_are_those_of_the_samples(manifest_uri: str) -> None:
    dataset = open_split(manifest_uri, "validation")
    assert dataset.group_keys() == [each.key for each in BLOCKS]
    assert dataset.group_of(np.arange(60)).tolist() == list(range(60))
    verify_shards(manifest_uri, read_manifest(manifest_uri))
    verify_keys(manifest_uri, read_manifest(manifest_uri))


@settings(derandomize=True, max_examples=30, deadline=None)
@given(st.lists(st.binary(max_size=1200), min_size=1, max_size=12))
def test_any_content_comes_back(tmp_path_factory: pytest.TempPathFactory, contents: list[bytes]) -> None:
    schema = SampleSchema((Field("text", BYTES, extensions=("txt",)),))
    blocks = [Block(f"k{number}", {"text": files(content)}) for number, content in enumerate(contents)]
    uri = write_dataset(tmp_path_factory.mktemp("any"), blocks, schema, 1 << 12)
    found = open_split(uri, "train").read(np.arange(len(contents)))["text"]
    assert [bytes(each) for each in found] == contents


@pytest.mark.parametrize(
    ("field", "what"),
    [
        (Field("image", BYTES), "needs its extensions"),
        (Field("image", BYTES, (3,), ("jpg",)), "has no shape"),
        (Field("image", BYTES, (), ("JPG",)), "not an extension"),
        (Field("image", BYTES, (), ("a/b",)), "not an extension"),
        (Field("image", BYTES, (), ("pkl",)), "could run code"),
        (Field("image", BYTES, (), ("state.pth",)), "could run code"),
        (Field("image", BYTES, (), ("label.npy",)), "of one extension"),
        (Field("image", "uint8", (), ("jpg",)), "no fixed numeric format"),
    ],
)
def test_a_schema_that_could_not_be_read_is_refused(field: Field, what: str) -> None:
    with pytest.raises(DataError, match=what):
        check_schema(SampleSchema((field, Field("label", "int64"))), "x")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda b: Block(b.key, {**b.arrays, "image": np.array(["text"], object)}), "not the bytes of one file"),
        (lambda b: Block(b.key, b.arrays, {"image": "gif"}), r"a \.gif, not one of \['jpg', 'png'\]"),
        (
            lambda b: Block(b.key, {"image": files(b"1", b"2"), "label": np.arange(2), "mask": files(b"1", b"2")}),
            "not the bytes of one file",
        ),
    ],
)
def test_a_block_that_does_not_fit_is_refused(tmp_path: Path, change, what: str) -> None:
    with SplitWriter(tmp_path, "train", SCHEMA, 1 << 20) as writer, pytest.raises(DataError, match=what):
        writer.write(change(BLOCKS[0]))


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index.__setitem__((0, 2), 1 << 40),
        lambda index: index.__setitem__((0, 1), 1 << 40),
        lambda index: index.__setitem__((0, 4), 16),
        lambda index: index.__setitem__((0, 0), 2),
        lambda index: index.__setitem__((0, 6), -1),
    ],
    ids=["length", "offset", "length of an array", "rows", "negative"],
)
def test_an_index_that_leaves_its_shard_is_refused_even_when_all_digests_fit(tmp_path: Path, change) -> None:
    uri = write_dataset(tmp_path, BLOCKS[:3])
    index = np.load(tmp_path / "train-000000.index.npy")
    change(index)
    replace_indexes(uri, {"train-000000.tar": index})
    with pytest.raises(DataError, match="the index does not fit its shard"):
        open_split(uri, "train").read(np.array([0]))


def replace_indexes(uri: str, indexes: dict[str, np.ndarray]) -> None:
    """Other indexes, with a manifest to match."""
    folder, manifest = Path(uri).parent, read_manifest(uri)
    lists = {}
    for split, found in manifest.splits.items():
        lists[split] = []
        for shard in found.shards:
            content = encode_npy(indexes[shard.name]) if shard.name in indexes else b""
            if content:
                (folder / index_name(shard.name)).write_bytes(content)
            digest = hashlib.sha256(content).hexdigest() if content else shard.index_sha256
            lists[split].append(shard.model_copy(update={"index_sha256": digest}))
    document = manifest.model_copy(
        update={
            "splits": {split: Split(shards=shards) for split, shards in lists.items()},
            "dataset_digest": content_digest(manifest.sample_schema, manifest.task_settings, lists),
        }
    )
    Path(uri).write_text(json.dumps(document.to_dict()))
