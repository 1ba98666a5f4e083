import sys

import numpy as np
import pandas
import pytest
import torch
from PIL import Image

from kftrain.data.schema import Record
from kftrain.errors import ConfigError, DataError
from kftrain.models.vision_transformer import VisionTransformer
from kftrain.tasks.image_classification import ImageClassification

RNG = np.random.default_rng(0)


def build(**options):
    defaults = {"image_size": 8, "num_channels": 3, "num_classes": 4, "max_value": 16, "mean": 0.3, "std": 0.35}
    return ImageClassification(**{**defaults, **options})


def records(count, channels=3):
    shape = (8, 8, channels) if channels > 1 else (8, 8)
    return [
        Record(f"image-{n}", {"image": RNG.integers(0, 17, shape, dtype=np.uint8), "label": n % 4})
        for n in range(count)
    ]


def arrays_of(task, items):
    blocks = list(task.encode(iter(items), "validation"))
    return {name: np.concatenate([block.arrays[name] for block in blocks]) for name in ("image", "label")}


def some_model(task, seed=0):
    torch.manual_seed(seed)
    model = VisionTransformer(**task.model_arguments(), dim=16, num_layers=1, num_heads=2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()


def statistics_of(task, model, arrays):
    with torch.no_grad():
        return {
            name: value.numpy()
            for name, value in task.statistics(model(task.batch(arrays)["image"]), task.batch(arrays)).items()
        }


def test_each_image_is_a_block_of_its_own_as_the_schema_says():
    task, items = build(), records(3)
    blocks = list(task.encode(iter(items), "train"))
    assert [block.key for block in blocks] == ["image-0", "image-1", "image-2"]
    for block, item in zip(blocks, items, strict=True):
        for field in task.schema().fields:
            assert block.arrays[field.name].dtype == field.dtype and block.arrays[field.name].shape == (1, *field.shape)
        assert np.array_equal(block.arrays["image"][0], item.fields["image"])


def test_a_grey_image_may_lack_its_channel():
    task, (item,) = build(num_channels=1), records(1, channels=1)
    (block,) = task.encode([item], "train")
    assert np.array_equal(block.arrays["image"][0, :, :, 0], item.fields["image"])


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"image": np.zeros((8, 7, 3), np.uint8), "label": 0}, "shape"),
        ({"image": np.full((8, 8, 3), 0.5), "label": 0}, "whole numbers"),
        ({"image": np.full((8, 8, 3), 256), "label": 0}, "whole numbers"),
        ({"image": np.full((8, 8, 3), np.nan), "label": 0}, "whole numbers"),
        ({"image": [[1], [1, 2]], "label": 0}, "rectangular"),
        ({"image": np.zeros((8, 8, 3), np.uint8), "label": 4}, "label"),
        ({"image": np.zeros((8, 8, 3), np.uint8), "label": "cat"}, "label"),
        ({"image": np.zeros((8, 8, 3), np.uint8)}, "label"),
        ({"label": 0}, "no image"),
        ({"text": b"a README beside the photos"}, r"no image \(got \['text'\]\).*beside text files they are left out"),
        ({"image": np.zeros((8, 7, 3), np.uint8), "label": 0}, "task.resize=crop"),
        ({"image": np.zeros((8, 8, 3), np.uint8), "label": 0, "class_names": ("a", "b")}, r"2 classes, the task 4"),
    ],
)
def test_a_wrong_record_is_refused_by_its_key(fields, part):
    with pytest.raises(DataError, match=part) as raised:
        list(build().encode([Record("image-7", fields)], "train"))
    assert raised.value.where == "image-7"


# -- resize ----------------------------------------------------------------------------------------------------------


def cropped(image, **options):
    (block,) = build(resize="crop", **options).encode([Record("image-7", {"image": image, "label": 0})], "train")
    return block.arrays["image"][0]


