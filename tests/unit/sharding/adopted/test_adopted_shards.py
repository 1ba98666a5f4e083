"""Shards that others have written, as stock `webdataset` and `tarfile` write them, become a dataset where they are."""

import hashlib
import io
import json
import tarfile
from pathlib import Path

import fsspec
import numpy as np
import pytest
import webdataset
from click.testing import CliRunner
from PIL import Image
from webdataset import tariterators

from kftrain.cli.shards import shards_command
from kftrain.config import Config, RunConfig
from kftrain.core import storage
from kftrain.data.conversion import find_conversion
from kftrain.data.dataset import ShardedDataset
from kftrain.data.schema import BYTES, Field, SampleSchema
from kftrain.data.settings import DataConfig
from kftrain.data.shards.manifest import Manifest, Shard, read_manifest
from kftrain.data.shards.verify import check_listing, verify_keys, verify_shards
from kftrain.errors import DataError
from kftrain.sharding.adopted import adopting, scan
from kftrain.sharding.adopted.adopting import Adopted, adopt
from kftrain.sharding.shard_dataset import shard_dataset
from kftrain.sharding.sources.listing import SourceFile
from kftrain.tasks.base import Task
from kftrain.tasks.classification import Classification
from kftrain.tasks.image_classification import ImageClassification
from kftrain.trust import require_places

RNG = np.random.default_rng(0)


def write(path: Path, samples: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with webdataset.TarWriter(str(path)) as writer:
        for sample in samples:
            writer.write(sample)


def sample(number: int) -> dict:
    image = "png" if number % 3 == 0 else "jpg"
    return {"__key__": f"dir/{number:03d}", image: RNG.bytes(int(RNG.integers(0, 3000))), "cls": number % 5}


def config_for(source: Path | str, root: Path | str, **data) -> Config:
    settings = {"source": str(source), "shards": "adopt", "validation_fraction": 0.3, **data}
    return Config(run=RunConfig(storage_root=str(root)), data=DataConfig.model_validate(settings))


def adopted(source: Path | str, root: Path | str, **data) -> Adopted:
    return adopt(config_for(source, root, **data), None, lambda line: None)


def read(found: Adopted, split: str) -> dict[str, dict[str, bytes]]:
    """Key -> field -> content."""
    dataset = ShardedDataset(found.manifest_uri, found.manifest, split)
    arrays = dataset.read(np.arange(dataset.num_samples))
    return {
        key: {name: bytes(array[row]) for name, array in arrays.items()} for row, key in enumerate(dataset.group_keys())
    }


def stock(folder: Path) -> dict[str, dict[str, bytes]]:
    """What stock webdataset reads."""
    found = {}
    for path in sorted(folder.rglob("*.tar")):
        with path.open("rb") as stream:
            members = [{**member, "__url__": path.name} for member in tariterators.tar_file_iterator(stream)]
        for each in tariterators.group_by_keys(members):
            fields = {"image" if name in ("jpg", "png") else "label": each[name] for name in each if name[0] != "_"}
            found[f"{path.relative_to(folder)}:{each['__key__']}"] = fields
    return found


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    with_names = tmp_path / "theirs"
    with_names.mkdir()
    with webdataset.ShardWriter(str(with_names / "s-%06d.tar"), maxcount=20, verbose=0) as writer:
        for number in range(70):
            writer.write(sample(number))
    return with_names


def test_adopted_samples_are_those_that_the_stock_reader_gives_and_nothing_is_written_beside_them(
    tars: Path, tmp_path: Path
) -> None:
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tars.rglob("*")}
    found = adopted(tars, tmp_path / "root")
    train, validation = (read(found, split) for split in ("train", "validation"))
    assert not train.keys() & validation.keys() and len(validation) > 5
    assert {**train, **validation} == stock(tars) and len(train) + len(validation) == 70
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tars.rglob("*")} == before
    fields = found.manifest.sample_schema.fields
    assert [(field.name, field.extensions) for field in fields] == [("image", ("jpg", "png")), ("label", ("cls",))]
    assert not list((tmp_path / "root").rglob("*.tar"))
    for check in (verify_shards, verify_keys, check_listing):
        check(found.manifest_uri, found.manifest)


def test_the_digest_is_that_of_content_and_settings_wherever_the_shards_lie(tars: Path, tmp_path: Path) -> None:
    found = adopted(tars, tmp_path / "root")
    assert adopted(tars, tmp_path / "root").reused and not found.reused
    tars.rename(tmp_path / "moved")
    moved = adopted(tmp_path / "moved", tmp_path / "root")
    assert moved.manifest.dataset_digest == found.manifest.dataset_digest and moved.manifest_uri != found.manifest_uri
    assert read(moved, "train")
    assert adopted(tmp_path / "moved", tmp_path / "root", validation_fraction=0.5).manifest != moved.manifest


