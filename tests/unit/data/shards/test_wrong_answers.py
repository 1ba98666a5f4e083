"""Something else than the store answers for shards, with 200: it is asked again, and then the attempt, not the data."""

import os

import numpy as np
import pytest
import s3fs
from helpers.fakes.bad_server import PAGE, BadServer
from helpers.remote_shards import forget_tables
from helpers.splits import open_split
from helpers.toy_data import flat_copy, shard_toy, text_folder

import kftrain
from kftrain.core import outages, storage
from kftrain.data.dataset import ShardedDataset
from kftrain.data.settings import DataConfig
from kftrain.data.shards.manifest import read_manifest, shard_uri
from kftrain.data.shards.verified import make_first_use
from kftrain.data.shards.verify import verify_shards
from kftrain.errors import DataError, StorageError

MANIFEST_URI = "s3://bucket/shards/manifest.json"
TAR, INDEX = "/bucket/shards/train-000000.tar", "/bucket/shards/train-000000.index.npy"


@pytest.fixture(scope="module", params=["tables", "no tables"])
def objects(request, tmp_path_factory):
    """A dataset, and the same as a release before wrote it."""
    folder = tmp_path_factory.mktemp("sharded")
    flat = flat_copy(shard_toy(text_folder(folder / "texts", 100), folder / "root").manifest_uri, folder / "flat")
    if request.param == "no tables":
        forget_tables(flat)
    return {f"/bucket/shards/{path.name}": path.read_bytes() for path in flat.iterdir()}


@pytest.fixture
def server(objects, monkeypatch, tmp_path):
    running = BadServer(GET="answer")
    running.objects = dict(objects)
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setattr(outages, "_retry_policy", outages.OutagePolicy())
    monkeypatch.setattr(outages, "FIRST_DELAY_SECONDS", 0.01)
    outages.limit(0.1)
    yield running
    running.close()
    s3fs.S3FileSystem.clear_instance_cache()


def cached(manifest, tmp_path):
    data = DataConfig(cache_dir=str(tmp_path), cache_bytes=1 << 30)
    first_use = make_first_use(data, manifest.dataset_digest)
    ShardedDataset(MANIFEST_URI, manifest, "train", first_use).read(np.arange(5))
    first_use.require_verified()


READINGS = {
    "samples": lambda manifest, tmp_path: ShardedDataset(MANIFEST_URI, manifest, "train").read_range(0, 5),
    "own loop": lambda manifest, tmp_path: list(kftrain.open_dataset(MANIFEST_URI)),
    "whole shards": lambda manifest, tmp_path: verify_shards(MANIFEST_URI, manifest),
    "copies": cached,
}


@pytest.mark.parametrize("reading", READINGS.values(), ids=READINGS)
@pytest.mark.parametrize(
    ("plan", "came"),
    [
        ({"GET": "page"}, f"{len(PAGE)} bytes came instead of .*<html>"),
        ({"GET": "short"}, "bytes came instead of"),
        ({"GET": "page", "HEAD": "page", "LIST": "answer"}, f"it has {len(PAGE)} bytes|sha256 differs|bytes came"),
    ],
    ids=["page", "short", "page for its size, too"],
)
def test_a_page_or_a_shortened_body_asks_for_another_attempt(server, tmp_path, monkeypatch, reading, plan, came):
    manifest = read_manifest(MANIFEST_URI)
    monkeypatch.setattr("kftrain.data.shards.manifest.read_manifest", lambda uri, *given: manifest)
    server.plan |= plan
    with pytest.raises(StorageError, match=f"s3://bucket/shards/train-000000.*{came}") as caught:
        reading(manifest, tmp_path)
    assert caught.value.exit_code == 138


def test_an_ignored_range_asks_for_another_attempt(server):
    dataset = open_split(MANIFEST_URI, "train")
    dataset._open_shard(0)
    server.objects[TAR] += b"more than there should be"
    server.plan["GET"] = "whole"
    with pytest.raises(StorageError, match=rf"{TAR[7:]}.*{len(server.objects[TAR])} bytes came instead of") as caught:
        dataset.read(np.arange(5))
    assert caught.value.exit_code == 138


@pytest.mark.parametrize("before", [0, 1], ids=["of the shard", "of what was hashed"])
def test_a_page_that_comes_once_in_place_of_a_size_costs_nothing(server, before):
    answers = iter([*["answer"] * before, "page"])
    dataset = kftrain.open_dataset(MANIFEST_URI)
    server.plan |= {"HEAD": lambda: next(answers, "answer"), "LIST": "answer"}
    has_tables = any(path.endswith(".blocks") for path in server.objects)
    assert len(list(dataset)) == len(dataset) and (next(answers, None) is None) is not has_tables


def test_where_tables_are_nobody_asks_for_a_size(server, objects):
    manifest = read_manifest(MANIFEST_URI)
    server.requests.clear()
    ShardedDataset(MANIFEST_URI, manifest, "train").read(np.arange(20))
    has_tables = any(path.endswith(".blocks") for path in objects)
    assert any(method == "HEAD" for method, _ in server.requests) is not has_tables


@pytest.mark.parametrize("name", [TAR, INDEX])
@pytest.mark.parametrize("reading", ["own loop", "whole shards", "copies"])
def test_what_has_really_changed_is_a_data_error_still(server, tmp_path, name, reading):
    manifest = read_manifest(MANIFEST_URI)
    content = bytearray(server.objects[name])
    content[-600] ^= 1
    server.objects[name] = bytes(content)
    with pytest.raises(DataError, match=f"{name.rpartition('/')[2]}: its content has changed") as caught:
        READINGS[reading](manifest, tmp_path)
    assert caught.value.exit_code == 11
    assert sum(method == "GET" and path.startswith(name) for method, path in server.requests) >= 2, "it is asked again"


@pytest.mark.parametrize("reading", READINGS.values(), ids=READINGS)
def test_an_object_of_another_size_is_a_data_error_still(server, tmp_path, reading):
    manifest = read_manifest(MANIFEST_URI)
    server.objects[TAR] = server.objects[TAR][:-512]
    with pytest.raises(DataError, match=r"train-000000\.tar: truncated or changed: it has") as caught:
        reading(manifest, tmp_path)
    assert caught.value.exit_code == 11


def test_no_sample_of_a_range_that_a_proxy_shifts_is_given(server, objects, tmp_path):
    """Where it is shifted once the shard is read again; where it is another one each time the attempt is."""
    manifest = read_manifest(MANIFEST_URI)
    small = ["answer"] * (2 if manifest.splits["train"].shards[0].blocks_sha256 else 1)  # the index, and the table
    answers = iter([*small, "shifted"])
    uri = shard_uri(MANIFEST_URI, manifest.splits["train"].shards[0])
    dataset = kftrain.open_dataset(MANIFEST_URI)
    server.plan["GET"] = lambda: next(answers, "answer")
    assert len(list(dataset)) == len(dataset) and next(answers, None) is None
    server.objects[TAR] = objects[TAR][::-1]
    answers = iter(["answer", *small, "shifted"])  # the manifest is whole, too
    (tmp_path / f"kftrain-{os.getuid()}").rename(tmp_path / "forgotten")
    with pytest.raises(
        StorageError, match=f"{uri}: something else answers for its store, or now and then: its content"
    ):
        kftrain.open_dataset(MANIFEST_URI)[0]
    assert storage.exists(uri)
