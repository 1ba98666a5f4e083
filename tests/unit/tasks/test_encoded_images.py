"""Images that stay files in the shards: their bytes, what is decoded of them, and what is random about that."""

import inspect
import io
import json
import tarfile
from types import SimpleNamespace

import numpy as np
import pandas
import pytest
import torch
from helpers import in_process
from helpers.source_checks import Sharded
from helpers.splits import open_split
from PIL import Image, ImageOps

from kftrain.data import images
from kftrain.data.decoding import Decoding, wrap_decode
from kftrain.data.loader import TrainLoader
from kftrain.data.order import BatchPlan
from kftrain.data.schema import Record
from kftrain.data.tuning import Tuning
from kftrain.errors import ConfigError, DataError
from kftrain.evaluate import examples
from kftrain.evaluate.score import score
from kftrain.models.vision_transformer import VisionTransformer
from kftrain.parallel.mesh import Mesh
from kftrain.tasks import build_task
from kftrain.tasks.image_classification import Augment, ImageClassification
from kftrain.tasks.settings import TaskConfig

RNG = np.random.default_rng(0)


def build(**options):
    defaults = {"image_size": 8, "num_channels": 3, "num_classes": 2, "resize": "crop", "storage": "files"}
    return ImageClassification(**{**defaults, **options})


def smooth(height, width, channels=3):
    """Pixels that JPEG keeps nearly as they are."""
    small = Image.fromarray(RNG.integers(0, 256, (4, 4, channels), dtype=np.uint8).squeeze())
    return np.asarray(small.resize((width, height), Image.Resampling.BICUBIC))


def encoded(image, kind="PNG", **options):
    stream = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(stream, kind, **options)
    return stream.getvalue()


def decoded(task, content, generator=None):
    return task.decode({"image": content, "label": np.int64(1)}, generator)["image"]


@pytest.fixture
def folder(tmp_path):
    """40 images of two classes, of many sizes and three kinds; and their contents by key."""
    kinds = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP", "JPEG": "JPEG"}
    written = {}
    for number in range(40):
        extension = list(kinds)[number % 4]
        key = f"{'ab'[number % 2]}/{number:02d}.{extension}"
        path = tmp_path / "in" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(smooth(10 + number, 50 - number), kinds[extension]))
        written[key] = path.read_bytes()
    return tmp_path / "in", written


# -- shards ----------------------------------------------------------------------------------------------------------


def test_shards_hold_the_files_as_they_came_under_their_extensions(folder, tmp_path):
    source, written = folder
    sharded = Sharded(source, tmp_path / "root", build())
    assert sharded.reused
    found = {**sharded.images("train"), **sharded.images("validation")}
    assert {key: bytes(content) for key, (content, _) in found.items()} == written
    assert all(label == "ab".index(key[0]) for key, (_, label) in found.items())
    names = {}
    for tar in sorted((tmp_path / "root").rglob("*.tar")):
        with tarfile.open(tar) as archive:
            names |= {member.name: archive.extractfile(member).read() for member in archive}
    assert {content for name, content in names.items() if not name.endswith(".npy")} == set(written.values())
    kinds = {name.rsplit(".", 1)[-1] for name in names}
    assert kinds == {"jpg", "jpeg", "png", "webp", "npy"}


def test_size_and_augmentation_need_no_other_shards(folder, tmp_path):
    source, _ = folder
    one = Sharded(source, tmp_path / "root", build())
    other = Sharded(source, tmp_path / "root", build(image_size=16, num_channels=1, augment=Augment(flip=True)))
    assert one.result.dataset_digest == other.result.dataset_digest
    pixels = Sharded(source, tmp_path / "root", build(storage="pixels"))
    assert pixels.result.dataset_digest != one.result.dataset_digest


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"no image", "of no known kind"),
        (b"\xff\xd8\xff no image", "cannot be decoded: its format is not known"),
        (encoded(np.zeros((4, 4), np.uint16)), "8 bits per channel"),
        (np.zeros((4, 4, 3), np.uint8), r"no image file; set task\.storage=pixels"),
    ],
)
def test_what_is_no_image_file_is_refused_when_it_is_sharded(content, part):
    with pytest.raises(DataError, match=part) as raised:
        list(build().encode([Record("image-7", {"image": content, "label": 0})], "train"))
    assert raised.value.where == "image-7"


