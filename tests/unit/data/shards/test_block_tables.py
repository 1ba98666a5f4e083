"""Tables of digests: of the bytes that are there, made by whoever has read all of a shard, and part of no digest."""

import hashlib
import io
import json
import os
import tarfile
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers.toy_data import shard_toy, text_folder, toy_config
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain.cli.shards import shards_command
from kftrain.data.shards import block_tables
from kftrain.data.shards.block_digests import DIGEST_BLOCK_BYTES, HASHED_BYTES, hash_blocks
from kftrain.data.shards.block_tables import mend_tables
from kftrain.data.shards.manifest import blocks_uri, publish_manifest, read_manifest, shard_uri
from kftrain.data.shards.verify import check_listing, verify_shards
from kftrain.errors import DataError
from kftrain.sharding.adopted.adopting import adopt


def expected_table(content: bytes) -> bytes:
    starts = range(0, len(content), 192 * 1024)
    return b"".join(hashlib.sha256(content[start : start + 192 * 1024]).digest() for start in starts)


def all_shards(manifest):
    return [shard for split in manifest.splits.values() for shard in split.shards]


def assert_has_tables(manifest_uri):
    manifest = read_manifest(manifest_uri)
    for shard in all_shards(manifest):
        table = Path(blocks_uri(manifest_uri, shard)).read_bytes()
        assert table == expected_table(Path(shard_uri(manifest_uri, shard)).read_bytes())
        assert shard.blocks_sha256 == hashlib.sha256(table).hexdigest()
    return manifest


def forget_tables(*documents):
    """What a release before has written."""
    for path in documents:
        document = json.loads(path.read_text())
        for split in document["splits"].values():
            for shard in split["shards"] if isinstance(split, dict) else split:
                del shard["blocks_sha256"]
        path.write_text(json.dumps(document))
        for table in path.parent.glob("*.blocks"):
            table.unlink()


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 3 * HASHED_BYTES))
def test_tables_of_chunks_are_those_of_the_whole(num_bytes):
    content = os.urandom(num_bytes)
    chunks = [content[start : start + HASHED_BYTES] for start in range(0, num_bytes, HASHED_BYTES)]
    assert b"".join(map(hash_blocks, chunks)) == expected_table(content) == hash_blocks(memoryview(content))


