"""Shards that nobody has touched are reused without being read; where one was touched, all are hashed again."""

import os
import shutil
import time
from pathlib import Path

import click.testing
import pytest
from helpers import jobs, large_datasets
from helpers.fakes import counting_store
from helpers.fakes.counting_store import count, count_bytes
from helpers.models.toy_task import ToyTask
from helpers.toy_data import shard_path, shard_toy, text_folder, toy_config
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kftrain import config, tracking
from kftrain.cli import cli
from kftrain.config import Config
from kftrain.core import storage
from kftrain.data.settings import DataConfig
from kftrain.data.shards import manifest as manifests
from kftrain.data.shards import verified, verify
from kftrain.data.shards.manifest import SPLITS, index_uri, publish_manifest, shard_uri
from kftrain.errors import DataError, LaunchError
from kftrain.run.config import read_config
from kftrain.run.paths import RunPaths
from kftrain.run.settings import RunConfig
from kftrain.sharding import mixing, unchanged
from kftrain.sharding.parts import baselines
from kftrain.sharding.shard_dataset import shard_dataset
from kftrain.stages import shard as shard_stage
from kftrain.stages.finish import finish

pytestmark = pytest.mark.timeout(300)

TICK_SECONDS = 0.02
"""More than the clock that file systems write down needs to go on."""


@pytest.fixture
def hashed(monkeypatch):
    """Files that are read to be hashed."""
    uris = []
    require = verified.require_content

    def counting(uri, *arguments):
        uris.append(uri)
        return require(uri, *arguments)

    monkeypatch.setattr("kftrain.data.shards.verify.require_content", counting)
    return uris


@pytest.fixture
def sharded(tmp_path):
    """A dataset of several parts."""
    source = text_folder(tmp_path / "texts", 120)
    return source, shard_toy(source, tmp_path / "root", part_size_bytes=1 << 16)


def again(source, root, **data):
    return shard_toy(source, root, part_size_bytes=1 << 16, **data)


def files_of(result):
    """Tar and index of each shard: tables are compared when they are read."""
    shards = [shard for split in SPLITS for shard in result.manifest.splits[split].shards]
    return [uri(result.manifest_uri, shard) for shard in shards for uri in (shard_uri, index_uri)]


def seen_of(result):
    """The note of what was found whole."""
    return Path(result.manifest_uri).with_name("seen.json")


def damage(path):
    """Turns a bit, and lets the file be as it was again with the bytes that are returned."""
    whole = path.read_bytes()
    path.write_bytes(whole[:700] + bytes([whole[700] ^ 1]) + whole[701:])
    return whole


def test_what_is_unchanged_is_reused_unread(sharded, tmp_path, hashed):
    assert again(sharded[0], tmp_path / "root").reused and hashed == []


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_all_files_are_hashed_where_some_were_touched(data, sharded, tmp_path, hashed):
    source, first = sharded
    ways = st.sampled_from(["mtime", "ctime", "inode"])
    touched = data.draw(st.dictionaries(st.sampled_from(files_of(first)), ways, min_size=1, max_size=4))
    time.sleep(TICK_SECONDS)
    for uri, how in touched.items():
        status = os.stat(uri)
        if how == "mtime":
            os.utime(uri, ns=(1, 10**9))
        elif how == "ctime":
            os.chmod(uri, status.st_mode ^ 0o100)
        else:
            shutil.copy2(uri, f"{uri}.new")
            os.replace(f"{uri}.new", uri)
    hashed.clear()
    assert again(source, tmp_path / "root").reused
    assert sorted(hashed) == sorted(files_of(first))
    hashed.clear()
    assert again(source, tmp_path / "root").reused and hashed == []


