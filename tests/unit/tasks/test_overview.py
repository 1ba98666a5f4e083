"""What the report of a dataset shows of its samples: read from the shards, the same every time."""

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from helpers.models.toy_task import ToyTask
from helpers.splits import open_split
from helpers.toy_data import shard_toy, text_folder
from PIL import Image

from kftrain.core import storage
from kftrain.data.schema import BYTES, Field, SampleSchema
from kftrain.errors import UserCodeError
from kftrain.tasks.overview import OVERVIEW_NAME, write_overview
from kftrain.tasks.shown import format_example, show_fields


class Texts(ToyTask):
    def show(self, block):
        return {"text": block["data"].tobytes().rstrip(b"\0").decode()}


@pytest.fixture
def sharded(tmp_path):
    source = text_folder(tmp_path / "texts", 100)
    return source, shard_toy(source, tmp_path / "root", part_size_bytes=1 << 16, processes=1)


def test_samples_of_both_splits_are_those_that_are_stored(sharded):
    source, result = sharded
    found = write_overview(Texts(), result.manifest_uri, result.manifest)
    assert [each["split"] for each in found["examples"]] == ["train"] * 8 + ["validation"] * 4
    for split in ("train", "validation"):
        keys = open_split(result.manifest_uri, split).group_keys()
        shown = [each["key"] for each in found["examples"] if each["split"] == split]
        assert shown == [keys[number * len(keys) // len(shown)] for number in range(len(shown))]
    for each in found["examples"]:
        text = (source / each["key"]).read_text()
        assert each["shown"]["text"] == (text if len(text) <= 200 else text[:199] + "…")
    assert storage.read_json(str(Path(result.manifest_uri).parent / OVERVIEW_NAME)) == found


def test_it_is_written_once(sharded, monkeypatch):
    _, result = sharded
    first = write_overview(Texts(), result.manifest_uri, result.manifest)
    monkeypatch.setattr(Texts, "show", lambda self, block: pytest.fail("the samples are read again"))
    assert write_overview(Texts(), result.manifest_uri, result.manifest) == first


@pytest.mark.parametrize("wrong", [lambda self, block: 3, lambda self, block: {}["boom"]])
def test_what_a_users_task_does_wrong_is_its_error(sharded, monkeypatch, wrong):
    _, result = sharded
    monkeypatch.setattr(Texts, "show", wrong)
    with pytest.raises(UserCodeError, match=r"task\.show"):
        write_overview(Texts(), result.manifest_uri, result.manifest)


def encoded(image):
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, "PNG")
    return stream.getvalue()


def test_images_texts_and_numbers_are_shown_by_default():
    schema = SampleSchema(
        (
            Field("photo", BYTES, extensions=("jpg", "png")),
            Field("grey", "uint8", (6, 5)),
            Field("text", BYTES, extensions=("txt",)),
            Field("other", BYTES, extensions=("bin",)),
            Field("label", "int64"),
            Field("vector", "float32", (3,)),
        )
    )
    pixels = np.random.default_rng(0).integers(0, 256, (7, 9, 3)).astype(np.uint8)
    files = {"photo": encoded(pixels), "text": "ä story".encode(), "other": b"12345"}
    block = {name: np.array([content], object) for name, content in files.items()}
    block |= {"grey": pixels[None, :6, :5, 0], "label": np.array([4]), "vector": np.ones((1, 3), np.float32)}
    found = show_fields(schema, block)
    assert np.array_equal(found["photo"], pixels) and np.array_equal(found["grey"], pixels[:6, :5, 0])
    assert (found["text"], found["other"], found["label"]) == ("ä story", "5 bytes", 4) and "vector" not in found
    shown = format_example({"photo": found["photo"], "label": 4}, "task.show")
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(base64.b64decode(shown["picture"])))), pixels)
    block["photo"][0] = b"no image"
    assert show_fields(schema, block)["photo"] == "cannot be decoded"
