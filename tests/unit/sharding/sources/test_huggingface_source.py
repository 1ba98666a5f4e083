import subprocess
import sys
from pathlib import Path

import datasets
import fsspec
import numpy as np
import pytest
from helpers.source_checks import Sharded, reading_memory, records, resolve, texts
from PIL import Image

from kftrain.data.schema import Record
from kftrain.errors import ConfigError, DataError
from kftrain.sharding.sources.resolve_source import choose_split
from kftrain.tasks.image_classification import ImageClassification
from kftrain.tasks.language_modeling import LanguageModeling

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def quiet():
    datasets.disable_progress_bars()


def text_dataset(count: int, name: str = "document") -> datasets.Dataset:
    return datasets.Dataset.from_dict({"text": [f"{name} {n}" for n in range(count)], "n": list(range(count))})


def image_dataset(images: list[np.ndarray], image: str = "image", label: str = "label") -> datasets.Dataset:
    features = datasets.Features({image: datasets.Image(), label: datasets.ClassLabel(names=["ant", "bee", "cat"])})
    columns = {image: [Image.fromarray(pixels) for pixels in images], label: [n % 3 for n in range(len(images))]}
    return datasets.Dataset.from_dict(columns, features=features)


# -- datasets and their splits ---------------------------------------------------------------------------------------


def test_each_row_of_a_dataset_is_a_record_under_its_number(tmp_path: Path) -> None:
    rows = [{"body": "eins", "n": 1, "tags": ["a"]}, {"body": "zwei é", "n": None, "tags": []}]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "ds")
    assert records(tmp_path / "ds", text_field="body") == [
        Record("0", {"body": "eins", "n": 1, "tags": ["a"], "text": b"eins"}),
        Record("1", {"body": "zwei é", "n": None, "tags": [], "text": "zwei é".encode()}),
    ]


def test_rows_are_those_of_the_library_in_its_order(tmp_path: Path) -> None:
    saved = text_dataset(3000).shuffle(seed=1).select(range(2500))
    saved.save_to_disk(tmp_path / "ds", num_shards=3)
    found = records(tmp_path / "ds")
    assert [(record.key, record.fields["n"]) for record in found] == [(f"{n}", row["n"]) for n, row in enumerate(saved)]
    assert found == records(tmp_path / "ds")


@pytest.mark.parametrize(
    ("names", "used"),
    [
        (["train", "validation", "test"], {"train": "train", "validation": "validation"}),
        (["test", "train"], {"train": "train", "test": "validation"}),
        (["train"], {"train": ""}),
        (["train", "unsupervised"], {"train": ""}),
    ],
)
def test_the_splits_of_a_dataset_dict_become_ours(tmp_path: Path, names: list[str], used: dict[str, str]) -> None:
    datasets.DatasetDict({name: text_dataset(2, name) for name in names}).save_to_disk(tmp_path / "dd")
    found = records(tmp_path / "dd")
    expected = [(f"{name}:{n}", split, f"{name} {n}".encode()) for name, split in used.items() for n in range(2)]
    assert [(record.key, record.split, record.fields["text"]) for record in found] == expected
    assert {line["name"].split("/")[0] for line in resolve(tmp_path / "dd").listing()} == set(used)


def test_a_dataset_dict_without_train_is_refused(tmp_path: Path) -> None:
    datasets.DatasetDict({"all": text_dataset(2)}).save_to_disk(tmp_path / "dd")
    with pytest.raises(DataError, match=r"dataset_dict\.json: the saved data set has no split 'train' \(got \['all'\]"):
        resolve(tmp_path / "dd").listing()


def test_the_listing_is_that_of_the_files_and_needs_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text_dataset(5).save_to_disk(tmp_path / "ds")
    source, listing = resolve(tmp_path / "ds"), resolve(tmp_path / "ds").listing()
    (tmp_path / "ds/cache-0123.arrow").write_text("what the library leaves behind")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert source.listing() == listing
    assert {line["name"] for line in listing} == {"data-00000-of-00001.arrow", "dataset_info.json", "state.json"}
    with pytest.raises(ConfigError, match=r"needs datasets .*pip install 'kftrain\[sources\]'"):
        list(source.records())


def test_neither_the_network_nor_a_home_folder_is_needed(tmp_path: Path) -> None:
    text_dataset(3).save_to_disk(tmp_path / "ds")
    script = (
        "import socket, sys\n"
        "def refuse(*arguments, **options): raise AssertionError('network')\n"
        "socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse\n"
        "from kftrain.sharding.sources.huggingface import HuggingFaceSource\n"
        "print(len(list(HuggingFaceSource(sys.argv[1], 'text').records())), 'torch' in sys.modules)\n"
    )
    environment = {"HOME": "/nonexistent", "PATH": ""}
    command = [sys.executable, "-c", script, str(tmp_path / "ds")]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert done.stdout == "3 False\n"


# -- columns ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("image", "label"), [("image", "label"), ("img", "fine_label")])
def test_images_and_class_labels_are_found_by_name_or_by_their_feature(tmp_path: Path, image: str, label: str) -> None:
    images = [RNG.integers(0, 256, (4 + n, 5, 3), dtype=np.uint8) for n in range(4)]
    image_dataset(images, image, label).save_to_disk(tmp_path / "ds")
    found = records(tmp_path / "ds")
    assert [record.fields["label"] for record in found] == [0, 1, 2, 0]
    assert all(record.fields["class_names"] == ("ant", "bee", "cat") for record in found)
    assert all(np.array_equal(record.fields["image"], pixels) for record, pixels in zip(found, images, strict=True))


