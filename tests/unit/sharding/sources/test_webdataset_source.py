import io
import json
import pickle
import tarfile
from pathlib import Path

import braceexpand
import fsspec
import numpy as np
import pytest
import webdataset
from helpers.source_checks import Sharded, reading_memory, records, resolve, texts
from PIL import Image
from webdataset import tariterators

from kftrain.data.sample_members import decode_members
from kftrain.data.schema import Record
from kftrain.errors import DataError
from kftrain.sharding.sources.resolve_source import choose_split
from kftrain.sharding.sources.webdataset import expand_braces, is_shard_pattern
from kftrain.tasks.image_classification import ImageClassification
from kftrain.tasks.language_modeling import LanguageModeling

RNG = np.random.default_rng(0)


def png(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def write(path: Path, samples: list[dict]) -> Path:
    """A shard by the stock writer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with webdataset.TarWriter(str(path)) as writer:
        for sample in samples:
            writer.write(sample)
    return path


def write_members(path: Path, members: list[tuple[str, bytes]], **options) -> Path:
    with tarfile.open(path, "w", **options) as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


# -- what samples become ---------------------------------------------------------------------------------------------


def test_members_are_decoded_by_their_extension(tmp_path: Path) -> None:
    pixels = RNG.integers(0, 256, (5, 6, 3), dtype=np.uint8)
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    sample = {"__key__": "a/001", "png": png(pixels), "cls": 7, "npy": array, "left.npy": array + 1}
    write(tmp_path / "s.tar", [{**sample, "txt": "é", "json": {"url": "u", "n": [1]}, "seg.png": b"raw", "xyz": b"\0"}])
    (record,) = records(tmp_path / "s.tar")
    assert record.key == "s.tar:a/001" and record.split == ""
    arrays = {name: record.fields.pop(name) for name in ("image", "npy", "left")}
    assert record.fields == {
        **{"label": 7, "text": "é".encode(), "url": "u", "n": [1]},
        **{"seg.png": b"raw", "xyz": b"\0"},
    }
    assert np.array_equal(arrays["image"], pixels)
    assert np.array_equal(arrays["npy"], array) and np.array_equal(arrays["left"], array + 1)


def test_samples_are_those_that_the_stock_reader_gives(tmp_path: Path) -> None:
    names = ["./a/1.txt", "./a/1.CLS", "a/1/2.seg.x.bin", "a.b/3.txt", "c/4.txt", "c/4", ".hidden", "__meta__/5.txt"]
    path = write_members(tmp_path / "s.tar", [(name, b"%d" % n) for n, name in enumerate(names)])
    with path.open("rb") as stream:
        members = [{**member, "__url__": "s.tar"} for member in tariterators.tar_file_iterator(stream)]
    stock = list(tariterators.group_by_keys(members))
    found = records(path)
    expected = ["a/1", "a/1/2", "a.b/3", "c/4"]
    assert [sample["__key__"].removeprefix("./") for sample in stock] == expected
    assert [record.key for record in found] == [f"s.tar:{key}" for key in expected]
    assert found[0].fields == {"text": b"0", "label": 1} and found[1].fields == {"seg.x.bin": b"2"}


def test_the_text_of_a_json_member_is_found_as_in_json_lines(tmp_path: Path) -> None:
    write(tmp_path / "s.tar", [{"__key__": "1", "json": {"body": "zwei é", "n": 1}}])
    (record,) = records(tmp_path / "s.tar", text_field="body")
    assert record.fields == {"body": "zwei é", "n": 1, "text": "zwei é".encode()}
    with pytest.raises(DataError, match=r"s\.tar:1\.json: no text in field 'text' .*body.*data\.text_field"):
        records(tmp_path / "s.tar")


def test_a_json_member_beside_others_needs_no_text_and_gives_way_to_them(tmp_path: Path) -> None:
    write(tmp_path / "s.tar", [{"__key__": "1", "cls": 3, "json": {"label": "three", "text": None, "id": 5}}])
    assert records(tmp_path / "s.tar")[0].fields == {"label": 3, "text": None, "id": 5}


@pytest.mark.parametrize("extension", ["pyd", "pkl", "pt", "PKL", "data.pth", "pickle"])
def test_pickles_are_refused_and_never_opened(tmp_path: Path, extension: str) -> None:
    class Trap:
        def __reduce__(self):
            return (Path(tmp_path / "sprung").touch, ())

    write_members(tmp_path / "s.tar", [("1.txt", b"x"), (f"1.{extension}", pickle.dumps(Trap()))])
    with pytest.raises(DataError, match=r"s\.tar:1\.\w.*: a pickle, which can run anything, is not read"):
        records(tmp_path / "s.tar")
    assert not (tmp_path / "sprung").exists()


def test_arrays_of_objects_are_refused(tmp_path: Path) -> None:
    stream = io.BytesIO()
    np.save(stream, np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=r"x\.npy: not an array: Object arrays cannot be loaded"):
        decode_members({"npy": stream.getvalue()}, "text", "x")


@pytest.mark.parametrize(
    ("members", "what"),
    [
        ({"txt": b"\xff"}, r"x\.txt: not UTF-8 text"),
        ({"cls": b"cat"}, r"x\.cls: not a whole number \(got b'cat'\)"),
        ({"png": b"nothing"}, r"x\.png: the image cannot be decoded"),
        ({"npy": b"\x93NUMPY\x01\x00v\x00{'descr': "}, r"x\.npy: not an array"),
        ({"json": b"{"}, r"x\.json: not JSON"),
        ({"json": b"[1]"}, r"x\.json: not a JSON object \(got 'list'\)"),
        ({"txt": b"a", "text": b"b"}, r"x: two members give the field 'text' \(got \['text', 'txt'\]\)"),
    ],
)
def test_a_bad_member_is_refused_by_name(members: dict[str, bytes], what: str) -> None:
    with pytest.raises(DataError, match=what):
        dict(decode_members(members, "text", "x"))


# -- archives --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_of_any_length_and_script_are_read(tmp_path: Path, kind: int) -> None:
    folder = "schön/" if kind == tarfile.USTAR_FORMAT else f"{'lang/' * 40}schön{'x' * 120}/"
    write_members(tmp_path / "s.tar", [(f"{folder}1.txt", b"eins")], format=kind, encoding="utf-8")
    assert texts(records(tmp_path)) == {f"s.tar:{folder}1": b"eins"}


def test_folders_within_an_archive_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "in/a.b").mkdir(parents=True)
    (tmp_path / "in/1.txt").write_text("eins")
    with tarfile.open(tmp_path / "s.tar", "w") as archive:
        archive.add(tmp_path / "in", ".")
    assert texts(records(tmp_path / "s.tar")) == {"s.tar:1": b"eins"}


def test_a_link_is_refused_because_its_data_would_be_missing(tmp_path: Path) -> None:
    with tarfile.open(write_members(tmp_path / "s.tar", [("1.txt", b"x")]), "a") as archive:
        link = tarfile.TarInfo("2.txt")
        link.type, link.linkname = tarfile.LNKTYPE, "1.txt"
        archive.addfile(link)
    with pytest.raises(DataError, match=r"s\.tar:2\.txt: neither a file nor a folder"):
        records(tmp_path)


def test_a_torn_archive_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    path = write_members(tmp_path / "s.tar", [(f"{n}.txt", b"x" * 700) for n in range(3)])
    whole = path.read_bytes()
    end = 3 * (512 + 1024)
    for length in (0, 100, 511, 512, 700, 1400, 1536, 1600, 2048, 2500, end - 1, end, end + 511):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"s\.tar.*: (not a whole tar|the member is cut off|the archive ends)"):
            records(path)
    path.write_bytes(whole[: end + 512])
    assert len(records(path)) == 3


def test_a_member_that_is_cut_off_is_named(tmp_path: Path) -> None:
    path = write_members(tmp_path / "s.tar", [("1.txt", b"x" * 700), ("2.txt", b"x" * 700)])
    path.write_bytes(path.read_bytes()[:2500])
    with pytest.raises(DataError, match=r"s\.tar:2\.txt: the member is cut off"):
        records(path)


def test_a_damaged_header_is_not_the_end_of_the_archive(tmp_path: Path) -> None:
    path = write_members(tmp_path / "s.tar", [(f"{n}.txt", b"x") for n in range(3)])
    damaged = bytearray(path.read_bytes())
    damaged[2 * 1024 + 150] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(DataError, match=r"s\.tar: a header has the wrong checksum \(got 2048\)"):
        records(path)


def test_what_comes_after_the_end_mark_is_not_lost_silently(tmp_path: Path) -> None:
    path = write_members(tmp_path / "s.tar", [("1.txt", b"x")])
    path.write_bytes(path.read_bytes() + write_members(tmp_path / "t", [("2.txt", b"x")]).read_bytes())
    with pytest.raises(DataError, match=r"s\.tar: there is something behind the end mark \(got 1024\)"):
        records(path)


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "s.tar", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("1.txt"))
    with pytest.raises(DataError, match=r"s\.tar: not a whole tar: .*compressed"):
        records(tmp_path)


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (["1.txt", "2.txt", "1.cls"], r"s\.tar:1\.cls: the key comes again after others; put the files"),
        (["1.txt", "1.txt"], r"s\.tar:1\.txt: the member comes twice"),
        (["1.txt", "1.TXT"], r"s\.tar:1\.txt: the member comes twice"),
    ],
)
def test_a_key_that_comes_again_is_refused_by_shard_and_member(tmp_path: Path, names: list[str], what: str) -> None:
    write_members(tmp_path / "s.tar", [(name, b"1") for name in names])
    with pytest.raises(DataError, match=what):
        records(tmp_path)


# -- several shards --------------------------------------------------------------------------------------------------


def test_a_folder_and_a_pattern_of_the_same_shards_give_the_same_records(tmp_path: Path) -> None:
    for number in (2, 0, 1):
        write(tmp_path / f"in/shard-{number:06d}.tar", [{"__key__": f"{n}", "txt": f"{number} {n}"} for n in range(2)])
    expected = {f"shard-{number:06d}.tar:{n}": b"%d %d" % (number, n) for number in range(3) for n in range(2)}
    found = records(tmp_path / "in")
    assert texts(found) == expected and list(texts(found)) == sorted(expected)
    assert records(tmp_path / "in/shard-{000000..000002}.tar") == found
    assert records(tmp_path / "in/shard-{000002,000000}.tar") == [*found[:2], *found[4:]]
    listing = resolve(tmp_path / "in/shard-{000000..000001}.tar").listing()
    assert [line["name"] for line in listing] == ["shard-000000.tar", "shard-000001.tar"]


def test_a_pattern_may_span_folders_and_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("a", "b"):
        write(tmp_path / folder / "0.tar", [{"__key__": "k", "txt": folder}])
    monkeypatch.chdir(tmp_path)
    assert texts(records("{a,b}/{0..0}.tar")) == {"a/0.tar:k": b"a", "b/0.tar:k": b"b"}


def test_a_shard_of_a_pattern_that_is_missing_is_named(tmp_path: Path) -> None:
    write(tmp_path / "0.tar", [{"__key__": "k", "txt": "x"}])
    with pytest.raises(DataError, match=r"\{0\.\.99999999999\}\.tar: there is no such shard \(got '1\.tar'\)"):
        resolve(tmp_path / "{0..99999999999}.tar").listing()


@pytest.mark.parametrize(
    "pattern",
    [
        "s-{000..012}.tar",
        "s-{8..11}.tar",
        "s-{0..11}.tar",
        "s-{08..11}.tar",
        "{a,b}/{0..2}.tar",
        "{a,}.tar",
        "plain.tar",
    ],
)
def test_braces_mean_what_they_mean_to_webdataset(pattern: str) -> None:
    assert list(expand_braces(pattern, "x")) == list(braceexpand.braceexpand(pattern))


@pytest.mark.parametrize("braces", ["{}", "{a}", "{3..1}", "{a..c}", "{1...3}"])
def test_braces_that_are_no_pattern_are_refused(tmp_path: Path, braces: str) -> None:
    write(tmp_path / "0.tar", [])
    with pytest.raises(DataError, match=r"not a pattern of shards .*\{000\.\.012\}"):
        resolve(tmp_path / f"{braces}.tar").listing()


def test_braces_in_the_name_of_a_file_that_exists_are_only_a_name(tmp_path: Path) -> None:
    path = write(tmp_path / "{0..1}.tar", [{"__key__": "k", "txt": "x"}])
    assert is_shard_pattern(str(path))
    assert texts(records(path)) == {"{0..1}.tar:k": b"x"}


# -- sharding, stores, memory ----------------------------------------------------------------------------------------


def test_sharding_for_language_modeling_holds_the_texts(tmp_path: Path) -> None:
    for shard in range(2):
        write(tmp_path / f"in/{shard}.tar", [{"__key__": f"d/{n}", "txt": f"{shard} {n}"} for n in range(30)])
    written = {f"{shard}.tar:d/{n}": f"{shard} {n}".encode() for shard in range(2) for n in range(30)}
    held_out = {key: text for key, text in written.items() if choose_split(Record(key, {}), 0.2) == "validation"}
    task = LanguageModeling(sequence_length=32)
    by_folder = Sharded(tmp_path / "in", tmp_path / "root", task)
    assert by_folder.documents() == held_out and by_folder.reused
    by_pattern = Sharded(tmp_path / "in/{0..1}.tar", tmp_path / "root", task)
    assert by_pattern.result.dataset_digest == by_folder.result.dataset_digest


def test_sharding_for_image_classification_holds_the_images(tmp_path: Path) -> None:
    images = [RNG.integers(0, 256, (8, 8, 3), dtype=np.uint8) for _ in range(30)]
    samples = [{"__key__": f"{n}", "png": png(image), "cls": n % 3} for n, image in enumerate(images)]
    write(tmp_path / "in/s.tar", samples)
    task = ImageClassification(image_size=8, num_channels=3, num_classes=3)
    sharded = Sharded(tmp_path / "in", tmp_path / "root", task)
    found = {**sharded.images("train"), **sharded.images("validation")}
    assert len(found) == 30
    for number, image in enumerate(images):
        pixels, label = found[f"s.tar:{number}"]
        assert np.array_equal(pixels, image) and label == number % 3


def test_shards_in_an_object_store_are_read_like_local_ones(tmp_path: Path) -> None:
    store = fsspec.filesystem("memory")
    for number in range(2):
        path = write(tmp_path / f"{number}.tar", [{"__key__": "k", "txt": f"{number}"}])
        store.pipe_file(f"/tars/sub/{number}.tar", path.read_bytes())
    expected = records(tmp_path)
    assert records("memory://tars/sub") == records("memory://tars/sub/{0..1}.tar") == expected
    assert records("memory://tars/sub/1.tar") == expected[1:]
    store.rm("/tars", recursive=True)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_shard(tmp_path: Path) -> None:
    content = json.dumps({"text": "x" * 2500}).encode()
    write_members(tmp_path / "s.tar", [(f"{n}.json", content) for n in range(40_000)])
    count, growth = reading_memory(tmp_path)
    assert count == 40_000 and growth < 20e6
    assert reading_memory(tmp_path, keep=True)[1] > 100e6