def test_bytes_of_a_users_source_get_the_extension_of_what_they_are():
    pixels = smooth(9, 9)
    for kind, extension in (("JPEG", "jpg"), ("PNG", "png"), ("BMP", "bmp"), ("TIFF", "tif"), ("GIF", "gif")):
        content = encoded(pixels, kind)
        (block,) = build().encode([Record("k", {"image": content, "label": 0})], "train")
        assert block.extensions == {"image": extension} and block.arrays["image"].tolist() == [content]


# -- decoding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_channels", [1, 3])
@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA", "P", "1", "CMYK"])
def test_evaluation_sees_what_shards_of_pixels_hold(num_channels, mode):
    image = Image.fromarray(smooth(13, 20)).convert(mode)
    content = encoded(image, "TIFF" if mode == "CMYK" else "PNG")
    record = Record("k", {"image": images.decode_image(content, "k"), "label": 0})
    task = build(num_channels=num_channels, storage="pixels")
    (block,) = task.encode([record], "train")
    assert np.array_equal(decoded(build(num_channels=num_channels), content), block.arrays["image"][0])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photos_are_turned_upright_before_a_part_of_them_is_taken(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(smooth(120, 200), "JPEG", exif=exif, quality=95)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    box = (5, 10, 45, 50)
    found = images.decode_part(content, 8, 3, lambda width, height: box, "x")
    expected = np.asarray(upright.resize((8, 8), Image.Resampling.BILINEAR, box=box))
    assert np.abs(found.astype(int) - expected).max() <= 3
    sizes = []
    images.decode_part(content, 8, 3, lambda *size: sizes.append(size) or (0, 0, *size), "x")
    assert sizes == [upright.size]


def test_a_large_photo_is_decoded_in_less_detail_but_never_less_than_twice_what_is_wanted(monkeypatch):
    content = encoded(smooth(1000, 1600), "JPEG", quality=95)
    shapes = []
    scale = images.scaled
    monkeypatch.setattr(images, "scaled", lambda image, *rest: (shapes.append(image.size), scale(image, *rest))[1])
    whole = images.decode_part(content, 50, 3, images.middle_square, "x")
    part = images.decode_part(content, 50, 3, lambda width, height: (0, 0, 250, 200), "x")
    assert shapes == [(200, 125), (800, 500)]
    for found, box in ((whole, (300, 0, 1300, 1000)), (part, (0, 0, 250, 200))):
        expected = Image.open(io.BytesIO(content)).resize((50, 50), Image.Resampling.BILINEAR, box=box)
        assert np.abs(found.astype(int) - np.asarray(expected)).max() <= 4


def test_an_image_of_another_size_is_refused_where_the_task_does_not_resize():
    task, right = build(resize="none"), smooth(8, 8)
    assert np.array_equal(decoded(task, encoded(right)), right)
    with pytest.raises(DataError, match=r"not 8 x 8 pixels \(got '9 x 8'\); task\.resize=crop"):
        decoded(task, encoded(smooth(8, 9)))


@pytest.mark.parametrize("content", [b"", b"no image", encoded(smooth(40, 40), "JPEG")[:200]])
def test_what_is_no_image_is_refused(content):
    with pytest.raises(DataError, match="cannot be decoded"):
        decoded(build(), content)


@pytest.mark.filterwarnings("ignore")  # Pillow only warns
def test_a_bomb_is_refused_before_it_is_decoded(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(DataError, match="too large: 11 x 10 pixels, the limit is 100"):
        decoded(build(), encoded(smooth(10, 11)))


# -- augmentation ----------------------------------------------------------------------------------------------------


def test_random_parts_have_the_areas_and_shapes_that_are_asked_for():
    augment, generator = Augment(crop_scale=(0.25, 0.5)), np.random.default_rng(0)
    boxes = np.array([augment.choose(generator, 400, 300) for _ in range(2000)])
    left, top, right, bottom = boxes.T
    assert left.min() >= 0 and top.min() >= 0 and right.max() <= 400 and bottom.max() <= 300
    share = (right - left) * (bottom - top) / (400 * 300)
    ratio = (right - left) / (bottom - top)
    assert 0.247 < share.min() < 0.26 and 0.49 < share.max() < 0.503 and share.mean() == pytest.approx(0.375, abs=0.01)
    assert (
        0.74 < ratio.min() < 0.77 and 1.30 < ratio.max() < 1.345 and np.log(ratio).mean() == pytest.approx(0, abs=0.01)
    )
    # as far from the left as from the right
    assert (left / (400 - (right - left))).mean() == pytest.approx(0.5, abs=0.02)


def test_of_a_narrow_image_the_middle_is_taken():
    found = Augment(crop_scale=(0.9, 1.0)).choose(np.random.default_rng(0), 1000, 10)
    assert found == pytest.approx((1000 / 2 - 10 * 4 / 6, 0, 1000 / 2 + 10 * 4 / 6, 10))


def test_training_sees_a_random_part_and_evaluation_the_middle():
    task, content = build(augment=Augment(crop_scale=(0.1, 0.3), flip=True)), encoded(smooth(60, 90))
    seen = [decoded(task, content, np.random.default_rng(seed)) for seed in range(20)]
    assert len({found.tobytes() for found in seen}) == 20
    again = [decoded(task, content, np.random.default_rng(seed)) for seed in range(20)]
    assert all(np.array_equal(one, other) for one, other in zip(seen, again, strict=True))
    assert np.array_equal(decoded(task, content), decoded(build(), content))
    assert np.array_equal(decoded(build(), content, np.random.default_rng(0)), decoded(build(), content))


def test_about_half_of_the_images_are_mirrored():
    task, content = build(augment=Augment(flip=True)), encoded(smooth(8, 8))
    straight, generator = decoded(build(), content), np.random.default_rng(1)
    seen = [decoded(task, content, generator) for _ in range(200)]
    mirrored = [np.array_equal(found, straight[:, ::-1]) for found in seen]
    assert all(
        np.array_equal(found, straight) for found, is_mirrored in zip(seen, mirrored, strict=True) if not is_mirrored
    )
    assert 75 < sum(mirrored) < 125


def test_pixels_in_shards_are_augmented_too():
    task, pixels = build(storage="pixels", augment=Augment(flip=True)), smooth(8, 8)
    assert task.decodes and not build(storage="pixels").decodes
    seen = {decoded(task, pixels, np.random.default_rng(seed)).tobytes() for seed in range(20)}
    assert seen == {pixels.tobytes(), pixels[:, ::-1].tobytes()}
    assert np.array_equal(decoded(task, pixels), pixels)


def test_the_options_are_read_from_a_configuration():
    options = {"image_size": 8, "num_channels": 3, "num_classes": 2, "resize": "crop", "storage": "files"}
    section = {"kind": "image_classification", **options, "augment": {"crop_scale": [0.08, 1.0], "flip": True}}
    task = build_task(TaskConfig.model_validate(section))
    assert task.augment == Augment(crop_scale=(0.08, 1.0), flip=True)
    for wrong in ({"crop_scale": [1.0, 0.5]}, {"crop_scale": [0.0, 0.5]}, {"flips": True}, {"crop_ratio": [2]}):
        with pytest.raises(ConfigError, match=r"task\.augment"):
            build_task(TaskConfig.model_validate({**section, "augment": wrong}))
    for wrong in ({"storage": "files", "resize": "none"}, {"augment": Augment(flip=True), "storage": "pixels"}):
        with pytest.raises(ConfigError, match=r"grey or RGB.*1 or 3|task\.num_channels"):
            ImageClassification(image_size=8, num_classes=2, num_channels=4, **wrong)


def test_pixels_are_normalised_for_each_channel():
    task = build(mean=[0.1, 0.2, 0.3], std=[0.5, 0.6, 0.7])
    pixels = RNG.integers(0, 256, (5, 8, 8, 3), dtype=np.uint8)
    found = task.batch({"image": pixels, "label": np.zeros(5, np.int64)})["image"].numpy()
    expected = ((pixels / 255 - [0.1, 0.2, 0.3]) / [0.5, 0.6, 0.7]).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    with pytest.raises(ConfigError, match=r"task\.std: needs one number, or 3"):
        build(std=[1.0, 2.0])


# -- prediction ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", ["files", "pixels"])
def test_predict_takes_files_and_pixels(storage):
    task = build(storage=storage)
    torch.manual_seed(0)
    model = VisionTransformer(**task.model_arguments(), dim=16, num_layers=1, num_heads=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    pixels = smooth(20, 11)
    content = encoded(pixels)
    found = task.predict(model.eval(), pandas.DataFrame({"image": [content, pixels, pixels.tolist()]})).to_numpy()
    with torch.no_grad():
        batch = task.batch({"image": decoded(build(), content)[np.newaxis], "label": np.zeros(1, np.int64)})
        expected = model(batch["image"]).softmax(1).numpy()
    np.testing.assert_allclose(found, np.repeat(expected, 3, axis=0), rtol=1e-5)
    assert found[0].max() < 0.99
    assert task.predict(model, pandas.DataFrame({"image": []})).shape == (0, 2)
    with pytest.raises(DataError, match="row 0: the image cannot be decoded"):
        task.predict(model, pandas.DataFrame({"image": [b"no image"]}))


# -- through training and evaluation ---------------------------------------------------------------------------------


def test_what_cannot_be_decoded_is_named_with_shard_and_key(tmp_path, monkeypatch):
    for number in range(16):
        path = tmp_path / "in" / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(smooth(30, 40), "JPEG")[:-20])
    uri = Sharded(tmp_path / "in", tmp_path / "root", build()).result.manifest_uri
    train, validation = (open_split(uri, split) for split in ("train", "validation"))
    order = SimpleNamespace(num_samples=train.num_samples, locate=lambda positions: positions % train.num_samples)
    loader = TrainLoader(train, order, BatchPlan(4, 1), 0, Tuning(0), decoding=Decoding(wrap_decode(build()), 0))
    said = r"-000000\.tar, [ab]/\d+\.jpg: the image cannot be decoded: image file is truncated"
    with pytest.raises(DataError, match="train" + said):
        next(loader.steps(0, 1))
    model = VisionTransformer(**build().model_arguments(), dim=16, num_layers=1, num_heads=2)
    with in_process.world(monkeypatch) as world, pytest.raises(DataError, match="validation" + said):
        score(model, build(), validation, Mesh.of_copies(world), 4)
    with pytest.raises(DataError, match="validation" + said):
        examples.show_examples(build(), model, validation, [1], 2, torch.device("cpu"))
    cut = encoded(smooth(30, 40), "JPEG")[:-20]
    with pytest.raises(DataError, match="row 1: the image cannot be decoded"):
        build().predict(model, pandas.DataFrame({"image": [smooth(8, 8), cut]}))


def test_reports_show_what_the_model_has_seen(folder, tmp_path):
    source, written = folder
    task = build()
    dataset = open_split(Sharded(source, tmp_path / "root", task).result.manifest_uri, "validation")
    model = VisionTransformer(**task.model_arguments(), dim=16, num_layers=1, num_heads=2)
    shown = examples.show_examples(task, model, dataset, [0, 2], 1, torch.device("cpu"))
    keys = dataset.group_keys()
    for row, each in zip((0, 2), shown, strict=True):
        assert np.array_equal(each["picture"], decoded(task, written[keys[row]]))


def test_models_that_differ_in_augmentation_and_normalisation_are_compared():
    options = inspect.signature(ImageClassification).parameters
    assert ImageClassification.reading_options == {"augment", "mean", "std", "max_value"} < options.keys()
    for name in ImageClassification.reading_options:
        assert name not in json.dumps(build(storage="pixels").settings()), "what shards depend on is none of these"
