"""Damage of every kind is noticed, and the shard that has it is named."""

import errno
import json
import shutil
from pathlib import Path

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError
from helpers.models.toy_task import ToyTask
from helpers.toy_data import flat_copy, shard_toy, text_folder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kftrain.core import storage
from kftrain.data.shards import manifest as manifests
from kftrain.data.shards import verify as verifying
from kftrain.data.shards.manifest import read_manifest, reading
from kftrain.data.shards.npy_header import npy_header
from kftrain.data.shards.tar_writer import member_header, padding
from kftrain.data.shards.verify import verify_shards
from kftrain.errors import DataError, KftrainError, RetryableError

NUM_FILES = 400
"""Enough for three shards of training data."""


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    result = shard_toy(text_folder(folder / "texts", NUM_FILES), folder / "root")
    return flat_copy(result.manifest_uri, folder / "flat")


@pytest.fixture
def shards(sharded: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sharded, tmp_path / "shards")


def verify(shards: Path, level: str = "sha256", share: tuple[int, int] = (0, 1)) -> None:
    uri = str(shards / "manifest.json")
    manifest = read_manifest(uri)
    if level == "size":
        verifying.check_listing(uri, manifest)
    else:
        verify_shards(uri, manifest, share)


def examine(shards: Path) -> None:
    """What `kftrain shards verify` does."""
    verify(shards)
    verifying.verify_keys(str(shards / "manifest.json"), read_manifest(str(shards / "manifest.json")))


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_whole_shards_pass_both_levels(shards: Path) -> None:
    verify(shards)
    verify(shards, "size")


@pytest.mark.parametrize("level", ["sha256", "size"])
@pytest.mark.parametrize("name", ["train-000001.tar", "validation-000000.tar", "train-000001.index.npy"])
@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda path: path.unlink(), "missing"),
        (lambda path: path.write_bytes(b""), "truncated or changed: it has 0 bytes"),
        (lambda path: path.write_bytes(path.read_bytes()[: -2 * 512]), "truncated or changed"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "truncated or changed"),
    ],
    ids=["missing", "empty", "cut", "longer"],
)
def test_a_missing_or_truncated_file_is_named_at_both_levels(shards: Path, level: str, name: str, damage, what) -> None:
    damage(shards / name)
    with pytest.raises(DataError, match=f"{name}: {what}"):
        verify(shards, level)


@pytest.mark.parametrize("place", ["first header", "payload", "a later header", "end mark"])
def test_a_flipped_bit_anywhere_is_named(shards: Path, place: str) -> None:
    shard = shards / "train-000001.tar"
    length = shard.stat().st_size
    positions = {"first header": 3, "payload": 512 + 128 + 1, "a later header": 1024 + 512 + 5, "end mark": length - 1}
    flip(shard, positions[place])
    with pytest.raises(DataError, match=r"train-000001\.tar: its content has changed"):
        verify(shards)
    verify(shards, "size")


def test_a_flipped_bit_of_an_index_is_named(shards: Path) -> None:
    flip(shards / "train-000000.index.npy", 130)
    with pytest.raises(DataError, match=r"train-000000\.index\.npy: its content has changed"):
        verify(shards)


def test_shares_split_the_work_and_together_find_everything(shards: Path) -> None:
    manifest = read_manifest(str(shards / "manifest.json"))
    names = [shard.name for split in ("train", "validation") for shard in manifest.splits[split].shards]
    assert len(names) >= 4
    for number, name in enumerate(names):
        whole = (shards / name).read_bytes()
        flip(shards / name, 900)
        for rank in range(3):
            if rank == number % 3:
                with pytest.raises(DataError, match=name):
                    verify(shards, share=(rank, 3))
            else:
                verify(shards, share=(rank, 3))
        (shards / name).write_bytes(whole)


def test_duplicate_keys_in_shards_that_match_their_manifest_are_found(shards: Path) -> None:
    tar = member_header(b"", b"twice.data.npy", 3) + b"abc" + padding(3)
    content = tar + tar + bytes(1024)
    (shards / "train-000000.tar").write_bytes(content)
    rewrite_manifest(shards, "train-000000.tar", content)
    with pytest.raises(DataError, match=r"a key comes twice, first in train-000000\.tar \(got 'twice'\)"):
        examine(shards)


def test_opening_a_dataset_does_not_look_for_duplicate_keys_again(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifying, "read_block_keys", lambda uri, schema: pytest.fail(f"the keys of {uri} are read"))
    verify(shards)
    source = text_folder(tmp_path / "texts")
    assert [shard_toy(source, tmp_path / "root").reused for _ in range(2)] == [False, True]


def rewrite_manifest(shards: Path, name: str, content: bytes) -> None:
    """The manifest that an attacker would write for other content: all digests fit."""
    (shards / name).write_bytes(content)
    document = storage.read_json(str(shards / "manifest.json"))
    for shard in document["splits"]["train"]["shards"]:
        if shard["name"] == name:
            shard.update(bytes=len(content), sha256=storage.sha256_file(str(shards / name)))
    lists = {s: [manifests.Shard(**x) for x in document["splits"][s]["shards"]] for s in ("train", "validation")}
    document["dataset_digest"] = manifests.content_digest(ToyTask().schema(), document["task_settings"], lists)
    (shards / "manifest.json").write_text(json.dumps(document))


@pytest.mark.parametrize("cut", [100, 512, 700, 1536])
def test_an_archive_that_ends_early_is_refused_even_when_the_manifest_agrees(shards: Path, cut: int) -> None:
    rewrite_manifest(shards, "train-000001.tar", (shards / "train-000001.tar").read_bytes()[:cut])
    where = r"train-000001\.tar(: the archive ends before its end mark|:doc-111\S*: the member is cut off)"
    with pytest.raises(DataError, match=where):
        examine(shards)


