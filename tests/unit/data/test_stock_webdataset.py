"""Stock `webdataset` reads the shards that we write, encoded and packed, and we read and keep what it has written."""

import io
from pathlib import Path

import numpy as np
import pytest
import webdataset
from helpers.source_checks import Sharded
from helpers.splits import open_split
from helpers.toy_data import shard_toy, text_folder
from PIL import Image

import kftrain
from kftrain.data.schema import BYTES, Field, SampleSchema
from kftrain.tasks import Regression
from kftrain.tasks.image_classification import ImageClassification

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
"""The stock reader leaves its files to the garbage collector."""

RNG = np.random.default_rng(0)
TASK = {"image_size": 8, "num_channels": 3, "num_classes": 3, "resize": "crop", "storage": "files"}


def encoded(kind: str) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(RNG.integers(0, 256, (12, 9, 3), dtype=np.uint8)).save(stream, kind)
    return stream.getvalue()


def written_by_webdataset(folder: Path) -> dict[str, dict]:
    """40 samples in three shards of `ShardWriter`: an image, a label, a caption and a mask each."""
    folder.mkdir()
    samples = {}
    with webdataset.ShardWriter(f"{folder}/s-%02d.tar", maxcount=15, verbose=0) as writer:
        for number in range(40):
            kind, extension = (("JPEG", "jpg"), ("PNG", "png"))[number % 2]
            sample = {
                extension: encoded(kind),
                "cls": number % 3,
                "txt": f"caption é {number}",
                "seg.png": encoded("PNG"),
            }
            samples[f"{number:03d}"] = sample
            writer.write({"__key__": f"{number:03d}", **sample})
    return samples


def stock(root: Path, split: str) -> list[dict]:
    tars = sorted(map(str, root.rglob(f"{split}-*.tar")))
    return list(webdataset.WebDataset(tars, shardshuffle=False))


def test_encoded_members_come_from_its_writer_through_us_to_its_reader_byte_by_byte(tmp_path):
    samples = written_by_webdataset(tmp_path / "in")
    sharded = Sharded(tmp_path / "in", tmp_path / "root", ImageClassification(**TASK))
    found = {
        sample["__key__"]: sample for split in ("train", "validation") for sample in stock(tmp_path / "root", split)
    }
    assert len(found) == 40
    for key, sample in found.items():
        original = samples[key.rpartition("_")[2].rpartition("/")[2][-3:]]
        (extension,) = original.keys() & {"jpg", "png"}
        assert sample[extension] == original[extension]
        assert np.load(io.BytesIO(sample["label.npy"])).tolist() == [original["cls"]]
    train = open_split(sharded.result.manifest_uri, "train")
    assert {bytes(content) for content in train.read(np.arange(train.num_samples))["image"]} == {
        sample[extension]
        for sample in stock(tmp_path / "root", "train")
        for extension in ("jpg", "png")
        if extension in sample
    }


def test_arrays_that_are_packed_are_one_member_for_many_rows(tmp_path):
    shards = shard_toy(text_folder(tmp_path / "in"), tmp_path / "root")
    dataset = kftrain.open_dataset(shards.manifest_uri)
    arrays = dataset.read(np.arange(dataset.num_samples))
    for name, array in arrays.items():
        members = [np.load(io.BytesIO(sample[f"{name}.npy"])) for sample in stock(tmp_path / "root", "train")]
        assert np.array_equal(np.concatenate(members), array)


class Captions(Regression):
    """A task of one's own that keeps the caption and the mask as they came."""

    def schema(self):
        encoded = Field("caption", BYTES, extensions=("txt",)), Field("mask", BYTES, extensions=("seg.png",))
        return SampleSchema((*encoded, Field("label", "int64")))

    def settings(self):
        return {}

    def baselines(self, samples):
        return {}


def test_ones_own_task_keeps_any_member_as_it_came(tmp_path):
    samples = written_by_webdataset(tmp_path / "in")
    blocks = Sharded(tmp_path / "in", tmp_path / "root", Captions())
    found = {**blocks.blocks("train"), **blocks.blocks("validation")}
    assert len(found) == 40
    for key, block in found.items():
        original = samples[key.rpartition(":")[2]]
        assert bytes(block["caption"][0]).decode() == original["txt"]
        assert bytes(block["mask"][0]) == original["seg.png"] and block["label"].tolist() == [original["cls"]]