def test_content_that_changed_is_found_though_size_and_time_did_not(sharded, tmp_path):
    source, first = sharded
    path = shard_path(first)
    status = path.stat()
    whole = damage(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    second = again(source, tmp_path / "root")
    assert not second.reused and path.read_bytes() == whole
    assert again(source, tmp_path / "root").reused


def test_a_dataset_of_before_is_hashed_once(sharded, tmp_path, hashed):
    source, first = sharded
    seen_of(first).unlink()
    assert again(source, tmp_path / "root").reused and sorted(hashed) == sorted(files_of(first))
    hashed.clear()
    assert again(source, tmp_path / "root").reused and not hashed


@pytest.mark.parametrize("content", [b"", b"x", b"{}", b"[]", b'{"states": ""}', os.urandom(1 << 16)])
def test_what_is_remembered_may_be_damaged(sharded, tmp_path, hashed, content):
    source, first = sharded
    seen_of(first).chmod(0o644)
    seen_of(first).write_bytes(content)
    assert again(source, tmp_path / "root").reused and sorted(hashed) == sorted(files_of(first))


def test_rehash_hashes_everything(sharded, tmp_path, hashed):
    source, first = sharded
    assert again(source, tmp_path / "root", rehash=True).reused and sorted(hashed) == sorted(files_of(first))


def rot(monkeypatch, path):
    """A bit turns on the disk, and nothing tells: the file system's own answers stay."""
    whole = path.read_bytes()
    status = os.stat(path)
    path.write_bytes(whole[:900] + bytes([whole[900] ^ 4]) + whole[901:])
    real = Path.stat

    def stat(self, **options):
        return status if str(self) == str(path) else real(self, **options)

    monkeypatch.setattr(Path, "stat", stat)
    return whole


def test_rotten_bits_are_found_by_rehash_and_after_a_job_that_found_them(sharded, tmp_path):
    source, first = sharded
    manifest_uri, manifest = first.manifest_uri, first.manifest
    with pytest.MonkeyPatch.context() as patch:
        whole = rot(patch, shard_path(first))
        assert again(source, tmp_path / "root").reused, "nothing tells"
        with pytest.raises(LaunchError), unchanged.forget_if_damaged(manifest_uri, manifest):
            raise LaunchError("a node went away")
        assert again(source, tmp_path / "root").reused, "it says nothing of the data"
        with pytest.raises(DataError), unchanged.forget_if_damaged(manifest_uri, manifest):
            raise DataError("its content has changed")
        second = again(source, tmp_path / "root")
        assert not second.reused and shard_path(first).read_bytes() == whole
    with pytest.MonkeyPatch.context() as patch:
        rot(patch, shard_path(first))
        assert not again(source, tmp_path / "root", rehash=True).reused
        assert shard_path(first).read_bytes() == whole


@pytest.fixture
def mixed(tmp_path):
    """The configuration of a mixture, by further settings of its data."""
    for name in ("web", "code"):
        (tmp_path / name).mkdir()
        for number in range(20):
            (tmp_path / name / f"{number}.txt").write_text(f"{name} {number}" * (1 + number))
    mixture = [{"name": name, "source": str(tmp_path / name), "weight": 1} for name in ("web", "code")]

    def make_config(**data):
        chosen = DataConfig.model_validate({"mixture": mixture, "validation_fraction": 0.5, **data})
        return Config(run=RunConfig(storage_root=str(tmp_path / "root")), data=chosen)

    return make_config


def test_a_mixture_is_its_components(mixed, tmp_path, hashed):
    first = mixing.shard_mixture(mixed(), ToyTask(), lambda line: None)

    def refuse(*given):
        raise AssertionError("content was read")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(baselines, "read_stored_blocks", refuse)
        second = mixing.shard_mixture(mixed(), ToyTask(), lambda line: None)
    assert second.reused and second.manifest.to_dict() == first.manifest.to_dict() and not hashed
    unchanged.require_unchanged(first.manifest_uri, first.manifest, False, lambda line: None)
    assert not hashed
    with pytest.raises(DataError), unchanged.forget_if_damaged(first.manifest_uri, first.manifest):
        raise DataError("damaged")
    assert mixing.shard_mixture(mixed(), ToyTask(), lambda line: None).reused
    assert sorted(hashed) == sorted(files_of(first))


@pytest.mark.parametrize("harm", ["damaged", "missing", "truncated"])
def test_a_mixture_whose_pages_are_no_longer_whole_is_written_again(mixed, tmp_path, monkeypatch, harm):
    monkeypatch.setattr(manifests, "MAX_PLAIN_SHARDS", 0)
    first = mixing.shard_mixture(mixed(), ToyTask(), lambda line: None)
    (path,) = Path(first.manifest_uri).parent.glob("pages-*")
    whole = path.read_bytes()
    path.unlink()
    if harm != "missing":
        path.write_bytes(whole[:-20] if harm == "truncated" else whole[:-20] + b"x" + whole[-19:])
    again = mixing.shard_mixture(mixed(), ToyTask(), lambda line: None)
    assert again.dataset_digest == first.dataset_digest and path.read_bytes() == whole


# Data that is added


def append(source):
    (source / "zz-new.txt").write_text("new " * 40)


def test_an_appended_dataset_reuses_what_is_there_unread(sharded, tmp_path, hashed):
    source, _first = sharded
    append(source)
    second = again(source, tmp_path / "root")
    assert not second.reused and hashed == []
    assert again(source, tmp_path / "root").reused and hashed == []


def test_what_nobody_has_hashed_is_not_taken_for_whole_when_data_is_added(sharded, tmp_path, hashed):
    source, first = sharded
    whole = damage(shard_path(first))
    append(source)
    second = again(source, tmp_path / "root")
    assert not second.reused and not hashed and not seen_of(second).exists()
    third = again(source, tmp_path / "root")
    assert not third.reused and shard_path(first).read_bytes() == whole
    hashed.clear()
    assert again(source, tmp_path / "root").reused and sorted(hashed) == sorted(files_of(second))
    hashed.clear()
    assert again(source, tmp_path / "root").reused and not hashed


def test_parts_of_a_dataset_that_nobody_has_hashed_are_hashed_before_the_next_reuse(sharded, tmp_path, hashed):
    source, first = sharded
    seen_of(first).unlink()
    append(source)
    assert not seen_of(again(source, tmp_path / "root")).exists()
    assert again(source, tmp_path / "root").reused and hashed


def test_parts_that_the_dataset_before_does_not_have_are_hashed_before_the_next_reuse(sharded, tmp_path, hashed):
    """A sharding of what was added that was killed has left them."""
    source, first = sharded
    shards = tmp_path / "root" / "shards"
    before = {path: path.read_bytes() for name in ("by-source", "latest") for path in (shards / name).iterdir()}
    append(source)
    killed = again(source, tmp_path / "root")
    shutil.rmtree(Path(killed.manifest_uri).parent)
    for path in (path for name in ("by-source", "latest") for path in (shards / name).iterdir()):
        path.unlink()
    for path, content in before.items():
        path.write_bytes(content)
    second = again(source, tmp_path / "root")
    assert second.manifest.parent == first.dataset_digest and seen_of(first).exists()
    assert not second.reused and not hashed and not seen_of(second).exists()
    assert again(source, tmp_path / "root").reused and sorted(hashed) == sorted(files_of(second))


@pytest.mark.parametrize("first_use", [False, True])
def test_where_nothing_can_be_noted_shards_are_reused_all_the_same(sharded, tmp_path, hashed, monkeypatch, first_use):
    source, first = sharded
    seen_of(first).unlink()
    real = storage.publish_json

    def refuse(uri, document):
        if uri.endswith("seen.json"):
            raise PermissionError(13, "Permission denied", uri)
        real(uri, document)

    monkeypatch.setattr(storage, "publish_json", refuse)
    if first_use:
        append(source)
        assert not again(source, tmp_path / "root").reused
    for _ in range(2):
        hashed.clear()
        assert again(source, tmp_path / "root").reused and hashed


# A firing of a schedule


def begin_night(text, night, job, lines):
    return shard_stage.shard_from_pipeline(text, {}, "", job, lines.append, created=f"2026-11-{night:02d}T02:00:20Z")


@pytest.mark.parametrize("limit", [1 << 30, 0], ids=["plain", "paged"])
def test_an_unchanged_firing_makes_one_listing_and_reads_no_content(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(manifests, "MAX_PLAIN_SHARDS", limit)
    monkeypatch.setattr(tracking, "check", lambda uri: None)
    monkeypatch.setattr(verify, "MANY_FOLDERS", 2)
    store = counting_store.open_store()
    source = jobs.write_texts(tmp_path / "texts", num_files=40, num_words=3000)
    scheduled = ["schedule.name=nightly", "schedule.cron='0 0 2 * * *'", "data.part_size_bytes=65536"]
    placed = [f"run.storage_root={store.uri('root')}", "data.processes=1"]
    text = config.parse(jobs.TINY.replace("SOURCE", str(source)), [*scheduled, *placed]).to_yaml()
    lines = []
    assert begin_night(text, 1, "a", lines).next_step == "train"
    finish(text, "", "", "a", "COMPLETE", lines.append)
    store.take()
    assert begin_night(text, 2, "b", lines).summary["why"] == "unchanged"
    requests = store.take()
    assert not [one for one in requests if one.uri.endswith((".tar", ".index.npy", "records.npy", "part.json"))]
    below = store.uri("root", "shards")
    (listing,) = (one.uri for one in requests if one.kind == "list" and one.uri.startswith(below))
    assert listing == f"{below}/parts"
    assert count(requests, below=below) <= 25, counting_store.describe(requests)
    assert count(requests, "put", below) == 0


def test_an_unchanged_dataset_of_100_000_shards_is_one_listing(tmp_path):
    store = counting_store.open_store()
    source = text_folder(tmp_path / "texts", 20)
    first = shard_toy(source, store.uri("root"))
    large = large_datasets.make_manifest(50_000, 50_000)
    uri = store.uri("root", "shards", large.dataset_digest, "manifest.json")
    publish_manifest(uri, large)
    large_datasets.lay_out(store, uri, large)
    unchanged.note_written(uri, large, ())
    (pointer,) = (name for name in list(store.objects) if "/by-source/" in name)
    pointer = f"{counting_store.SCHEME}://{pointer}"
    store.put(pointer, store.content(pointer).replace(first.dataset_digest.encode(), large.dataset_digest.encode()))
    store.take()
    assert shard_dataset(toy_config(source, store.uri("root")), ToyTask(), lambda line: None).reused
    requests = store.take()
    (listing,) = (one for one in requests if one.kind == "list")
    assert listing.num_requests == 201  # 200,000 objects, and a few, in pages of a thousand
    assert count(requests) - listing.num_requests <= 15, counting_store.describe(requests)
    assert not [one for one in requests if one.uri.endswith((".tar", ".npy"))]
    assert count_bytes(requests) < 60_000_000  # all pages, twice: the stage that starts a job looks at the whole


# Who asks for it


def test_the_command_asks_for_this_once_and_the_run_does_not_keep_it(tmp_path, monkeypatch, hashed):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tracking, "check", lambda uri: None)
    jobs.write_texts(tmp_path / "texts", num_files=12)
    Path("tiny.yaml").write_text(jobs.TINY.replace("SOURCE", str(tmp_path / "texts")))
    chosen = ["shard", "-c", "tiny.yaml", "--set", f"run.storage_root={tmp_path}/store", "--run", "r"]
    for extra, expected in (((), 0), ((), 0), (("--rehash",), 4), ((), 0)):
        hashed.clear()
        done = click.testing.CliRunner().invoke(cli, [*chosen, *extra])
        assert done.exit_code == 0, done.output
        assert len(hashed) == expected
        assert not read_config(RunPaths.of(f"{tmp_path}/store", "r")).data.rehash


def shard_run(tmp_path, *extra):
    """`kftrain shard` of one run, and `kftrain shards verify` of it."""
    Path("tiny.yaml").write_text(jobs.TINY.replace("SOURCE", str(tmp_path / "texts")))
    chosen = ["shard", "-c", "tiny.yaml", "--set", f"run.storage_root={tmp_path}/store", "--run", "r"]
    return click.testing.CliRunner().invoke(cli, [*chosen, *extra])


def verify_run(tmp_path):
    return click.testing.CliRunner().invoke(cli, ["shards", "verify", f"{tmp_path}/store/runs/r"])


@pytest.mark.parametrize("mends", ["verify", "fix", "touched"])
def test_damage_is_mended_by_the_next_shard_step_of_the_same_run(tmp_path, monkeypatch, mends):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tracking, "check", lambda uri: None)
    jobs.write_texts(tmp_path / "texts", num_files=12)
    assert shard_run(tmp_path).exit_code == 0
    path = next((tmp_path / "store" / "shards").rglob("train-*.tar"))
    path.chmod(0o644)
    assert shard_run(tmp_path).exit_code == 0
    if mends == "touched":
        whole = damage(path)
        assert shard_run(tmp_path).exit_code == 0
        assert path.read_bytes() == whole
        return
    with pytest.MonkeyPatch.context() as patch:
        whole = rot(patch, path)
        assert shard_run(tmp_path).exit_code == 0 and path.read_bytes() != whole, "nothing tells"
        if mends == "verify":
            refused = verify_run(tmp_path)
            assert isinstance(refused.exception, DataError) and "kftrain shard --rehash" in str(refused.exception)
        assert shard_run(tmp_path, *(["--rehash"] if mends == "fix" else [])).exit_code == 0
    assert path.read_bytes() == whole and verify_run(tmp_path).exit_code == 0


def test_states_are_those_of_before_the_hashing(sharded, tmp_path, monkeypatch):
    """What is replaced while it is hashed is hashed again the next time."""
    source, first = sharded
    path = shard_path(first)
    os.utime(path, ns=(1, 1))
    require = verified.require_content

    def replace_after(uri, *arguments):
        require(uri, *arguments)
        os.utime(uri, ns=(2, 2))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kftrain.data.shards.verify.require_content", replace_after)
        again(source, tmp_path / "root")
    found = []
    monkeypatch.setattr("kftrain.data.shards.verify.require_content", lambda uri, *given: found.append(uri))
    again(source, tmp_path / "root")
    assert str(path) in found


def test_a_store_that_tells_no_versions_is_hashed_each_time(tmp_path, hashed, monkeypatch):
    monkeypatch.setattr(storage, "read_version", lambda info: "")
    store = counting_store.open_store()
    source = text_folder(tmp_path / "texts", 20)
    first = shard_toy(source, store.uri("root"))
    for _ in range(2):
        hashed.clear()
        assert shard_toy(source, store.uri("root")).reused
        assert sorted(hashed) == sorted(files_of(first))