def test_shards_of_an_object_store_are_adopted_like_local_ones(tars: Path, tmp_path: Path) -> None:
    store = fsspec.filesystem("memory")
    for path in tars.iterdir():
        store.pipe_file(f"/theirs/{path.name}", path.read_bytes())
    here, there = adopted(tars, tmp_path / "root"), adopted("memory://theirs", "memory://root")
    assert there.manifest.dataset_digest == here.manifest.dataset_digest
    assert read(there, "validation") == read(here, "validation")
    check_listing(here.manifest_uri, here.manifest)
    store.rm("/theirs", recursive=True)
    store.rm("/root", recursive=True)


@pytest.mark.parametrize("dialect", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_shards_of_any_dialect_are_adopted_with_their_digests(tmp_path: Path, dialect: int) -> None:
    folder = "ä" * 30 if dialect == tarfile.USTAR_FORMAT else "long/" * 50 + "ä" * 120
    contents = {f"{folder}/{n}.{ending}": RNG.bytes(100 * n) for n in range(9) for ending in ("bin", "seg.png")}
    with tarfile.open(tmp_path / "theirs.tar", "w", format=dialect, encoding="utf-8") as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(content), 1.5
            archive.addfile(member, io.BytesIO(content))
    found = adopted(tmp_path / "theirs.tar", tmp_path / "root")
    samples = {**read(found, "train"), **read(found, "validation")}
    expected = {f"theirs.tar:{folder}/{n}": contents[f"{folder}/{n}.seg.png"] for n in range(9)}
    assert {key: fields["seg_png"] for key, fields in samples.items()} == expected
    whole = (tmp_path / "theirs.tar").read_bytes()
    assert found.manifest.splits["train"].shards[0].sha256 == hashlib.sha256(whole).hexdigest()


@pytest.mark.parametrize("chunk_bytes", [100, 512, 1000, 1 << 20])
def test_a_scan_hashes_all_of_a_shard_whatever_it_passes_over(
    tars: Path, tmp_path: Path, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "HASH_CHUNK_BYTES", chunk_bytes)
    path = tars / "s-000001.tar"
    file = SourceFile(path.name, str(path), path.stat().st_size, "")
    found = scan.scan(file, tmp_path / "table.npy", frozenset({"cls", "png"}), lambda key: key.endswith("7"))
    table, whole = np.load(tmp_path / "table.npy"), path.read_bytes()
    assert found.sha256 == hashlib.sha256(whole).hexdigest()
    assert table[:, 0].tolist() == [number % 10 == 7 for number in range(20, 40)]
    columns = {name: table[:, 1 + 2 * number : 3 + 2 * number] for number, name in enumerate(found.extensions)}
    labels = [whole[start : start + length] for start, length in columns["cls"].tolist()]
    assert labels == [b"%d" % (number % 5) for number in range(20, 40)]
    assert (columns["png"][:, 0] >= 0).tolist() == [number % 3 == 0 for number in range(20, 40)]
    assert found.num_passed_over == sum(number % 3 > 0 for number in range(20, 40))


# -- splits and fields -----------------------------------------------------------------------------------------------


def named(tmp_path: Path, *names: str) -> Path:
    for name in names:
        write(tmp_path / "theirs" / name, [{"__key__": f"{n}", "txt": f"{name} {n}"} for n in range(4)])
    return tmp_path / "theirs"


@pytest.mark.parametrize(
    "names",
    [
        ("train/0.tar", "train/1.tar", "val/0.tar", "test/0.tar"),
        ("a-train-000000.tar", "a-train-000001.tar", "a-val-000000.tar", "a-test-000000.tar"),
        ("x/train_0.tar", "x/train_1.tar", "x/validation_0.tar", "x/val_0.tar"),
    ],
)
def test_names_that_tell_the_splits_decide_and_what_is_in_neither_is_left_out(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    found = adopted(named(tmp_path, *names), tmp_path / "root")
    contents = {split: [each["text"].decode().split()[0] for each in read(found, split).values()] for split in SPLITS}
    assert contents == {"train": [names[0]] * 4 + [names[1]] * 4, "validation": [names[2]] * 4}


SPLITS = ("train", "validation")


def test_names_that_say_only_one_split_leave_it_to_the_keys(tmp_path: Path) -> None:
    found = adopted(named(tmp_path, "train-0.tar", "train-1.tar", "other.tar"), tmp_path / "root")
    assert sum(len(read(found, split)) for split in SPLITS) == 12 and read(found, "validation")


def test_a_shard_that_does_not_say_its_split_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"does not say which split it is in.*'other\.tar'.*put it below train or val"):
        adopted(named(tmp_path, "train/0.tar", "val/0.tar", "other.tar"), tmp_path / "root")


def test_incomplete_samples_are_refused_by_name_or_left_out_up_to_a_budget(tmp_path: Path) -> None:
    samples = [{"__key__": f"{n}", "txt": f"{n}", **({} if n in (5, 20) else {"cls": n})} for n in range(40)]
    write(tmp_path / "s.tar", samples)
    with pytest.raises(DataError, match=r"s\.tar:5: the sample has no \.cls for the field 'label'; complete it, raise"):
        adopted(tmp_path / "s.tar", tmp_path / "root")
    with pytest.raises(DataError, match=r"s\.tar:5: .*; of others 1 may be left out"):
        adopted(tmp_path / "s.tar", tmp_path / "root", max_incomplete_samples=1)
    found = adopted(tmp_path / "s.tar", tmp_path / "root", max_incomplete_samples=2)
    keys = read(found, "train").keys() | read(found, "validation").keys()
    assert keys == {f"s.tar:{n}" for n in range(40) if n not in (5, 20)}
    assert found.manifest.findings == {"incomplete, left out": {"count": 2, "first": ["s.tar:5", "s.tar:20"]}}


def test_fields_may_be_named_and_the_rest_is_passed_over(tmp_path: Path) -> None:
    write(
        tmp_path / "s.tar",
        [
            {"__key__": f"{n}", "jpg": b"image", "png": b"mask", "pyd": b"", **({"txt": b""} if n else {})}
            for n in range(30)
        ],
    )
    with pytest.raises(
        DataError, match=r"s\.tar:0\.pyd: a pickle, which can run anything, is not read; name the members"
    ):
        adopted(tmp_path / "s.tar", tmp_path / "root")
    found = adopted(tmp_path / "s.tar", tmp_path / "root", fields={"image": ["jpg"], "mask": ["png"]})
    assert set(map(str, read(found, "train").values())) == {str({"image": b"image", "mask": b"mask"})}
    with pytest.raises(DataError, match=r"s\.tar:0: two members give the field 'image' \(got \['jpg', 'png'\]\)"):
        adopted(tmp_path / "s.tar", tmp_path / "root", fields={"image": ["jpg", "png"]})
    with pytest.raises(DataError, match="reading such a file could run code"):
        adopted(tmp_path / "s.tar", tmp_path / "root", fields={"image": ["pyd"]})


def test_only_shards_are_adopted(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text/1.txt").write_text("x")
    with pytest.raises(DataError, match=r"only WebDataset shards \(\*\.tar\) can be adopted"):
        adopted(tmp_path / "text", tmp_path / "root")


def test_links_in_a_shard_are_refused_by_name(tars: Path, tmp_path: Path) -> None:
    with tarfile.open(tars / "s-000000.tar", "a") as archive:
        link = tarfile.TarInfo("x/1.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    with pytest.raises(DataError, match=r"s-000000\.tar:x/1\.jpg: neither a file nor a folder, but a link"):
        adopted(tars, tmp_path / "root")


# -- what owners do --------------------------------------------------------------------------------------------------


def test_a_shard_that_its_owner_changes_or_deletes_is_named(tars: Path, tmp_path: Path) -> None:
    found, runner = adopted(tars, tmp_path / "root"), CliRunner()
    assert runner.invoke(shards_command, ["verify", found.manifest_uri]).exit_code == 0
    content = bytearray((tars / "s-000002.tar").read_bytes())
    content[600] ^= 1
    (tars / "s-000002.tar").write_bytes(content)
    changed = r"s-000002\.tar: its content has changed: the sha256 differs .*adopt the shards again"
    with pytest.raises(DataError, match=changed) as raised:
        verify_shards(found.manifest_uri, found.manifest)
    assert raised.value.exit_code == 11
    (tars / "s-000002.tar").write_bytes(content[:-512])
    for check in (verify_shards, check_listing):
        with pytest.raises(DataError, match=r"s-000002\.tar: truncated or changed: .*adopt the shards again"):
            check(found.manifest_uri, found.manifest)
    (tars / "s-000002.tar").unlink()
    for check in (verify_shards, check_listing):
        with pytest.raises(DataError, match=r"s-000002\.tar: missing; adopt the shards again"):
            check(found.manifest_uri, found.manifest)


def test_changed_shards_are_adopted_anew(tars: Path, tmp_path: Path) -> None:
    before = adopted(tars, tmp_path / "root")
    write(tars / "s-000004.tar", [sample(number) for number in range(100, 110)])
    after = adopted(tars, tmp_path / "root")
    assert not after.reused and after.manifest.dataset_digest != before.manifest.dataset_digest
    assert {**read(after, "train"), **read(after, "validation")} == stock(tars)


def test_shards_that_change_while_they_are_adopted_are_refused(
    tars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scan_and_touch(file, *rest):
        found = scan.scan(file, *rest)
        write(tars / "s-000000.tar", [sample(1), sample(2)])
        return found

    monkeypatch.setattr(adopting, "scan", scan_and_touch)
    with pytest.raises(DataError, match="changed while"):
        adopted(tars, tmp_path / "root")
    assert not (tmp_path / "root/shards/adopted").exists()


def test_the_commands_adopt_and_show(tars: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    set_root = ["--set", f"run.storage_root={tmp_path / 'root'}"]
    done = runner.invoke(shards_command, ["adopt", str(tars), *set_root, "--json"])
    assert done.exit_code == 0, done.output
    described = json.loads(done.stdout)
    assert described["fields"] == {"image": "files (jpg, png)", "label": "files (cls)"}
    assert sum(split["samples"] for split in described["splits"].values()) == 70
    shown = runner.invoke(shards_command, ["show", described["manifest_uri"], "--json"])
    assert json.loads(shown.output)["dataset_digest"] == described["dataset_digest"]


# -- trust -----------------------------------------------------------------------------------------------------------


def test_a_manifest_may_name_shards_below_the_readers_own_data_only(
    tars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = adopted(tars, tmp_path / "root")
    for source in (tars, tmp_path, tars / "s-{000000..000003}.tar"):
        require_places(found.manifest, found.manifest_uri, config_for(source, tmp_path / "elsewhere"))
    require_places(found.manifest, found.manifest_uri, config_for("stdlib", tmp_path))
    other = config_for(tmp_path / "theirs-too", tmp_path / "root")
    with pytest.raises(
        DataError, match=r"lie neither below data\.source nor below the storage root \(got '.*theirs'\)"
    ):
        require_places(found.manifest, found.manifest_uri, other)
    monkeypatch.setenv("KFTRAIN_TRUSTED_ROOTS", str(tars))
    require_places(found.manifest, found.manifest_uri, other)


@pytest.mark.parametrize(
    ("name", "folder", "index"),
    [
        ("../x.tar", "/data", "train-000000.index.npy"),
        ("a/../../x.tar", "/data", "train-000000.index.npy"),
        ("/etc/x.tar", "/data", "train-000000.index.npy"),
        ("a//x.tar", "/data", "train-000000.index.npy"),
        ("x.tar", "data", "train-000000.index.npy"),
        ("x.tar", "", "train-000000.index.npy"),
        ("x.tar", "/data/../etc", "train-000000.index.npy"),
        ("x.tar", "simplecache::s3://bucket", "train-000000.index.npy"),
        ("x.tar", "/data", "../train-000000.index.npy"),
        ("x.tar", "/data", ""),
        ("x.zip", "/data", "train-000000.index.npy"),
        ("x\n.tar", "/data", "train-000000.index.npy"),
    ],
)
def test_a_manifest_names_no_file_that_leaves_its_folder(name: str, folder: str, index: str) -> None:
    zeros = "0" * 64
    fields = {"bytes": 1, "sha256": zeros, "num_blocks": 1, "num_samples": 1, "index_sha256": zeros}
    Shard(name="a/..x.TAR", folder="s3://bucket/data", index="train-000000.index.npy", **fields)
    with pytest.raises(ValueError, match=r"name|folder|index"):
        Shard(name=name, folder=folder, index=index, **fields)


# -- tasks -----------------------------------------------------------------------------------------------------------


def read_by_task(manifest_uri: str, manifest: Manifest, split: str, task: Task) -> ShardedDataset:
    return ShardedDataset(manifest_uri, manifest, split, conversion=find_conversion(manifest, task))


def png(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def test_a_task_reads_adopted_files_as_it_reads_written_shards(tmp_path: Path) -> None:
    images = [RNG.integers(0, 256, (8, 8, 3), dtype=np.uint8) for _ in range(40)]
    write(tmp_path / "s.tar", [{"__key__": f"{n}", "png": png(image), "cls": n % 3} for n, image in enumerate(images)])
    task = ImageClassification(image_size=8, num_channels=3, num_classes=3)
    results = {
        how: shard_dataset(config_for(tmp_path / "s.tar", tmp_path / how, shards=how), task, lambda line: None)
        for how in ("adopt", "write")
    }
    manifests = {how: result.manifest for how, result in results.items()}
    assert manifests["adopt"].baselines == manifests["write"].baselines != {}
    for split in SPLITS:
        read_by = {}
        for how, manifest in manifests.items():
            dataset = read_by_task(results[how].manifest_uri, manifest, split, task)
            keys, arrays = dataset.group_keys(), dataset.read(np.arange(dataset.num_samples))
            read_by[how] = {key: (arrays["image"][row].tolist(), arrays["label"][row]) for row, key in enumerate(keys)}
        assert read_by["adopt"] == read_by["write"]


class Captioned(Classification):
    """A file, and a label from JSON."""

    def schema(self) -> SampleSchema:
        return SampleSchema((Field("text", BYTES, extensions=("txt",)), Field("label", "int64")))


def test_what_a_task_takes_as_a_file_stays_one_and_numbers_come_from_json(tmp_path: Path) -> None:
    write(tmp_path / "s.tar", [{"__key__": f"{n}", "txt": f"é{n}", "json": {"label": n % 2}} for n in range(30)])
    found, task = adopted(tmp_path / "s.tar", tmp_path / "root"), Captioned(num_classes=2)
    dataset = read_by_task(found.manifest_uri, found.manifest, "train", task)
    arrays = dataset.read(np.arange(dataset.num_samples))
    numbers = [int(key.rpartition(":")[2]) for key in dataset.group_keys()]
    assert [bytes(text).decode() for text in arrays["text"]] == [f"é{n}" for n in numbers]
    assert arrays["label"].dtype == np.int64 and arrays["label"].tolist() == [n % 2 for n in numbers]
    assert dataset.schema == task.schema()


def test_a_bad_file_is_named_by_shard_and_key(tmp_path: Path) -> None:
    write(tmp_path / "s.tar", [{"__key__": f"{n}", "txt": "x", "cls": b"seven" if n == 7 else b"1"} for n in range(30)])
    found, task = adopted(tmp_path / "s.tar", tmp_path / "root"), Captioned(num_classes=2)
    split = next(split for split in SPLITS if "s.tar:7" in read(found, split))
    dataset = read_by_task(found.manifest_uri, found.manifest, split, task)
    with pytest.raises(DataError, match=r"s\.tar, s\.tar:7: not a whole number \(got b'seven'\)"):
        dataset.read(np.arange(dataset.num_samples))


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"label": ["cls"], "caption": ["txt"]}, r"no file for the field 'text' that the task reads \(got \['caption"),
        ({"label": ["cls"], "text": ["txt", "md"]}, r"the task reads no \.md as 'text'"),
    ],
)
def test_a_task_that_the_files_do_not_suit_is_refused(tmp_path: Path, fields: dict, what: str) -> None:
    write(tmp_path / "s.tar", [{"__key__": f"{n}", "txt": "x", "cls": 1} for n in range(30)])
    config = config_for(tmp_path / "s.tar", tmp_path / "root", fields=fields)
    with pytest.raises(DataError, match=what):
        shard_dataset(config, Captioned(num_classes=2), lambda line: None)
    assert not list((tmp_path / "root").rglob("manifest.json"))


def test_a_manifest_of_adopted_shards_is_read_back(tars: Path, tmp_path: Path) -> None:
    found = adopted(tars, tmp_path / "root")
    assert read_manifest(found.manifest_uri) == found.manifest and found.manifest.is_adopted


@pytest.mark.parametrize("name", ["a\nb.tar", "\udcff.tar", "a\x7f.tar"])
def test_a_shard_with_a_name_that_no_manifest_holds_is_refused_before_it_is_read(tmp_path: Path, name: str) -> None:
    write(tmp_path / "tars" / "a.tar", [sample(number) for number in range(10)])
    (tmp_path / "tars" / "a.tar").rename(tmp_path / "tars" / name)
    with pytest.raises(DataError, match="the name of a shard holds control characters, or is not UTF-8"):
        adopted(tmp_path / "tars", tmp_path / "root")


def test_shards_without_samples_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "tars" / "a.tar", [])
    with pytest.raises(DataError, match=r"tars: the shards hold no samples"):
        adopted(tmp_path / "tars", tmp_path / "root")