def images(folder: Path, num_samples: int = 40) -> Path:
    """A tar of which some samples are held out."""
    folder.mkdir()
    with tarfile.open(folder / "shard-000.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
        for number in range(num_samples):
            (folder / "x").write_bytes(os.urandom(20_000))
            archive.add(folder / "x", f"{number:03d}.jpg")
    (folder / "x").unlink()
    return folder


def adopted_toy(tmp_path):
    config = toy_config(images(tmp_path / "images"), tmp_path / "root", shards="adopt", validation_fraction=0.3)
    return adopt(config, None, lambda line: None).manifest_uri


def sharded_toy(tmp_path):
    return shard_toy(text_folder(tmp_path / "texts", 400), tmp_path / "root", shard_size_bytes=10**9).manifest_uri


MAKERS = {"sharding": sharded_toy, "adopting": adopted_toy}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_sharding_and_adopting_write_the_tables_of_their_shards(tmp_path, make):
    uri = make(tmp_path)
    manifest = assert_has_tables(uri)
    assert max(shard.bytes for shard in all_shards(manifest)) > 2 * DIGEST_BLOCK_BYTES
    check_listing(uri, manifest)
    verify_shards(uri, manifest)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_dataset_of_before_has_the_same_digest_and_is_given_the_same_tables(tmp_path, make):
    uri = make(tmp_path)
    written = read_manifest(uri)
    forget_tables(Path(uri), *(tmp_path / "root" / "shards" / "parts").glob("*/part.json"))
    before = read_manifest(uri)
    assert before.dataset_digest == written.dataset_digest and not any(s.blocks_sha256 for s in all_shards(before))
    verify_shards(uri, before)
    check_listing(uri, before)
    done = CliRunner().invoke(shards_command, ["verify", uri, "--json"], catch_exceptions=False)
    assert json.loads(done.stdout)["tables_written"] == len(all_shards(written))
    assert assert_has_tables(uri) == written
    assert mend_tables(uri, written) == (written, 0)


def test_parts_of_before_are_used_as_they_are(tmp_path):
    uri = sharded_toy(tmp_path)
    digest = read_manifest(uri).dataset_digest
    (part,) = (tmp_path / "root" / "shards" / "parts").glob("*/part.json")
    forget_tables(Path(uri), part)
    Path(uri).unlink()
    for pointer in (tmp_path / "root" / "shards").glob("**/by-*/*.json"):
        pointer.unlink()
    again = sharded_toy(tmp_path)
    assert again == uri and read_manifest(uri).dataset_digest == digest
    assert not any(shard.blocks_sha256 for shard in all_shards(read_manifest(uri)))
    check_listing(uri, read_manifest(uri))


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_a_damaged_shard_is_given_no_table(tmp_path):
    uri = sharded_toy(tmp_path)
    forget_tables(Path(uri), *(tmp_path / "root" / "shards" / "parts").glob("*/part.json"))
    before = Path(uri).read_bytes()
    shard = read_manifest(uri).splits["train"].shards[0]
    flip(Path(shard_uri(uri, shard)), 300_000)
    with pytest.raises(DataError, match=rf"{shard.name}: its content has changed"):
        mend_tables(uri, read_manifest(uri))
    assert Path(uri).read_bytes() == before and not Path(blocks_uri(uri, shard)).exists()


@pytest.mark.parametrize("damage", [lambda path: flip(path, 5), Path.unlink], ids=["damaged", "missing"])
def test_a_table_that_is_damaged_keeps_nobody_from_local_shards_and_is_mended(tmp_path, damage):
    uri = sharded_toy(tmp_path)
    manifest = read_manifest(uri)
    damage(Path(blocks_uri(uri, manifest.splits["train"].shards[0])))
    check_listing(uri, manifest)
    verify_shards(uri, manifest)
    assert mend_tables(uri, manifest) == (manifest, 1)
    assert_has_tables(uri)


def test_a_part_that_has_lost_a_table_is_not_encoded_again(tmp_path, monkeypatch):
    manifest = read_manifest(uri := sharded_toy(tmp_path))
    Path(blocks_uri(uri, manifest.splits["train"].shards[0])).unlink()
    for pointer in (tmp_path / "root" / "shards").glob("by-*/*.json"):
        pointer.unlink()
    monkeypatch.setattr("kftrain.sharding.parts.store.encode_part", None)
    assert shard_toy(tmp_path / "texts", tmp_path / "root", shard_size_bytes=10**9).manifest_uri == uri


def test_a_manifest_with_pages_keeps_them(tmp_path, monkeypatch):
    uri = sharded_toy(tmp_path)
    forget_tables(Path(uri), *(tmp_path / "root" / "shards" / "parts").glob("*/part.json"))
    monkeypatch.setattr("kftrain.data.shards.manifest.MAX_PLAIN_SHARDS", 1)
    publish_manifest(uri, read_manifest(uri))
    mend_tables(uri, read_manifest(uri))
    assert "pages" in json.loads(Path(uri).read_text())
    assert_has_tables(uri)


def test_a_store_that_lies_once_gets_no_wrong_table(tmp_path, monkeypatch):
    uri = sharded_toy(tmp_path)
    forget_tables(Path(uri), *(tmp_path / "root" / "shards" / "parts").glob("*/part.json"))
    lies, open_read = iter([io.BytesIO(b"x" * 10**6)]), block_tables.storage.open_read

    def lie_once(where):
        return next(lies, None) or open_read(where)

    monkeypatch.setattr(block_tables.storage, "open_read", lie_once)
    with pytest.raises(DataError, match="not always what it holds"):
        mend_tables(uri, read_manifest(uri))
    assert not list(tmp_path.rglob("*.blocks"))


def test_who_may_not_write_verifies_all_the_same(tmp_path, monkeypatch):
    uri = sharded_toy(tmp_path)
    forget_tables(Path(uri), *(tmp_path / "root" / "shards" / "parts").glob("*/part.json"))

    def refuse(*arguments):
        raise PermissionError(13, "no")

    monkeypatch.setattr("kftrain.core.storage.publish", refuse)
    done = CliRunner().invoke(shards_command, ["verify", uri, "--json"], catch_exceptions=False)
    assert json.loads(done.stdout)["tables_written"] == 0 and "cannot be written" in done.stderr