@pytest.mark.parametrize(("height", "width"), [(8, 14), (13, 8)])
def test_crop_keeps_the_middle_of_an_image_whose_shorter_side_fits(height, width):
    image = RNG.integers(0, 256, (height, width, 3), dtype=np.uint8)
    top, left = (height - 8) // 2, (width - 8) // 2
    if (height - 8) % 2 == 0 and (width - 8) % 2 == 0:
        assert np.array_equal(cropped(image), image[top : top + 8, left : left + 8])
    else:  # the middle lies between two pixels
        two = image[top : top + 9, left : left + 9].astype(int)
        mean = (two[: height - 2 * top - 1, :8] + two[1:, :8]) / 2
        assert np.abs(cropped(image) - mean).max() <= 1


def test_crop_scales_the_middle_square_bilinearly_in_both_directions():
    steps = np.repeat(np.repeat(np.arange(64, dtype=np.uint8).reshape(8, 8) * 4, 3, axis=0), 3, axis=1)
    padded = np.pad(steps, ((0, 0), (6, 6)))
    image = np.repeat(padded[..., np.newaxis], 3, axis=2)
    pillow = Image.fromarray(image).resize((8, 8), Image.Resampling.BILINEAR, box=(6, 0, 30, 24))
    assert np.array_equal(cropped(image), np.asarray(pillow))
    up = cropped(np.full((2, 3, 3), 77, np.uint8))
    assert up.shape == (8, 8, 3) and (up == 77).all()


def test_crop_leaves_an_image_that_fits_as_it_is():
    (item,) = records(1)
    assert np.array_equal(cropped(item.fields["image"]), item.fields["image"])


@pytest.mark.parametrize("num_channels", [1, 3])
@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA"])
def test_crop_makes_the_colours_that_the_task_has(num_channels, mode):
    shape = (8, 8) if mode == "L" else (8, 8, len(mode))
    image = RNG.integers(0, 256, shape, dtype=np.uint8)
    expected = np.asarray(Image.fromarray(image).convert("L" if num_channels == 1 else "RGB"))
    found = cropped(image, num_channels=num_channels)
    assert found.shape == (8, 8, num_channels) and np.array_equal(found.squeeze(), expected)
    if mode == "L":
        assert np.array_equal(cropped(image[..., np.newaxis], num_channels=num_channels), found)


@pytest.mark.parametrize("shape", [(8,), (8, 8, 5), (8, 0, 3), (8, 8, 3, 1), ()])
def test_crop_refuses_what_is_no_image(shape):
    with pytest.raises(DataError, match=r"image-7: not an image \[height, width\]"):
        cropped(np.zeros(shape, np.uint8))


def test_crop_still_refuses_pixels_that_are_no_bytes():
    assert (cropped(np.full((9, 9, 3), 3.0)) == 3).all()
    with pytest.raises(DataError, match="whole numbers"):
        cropped(np.full((9, 9, 3), 0.5))


def test_crop_is_among_the_settings_and_nothing_is_without_it():
    assert build().settings() == {"task": "image_classification", "image_shape": [8, 8, 3], "num_classes": 4}
    assert build(resize="none").settings() == build().settings()
    assert build(resize="crop").settings() == {**build().settings(), "resize": "crop"}


def test_crop_without_pillow_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ConfigError, match=r"task\.resize: needs PIL.Image .*kftrain\[sources\]"):
        cropped(np.zeros((9, 9, 3), np.uint8))


def test_predict_fits_images_as_sharding_does():
    task = build(resize="crop")
    model, image = some_model(task), RNG.integers(0, 17, (20, 11, 4), dtype=np.uint8)
    answer = task.predict(model, pandas.DataFrame({"image": [image, cropped(image)]})).to_numpy()
    np.testing.assert_allclose(answer[0], answer[1], rtol=1e-6)


def test_pixels_are_normalised_with_fixed_figures():
    task, items = build(), records(5)
    images = task.batch(arrays_of(task, items))["image"]
    expected = np.stack([(item.fields["image"] / 16 - 0.3) / 0.35 for item in items]).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(images.numpy(), expected, atol=1e-6)


