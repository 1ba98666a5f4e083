"""What people pass to `predict` of a loaded model, and that all of it means the same."""

import numpy as np
import pandas
import pytest
import torch

from kftrain.errors import DataError
from kftrain.models import build_model
from kftrain.models.settings import ModelConfig
from kftrain.registry.pyfunc_loader import ExportedModel
from kftrain.tasks.image_classification import ImageClassification
from kftrain.tasks.language_modeling import LanguageModeling

TEXTS = ["one text", "another, longer text"]
IMAGES = np.arange(2 * 4 * 4).reshape(2, 4, 4)


def exported(task, **options):
    torch.manual_seed(0)
    return ExportedModel(build_model(ModelConfig(**options), task.model_arguments()).eval(), task)


@pytest.fixture(scope="module")
def language_model():
    return exported(LanguageModeling(sequence_length=8), kind="transformer", dim=8, num_layers=1, num_heads=2)


@pytest.fixture(scope="module")
def classifier():
    task = ImageClassification(image_size=4, num_classes=3, max_value=32)
    return exported(task, kind="vision_transformer", dim=8, num_layers=1, num_heads=2)


@pytest.mark.parametrize(
    "given",
    [
        TEXTS,
        tuple(TEXTS),
        np.array(TEXTS),
        np.array(TEXTS, dtype=object),
        pandas.Series(TEXTS),
        pandas.Series(TEXTS, name="body"),
        {"text": TEXTS},
        [{"text": text} for text in TEXTS],
        [text.encode() for text in TEXTS],
        pandas.DataFrame({"text": TEXTS, "more": [1, 2]}),
    ],
)
def test_texts_are_scored_however_they_are_passed(language_model, given):
    answer = language_model.predict(given)
    assert answer["num_bytes"].tolist() == [len(text) for text in TEXTS]
    alone = [float(language_model.predict(text)["bits_per_byte"].iloc[0]) for text in TEXTS]
    np.testing.assert_allclose(answer["bits_per_byte"], alone, rtol=1e-6)


@pytest.mark.parametrize(
    "given",
    [
        IMAGES,
        IMAGES[..., np.newaxis],
        list(IMAGES),
        IMAGES.tolist(),
        IMAGES.reshape(2, 16),
        IMAGES.reshape(2, 16).tolist(),
        pandas.Series(list(IMAGES)),
        {"image": list(IMAGES)},
        [{"image": image} for image in IMAGES],
        pandas.DataFrame(IMAGES.reshape(2, 16)),
    ],
)
def test_images_are_classified_however_they_are_passed(classifier, given):
    expected = classifier.predict(pandas.DataFrame({"image": list(IMAGES)}))
    np.testing.assert_allclose(classifier.predict(given), expected, rtol=1e-6)


class Numbers:
    """A task of a user, which looks at values and not at names."""

    input_column = None

    def predict(self, model, inputs):
        return pandas.DataFrame({"sum": inputs.sum(axis=1)}, index=inputs.index)


@pytest.mark.parametrize("given", [[[1, 2], [3, 4]], np.array([[1, 2], [3, 4]]), {"a": [1, 3], "b": [2, 4]}])
def test_a_task_without_a_column_of_its_own_gets_the_table(given):
    assert ExportedModel(None, Numbers()).predict(given)["sum"].tolist() == [3, 7]
    assert ExportedModel(None, Numbers()).predict([1, 2])["sum"].tolist() == [1, 2]


def test_rows_keep_their_index(language_model):
    assert language_model.predict(pandas.Series(TEXTS, index=["x", "y"])).index.tolist() == ["x", "y"]


@pytest.mark.parametrize("given", [[], np.array([], dtype=object), pandas.Series([], dtype=object)])
def test_nothing_is_answered_by_nothing(language_model, given):
    assert len(language_model.predict(given)) == 0


@pytest.mark.parametrize(
    "given",
    [None, 5, 2.5, object(), {1, 2}, iter(TEXTS), np.array(3), {"text": "no list"}, {"text": ["a"], "b": ["c", "d"]}],
)
def test_what_cannot_be_understood_is_said(language_model, given):
    with pytest.raises(DataError, match="predict: the input cannot be understood") as caught:
        language_model.predict(given)
    assert len(caught.value.line) < 300


@pytest.mark.parametrize("given", [[1, 2], [None], [["a", "b"]], IMAGES.reshape(2, 16), {"body": TEXTS}, IMAGES])
def test_what_is_no_text_is_refused_by_the_task(language_model, given):
    with pytest.raises(DataError):
        language_model.predict(given)


@pytest.mark.parametrize("given", [TEXTS, [1], IMAGES[0], IMAGES[:, :3], {"pixels": [1]}, [[1, 2], [3]]])
def test_what_is_no_image_is_refused_by_the_task(classifier, given):
    with pytest.raises(DataError):
        classifier.predict(given)