def test_a_header_with_a_wrong_checksum_is_refused_even_when_the_manifest_agrees(shards: Path) -> None:
    content = bytearray((shards / "train-000001.tar").read_bytes())
    content[3] ^= 1
    rewrite_manifest(shards, "train-000001.tar", bytes(content))
    with pytest.raises(DataError, match=r"train-000001\.tar: a header has the wrong checksum"):
        examine(shards)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda d: d.update(dataset_digest="0" * 64), "does not match its own digest"),
        (lambda d: d["task_settings"].update(width=9), "does not match its own digest"),
        (lambda d: d["splits"]["train"]["shards"].pop(), "does not match its own digest"),
        (lambda d: d["splits"].pop("validation"), "another format"),
        *((lambda d, version=version: d.update(format_version=version), "another format") for version in (1, 99)),
        (lambda d: d.update(schema_version=99), "another schema version"),
        (lambda d: d.pop("baselines"), "baselines"),
        (lambda d: d["splits"]["train"]["shards"][0].update(name="../../x.tar"), "name"),
        (lambda d: d["sample_schema"]["fields"][0].update(dtype="object"), "no fixed numeric format"),
        (lambda d: d["sample_schema"]["fields"][0].update(shape=[-1]), "no fixed numeric format"),
    ],
)
def test_an_edited_manifest_is_refused(shards: Path, change, what: str) -> None:
    document = storage.read_json(str(shards / "manifest.json"))
    change(document)
    (shards / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(DataError, match=what):
        verify(shards)


def test_a_missing_manifest_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"manifest\.json is missing; run the stage"):
        verify(tmp_path)


@settings(
    derandomize=True, max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(position=st.integers(0, 10**6), value=st.integers(0, 255))
def test_any_byte_of_a_manifest_may_change_without_anything_but_our_errors(
    sharded: Path, tmp_path: Path, position: int, value: int
) -> None:
    content = bytearray((sharded / "manifest.json").read_bytes())
    content[position % len(content)] = value
    (tmp_path / "manifest.json").write_bytes(content)
    try:
        read_manifest(str(tmp_path / "manifest.json"))
    except KftrainError as error:
        assert isinstance(error, DataError)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TimeoutError("x"), RetryableError),
        (ConnectionResetError(errno.ECONNRESET, "reset"), RetryableError),
        (OSError(errno.EBUSY, "Please reduce your request rate"), RetryableError),
        (OSError(errno.ESTALE, "Stale file handle"), RetryableError),
        (EndpointConnectionError(endpoint_url="http://x"), RetryableError),
        (FileNotFoundError("x"), DataError),
        (PermissionError(errno.EACCES, "no"), DataError),
        (ClientError({"Error": {"Code": "InvalidArgument"}}, "GetObject"), DataError),
        (DataError("of our own"), DataError),
        (ZeroDivisionError("a bug"), ZeroDivisionError),
    ],
)
def test_storage_that_is_away_does_not_end_a_run_for_good(error: Exception, kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught, reading("s3://b/train-000000.tar"):
        raise error
    assert kind is not RetryableError or "s3://b/train-000000.tar" in str(caught.value)


def edited(shards: Path, change) -> None:
    """A manifest that somebody has changed and given the digest that fits."""
    path = shards / "manifest.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    try:
        read_manifest(str(path))
    except DataError as error:
        path.write_text(json.dumps({**document, "dataset_digest": str(error.value)}))


def component(**num_shards: int) -> dict:
    return {"name": "a", "source": "s", "dataset_digest": "0" * 64, "num_shards": num_shards}


@pytest.mark.parametrize("counts", [{}, {"train": 10**9, "validation": -5}, {"train": 1, "validation": 1}])
def test_components_that_do_not_share_out_the_shards_are_refused(shards: Path, counts: dict[str, int]) -> None:
    path = shards / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "components": [component(**counts)]}))
    with pytest.raises(DataError, match=r"manifest\.json is damaged: .*the components have"):
        read_manifest(str(path))


@pytest.mark.parametrize("number", [float("nan"), 1e999])
def test_a_number_that_is_not_finite_is_refused(shards: Path, number: float) -> None:
    path = shards / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "task_settings": {"x": number}}))
    with pytest.raises(DataError, match="the manifest is damaged"):
        read_manifest(str(path))


def test_a_count_that_nobody_can_hold_is_refused(shards: Path) -> None:
    path = shards / "manifest.json"
    document = json.loads(path.read_text())
    document["splits"]["train"]["shards"][0]["num_samples"] = 10**30
    path.write_text(json.dumps(document))
    with pytest.raises(DataError, match="num_samples: Input should be less than"):
        read_manifest(str(path))


def test_a_manifest_that_counts_other_samples_than_its_index_is_found(shards: Path) -> None:
    edited(shards, lambda document: document["splits"]["train"]["shards"][0].update(num_samples=5))
    with pytest.raises(DataError, match=r"train-000000\.index\.npy: the index does not fit its shard"):
        examine(shards)


def test_an_index_of_another_length_than_it_says_is_refused(shards: Path) -> None:
    index = shards / "train-000000.index.npy"
    length = index.stat().st_size
    for shape in ((10**15, 3), (10**9, 3), "x("):
        index.write_bytes(npy_header("<i8", shape).ljust(length, b"\0")[:length])  # type: ignore[arg-type]
        change = {"index_sha256": storage.sha256_file(str(index))}
        edited(shards, lambda document, change=change: document["splits"]["train"]["shards"][0].update(change))
        with pytest.raises(DataError, match=r"train-000000\.index\.npy: not an array"):
            examine(shards)