def test_loss_is_the_summed_cross_entropy_of_images_with_weight():
    task, items = build(), records(6)
    model, batch = some_model(task), task.batch(arrays_of(task, items))
    weight = torch.tensor([1.0, 0, 1, 1, 0, 1])
    kept = weight.bool()
    expected = torch.nn.functional.cross_entropy(model(batch["image"][kept]), batch["label"][kept], reduction="sum")
    assert task.loss(model(*task.inputs(batch)), batch, weight).item() == pytest.approx(expected.item(), rel=1e-5)
    assert task.count_terms(arrays_of(task, items)).tolist() == [1] * 6


def test_statistics_give_metrics_slices_and_the_confusion_table():
    task, items = build(labels=["ant", "bee", "cat", "dog"]), records(23)
    model, arrays = some_model(task), arrays_of(build(), items)
    statistics = statistics_of(task, model, arrays)
    logits = model(task.batch(arrays)["image"]).detach()
    labels = torch.tensor([item.fields["label"] for item in items])
    metrics = task.metrics({name: value.sum() for name, value in statistics.items()})
    assert metrics["accuracy"] == pytest.approx((logits.argmax(1) == labels).double().mean().item())
    assert metrics["cross_entropy"] == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)
    assert task.slice_names([item.key for item in items], statistics) == [task.labels[label] for label in labels]
    names, matrix = task.confusion(statistics)
    assert names == ["ant", "bee", "cat", "dog"] and matrix.dtype == np.int64
    for true in range(4):
        for predicted in range(4):
            assert matrix[true, predicted] == ((labels == true) & (logits.argmax(1) == predicted)).sum()
    assert task.metrics({name: value[:, None] for name, value in statistics.items()})["accuracy"].shape == (23, 1)


@pytest.mark.parametrize("form", ["arrays", "lists", "objects", "columns"])
def test_predict_gives_the_probabilities_that_evaluation_computes(form):
    task, items = build(), records(5)
    model, arrays = some_model(task), arrays_of(build(), items)
    images = [item.fields["image"] for item in items]
    columns = {
        "arrays": {"image": images},
        "lists": {"image": [image.tolist() for image in images]},
        "objects": {"image": [_as_objects(image) for image in images]},
        "columns": {f"pixel{n}": [float(image.reshape(-1)[n]) for image in images] for n in range(8 * 8 * 3)},
    }
    answer = task.predict(model, pandas.DataFrame(columns[form], index=range(10, 15)))
    assert list(answer.columns) == ["0", "1", "2", "3"] and list(answer.index) == list(range(10, 15))
    statistics = statistics_of(task, model, arrays)
    own = answer.to_numpy()[np.arange(5), arrays["label"]]
    np.testing.assert_allclose(-np.log(own), statistics["cross_entropy"], rtol=1e-4)
    assert np.array_equal(answer.to_numpy().argmax(1), statistics["prediction"])
    np.testing.assert_allclose(answer.sum(axis=1), 1, rtol=1e-5)


def _as_objects(image):
    rows = np.empty(len(image), dtype=object)
    for number, row in enumerate(image):
        rows[number] = np.empty(len(row), dtype=object)
        rows[number][:] = list(row)
    return rows


def test_predict_refuses_what_has_neither_images_nor_pixels():
    task = build()
    with pytest.raises(DataError, match="192 columns of its numbers"):
        task.predict(some_model(task), pandas.DataFrame({"a": [1]}))
    with pytest.raises(DataError, match="row 0"):
        task.predict(some_model(task), pandas.DataFrame({"image": [None]}))
    assert task.predict(some_model(task), pandas.DataFrame({"image": []})).shape == (0, 4)


def test_baselines_know_only_how_frequent_classes_are():
    baselines = build().baselines({"label": np.array([label])} for label in [0, 0, 0, 1])
    assert baselines["accuracy"] == {"most frequent class": 0.75}
    assert baselines["cross_entropy"]["class frequencies"] == pytest.approx(
        -(0.75 * np.log(0.75) + 0.25 * np.log(0.25))
    )
    assert build().baselines(iter([])) == {}


@pytest.mark.parametrize(
    "options", [{"labels": ["a", "b"]}, {"labels": ["a", "a", "b", "c"]}, {"resize": "crop", "num_channels": 4}]
)
def test_options_that_do_not_fit_are_refused(options):
    with pytest.raises(ConfigError):
        build(**options)