def test_two_class_labels_of_other_names_are_no_label(tmp_path: Path) -> None:
    saved = image_dataset([np.zeros((2, 2, 3), np.uint8)], label="fine")
    saved.add_column("coarse", [0], feature=datasets.ClassLabel(names=["x", "y"])).save_to_disk(tmp_path / "ds")
    with pytest.raises(DataError, match="neither a column 'text' of text nor columns 'image' and 'label'"):
        records(tmp_path / "ds")


def test_parquet_that_the_library_wrote_gives_the_same_fields(tmp_path: Path) -> None:
    images = [RNG.integers(0, 256, (4, 5, 3), dtype=np.uint8) for n in range(4)]
    saved = image_dataset(images, "img")
    saved.save_to_disk(tmp_path / "ds")
    saved.to_parquet(tmp_path / "a.parquet")
    for one, other in zip(records(tmp_path / "ds"), records(tmp_path / "a.parquet"), strict=True):
        assert one.fields.keys() == other.fields.keys() and np.array_equal(one.fields["image"], other.fields["image"])
        assert (one.fields["label"], one.fields["class_names"]) == (other.fields["label"], other.fields["class_names"])


def test_a_bad_row_is_refused_by_its_number(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["x"] * 5 + [None]}).save_to_disk(tmp_path / "ds")
    with pytest.raises(DataError, match=r"ds:5: no text in field 'text' \(got None\)"):
        records(tmp_path / "ds")


# -- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["state.json", "dataset_info.json", "data-00000-of-00001.arrow"])
@pytest.mark.parametrize("share", [0, 0.5])
def test_a_truncated_file_is_refused_with_the_folder(tmp_path: Path, name: str, share: float) -> None:
    text_dataset(50).save_to_disk(tmp_path / "ds")
    whole = (tmp_path / "ds" / name).read_bytes()
    (tmp_path / "ds" / name).write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(DataError, match=r"/ds: cannot be read as a saved data set: .*save it again"):
        records(tmp_path / "ds")


def test_a_data_file_that_is_gone_is_refused_by_name(tmp_path: Path) -> None:
    text_dataset(50).save_to_disk(tmp_path / "ds")
    (tmp_path / "ds/data-00000-of-00001.arrow").unlink()
    with pytest.raises(DataError, match=r"/ds: cannot be read as a saved data set: .*data-00000-of-00001\.arrow"):
        records(tmp_path / "ds")


def test_offsets_that_lead_out_of_the_file_are_found_before_they_are_followed(tmp_path: Path) -> None:
    """Arrow maps the file without looking: only a check of each batch keeps this from reading elsewhere."""
    saved = datasets.Dataset.from_dict({"text": ["0123456789"] * 40})
    saved.save_to_disk(tmp_path / "ds")
    path = tmp_path / "ds/data-00000-of-00001.arrow"
    content = bytearray(path.read_bytes())
    offsets = np.arange(0, 400, 10, dtype="<i4").tobytes()
    content[content.index(offsets) + 4 * 20 + 3] = 0x7F
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"ds:0: the rows are damaged: .*save it again"):
        records(tmp_path / "ds")


# -- sharding, stores, memory ----------------------------------------------------------------------------------------


def test_sharding_for_language_modeling_holds_the_texts(tmp_path: Path) -> None:
    text_dataset(60).save_to_disk(tmp_path / "ds")
    written = {f"document {n}": f"document {n}".encode() for n in range(60)}
    held_out = {key: text for key, text in written.items() if choose_split(Record(key, {}), 0.2) == "validation"}
    sharded = Sharded(tmp_path / "ds", tmp_path / "root", LanguageModeling(sequence_length=32), key="text")
    assert sharded.documents() == held_out and sharded.reused


def test_sharding_for_image_classification_holds_the_splits_and_checks_the_classes(tmp_path: Path) -> None:
    images = [RNG.integers(0, 256, (8, 8, 3), dtype=np.uint8) for _ in range(9)]
    parts = {"train": image_dataset(images[:6]), "test": image_dataset(images[6:])}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "dd")
    sharded = Sharded(
        tmp_path / "dd", tmp_path / "root", ImageClassification(image_size=8, num_channels=3, num_classes=3)
    )
    stored = [*sharded.images("train").values(), *sharded.images("validation").values()]
    assert all(np.array_equal(pixels, image) for (pixels, _), image in zip(stored, images, strict=True))
    with pytest.raises(DataError, match="the source has 3 classes, the task 5"):
        Sharded(tmp_path / "dd", tmp_path / "other", ImageClassification(image_size=8, num_channels=3, num_classes=5))


def test_a_dataset_in_an_object_store_is_read_like_a_local_one(tmp_path: Path) -> None:
    store = fsspec.filesystem("memory")
    datasets.DatasetDict({"train": text_dataset(3), "test": text_dataset(2)}).save_to_disk(tmp_path / "dd")
    store.put(str(tmp_path / "dd"), "/saved/", recursive=True)
    assert records("memory://saved/dd") == records(tmp_path / "dd")
    assert texts(records("memory://saved/dd/train")) == {f"{n}": f"document {n}".encode() for n in range(3)}
    store.rm("/saved", recursive=True)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_dataset(tmp_path: Path) -> None:
    noise = RNG.bytes(50_000_000).hex()
    rows = ({"text": noise[start : start + 500]} for start in range(0, len(noise), 500))
    saved = datasets.Dataset.from_generator(lambda: rows, cache_dir=str(tmp_path / "cache"), fingerprint="noise")
    saved.save_to_disk(tmp_path / "ds")
    count, growth = reading_memory(tmp_path / "ds", "datasets")
    assert count == 200_000 and growth < 40e6
    assert reading_memory(tmp_path / "ds", "datasets", keep=True)[1] > 100e6
