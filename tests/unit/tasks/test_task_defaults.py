"""What a task need not say: the defaults of the base class, and of Regression and Classification."""

import numpy as np
import pandas
import pytest
import torch
from torch import nn

from kftrain.data.schema import Field, Record, SampleSchema
from kftrain.errors import DataError
from kftrain.models import ModelOutput
from kftrain.tasks import Classification, Regression, Task, build_task
from kftrain.tasks.settings import TaskConfig

VALUES = np.random.default_rng(0).normal(size=(5, 3))


class Own(Task):
    """The least that a task can be."""

    targets = ("y",)

    def __init__(self, *, length: int = 3, unit: str = "m") -> None:
        self.length = length

    def schema(self):
        fields = Field("x", "float32", (self.length,)), Field("count", "uint16"), Field("y", "int8")
        return SampleSchema(fields)

    def loss(self, output, batch, weight):
        return ((output - batch["y"]) * weight).sum()

    def statistics(self, output, batch):
        return {"sum": output.double()}

    def metrics(self, sums):
        return {"sum": np.asarray(sums["sum"])}


class Tabular(Classification):
    def schema(self):
        return SampleSchema((Field("x", "float32", (3,)), Field("label", "uint8")))


class Line(Regression):
    def schema(self):
        return SampleSchema((Field("x", "float64", (3,)), Field("target", "float32")))


class Sum(nn.Module):
    """`x` and `count` to one number each."""

    def __init__(self, width=1):
        super().__init__()
        self.width = width
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x, count=0):
        total = (x.sum(-1) + count) * self.scale
        output = total if self.width == 1 else torch.stack([total * n for n in range(self.width)], 1)
        return ModelOutput(output, auxiliary=total)


def record(**fields):
    return Record("r", {"x": [1, 2, 3], "count": 4, "y": -5, **fields})


def test_a_record_becomes_a_block_of_one_row_in_the_formats_of_the_schema():
    (block,) = Own().encode(iter([record(other="text")]), "train")
    assert block.key == "r" and block.num_rows == 1 and list(block.arrays) == ["x", "count", "y"]
    for field in Own().schema().fields:
        assert block.arrays[field.name].dtype == field.dtype and block.arrays[field.name].shape[1:] == field.shape
    assert block.arrays["x"].tolist() == [[1, 2, 3]] and block.arrays["y"].tolist() == [-5]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"x": None}, "has no field 'x'"),
        ({"x": [1, 2]}, r"'x' is not of shape \[3\] \(got \[2\]\)"),
        ({"x": [[1, 2, 3]]}, "not of shape"),
        ({"x": [[1], [2, 3]]}, "not made of numbers"),
        ({"x": "abc"}, "not made of numbers"),
        ({"x": [1, 2, np.nan]}, "not finite as float32"),
        ({"x": [1, 2, 1e60]}, "not finite as float32"),
        ({"count": -1}, "not uint16"),
        ({"count": 0.5}, "not uint16"),
        ({"y": 128}, "not int8"),
    ],
)
def test_what_the_schema_would_change_is_refused_by_the_records_key(fields, problem):
    with pytest.raises(DataError, match=problem) as raised:
        list(Own().encode(iter([record(**fields)]), "train"))
    assert raised.value.where == "r"


def test_a_batch_has_all_fields_and_the_model_gets_those_that_are_no_targets():
    (block,) = Own().encode(iter([record()]), "train")
    batch = Own().batch(block.arrays)
    assert {name: tensor.dtype for name, tensor in batch.items()} == {
        "x": torch.float32,
        "count": torch.int64,
        "y": torch.int8,
    }
    assert [tensor.tolist() for tensor in Own().inputs(batch)] == [[[1, 2, 3]], [4]]
    assert Own().count_terms(block.arrays).tolist() == [1]


def test_settings_are_the_options_with_their_defaults():
    def built(name, **given):
        return build_task(TaskConfig(kind=f"{__name__}:{name}", **given)).settings()

    assert built("Own", length=4) == {"length": 4, "unit": "m"}
    assert built("Own") == built("Own", length=3) != built("Own", unit="cm")
    assert built("Line", target_mean=3) == {} and built("Tabular", num_classes=2, labels=["a", "b"]) == {
        "num_classes": 2
    }


def test_nothing_is_sliced_compared_or_shown():
    task = Own()
    assert task.slice_names(["a", "b"], {}) == ["all", "all"] and task.confusion({}) is None
    assert task.baselines([]) == {} and task.model_arguments() == {}
    assert task.examples(Sum(), {"x": np.zeros((2, 3))}, {}) == [{}, {}]


def test_predict_is_what_the_model_answers_to_the_columns_row_by_row():
    frame = pandas.DataFrame({"x": list(VALUES), "count": range(5), "y": "unknown", "more": 1}, index=list("abcde"))
    answer = Own().predict(Sum(), frame)
    assert list(answer.columns) == ["output"] and list(answer.index) == list("abcde")
    np.testing.assert_allclose(answer["output"], VALUES.sum(1) + np.arange(5), rtol=1e-6)
    assert list(Own().predict(Sum(2), frame).columns) == ["output_0", "output_1"]
    assert Own().predict(Sum(2), frame[:0]).shape == (0, 2)
    with pytest.raises(DataError, match=r"needs a column 'count' \(got \['x'\]\)"):
        Own().predict(Sum(), frame[["x", "y"]])
    with pytest.raises(DataError, match="row c: field 'x' is not of shape"):
        Own().predict(Sum(), frame.assign(x=[[1, 2, 3]] * 2 + [[1]] * 3))


def test_batches_of_predict_change_nothing():
    class Small(Own):
        predict_batch_rows = 2

    frame = pandas.DataFrame({"x": list(VALUES), "count": range(5)})
    pandas.testing.assert_frame_equal(Small().predict(Sum(), frame), Own().predict(Sum(), frame))


def test_a_regression_is_in_the_targets_unit_and_takes_its_one_field_as_columns():
    task = Line(target_mean=10.0, target_std=2.0)
    answer = task.predict(Sum(), pandas.DataFrame(VALUES))
    np.testing.assert_allclose(answer["prediction"], VALUES.sum(1) * 2 + 10)
    arrays = {"x": VALUES, "target": np.arange(5, dtype=np.float32)}
    batch = task.batch(arrays)
    output = Sum()(*task.inputs(batch)).output
    errors = VALUES.sum(1) * 2 + 10 - np.arange(5)
    weight = torch.tensor([1.0, 0, 1, 1, 1])
    assert task.loss(output.unsqueeze(1), batch, weight).item() == pytest.approx(
        (np.square(errors / 2) * weight.numpy()).sum(), rel=1e-5
    )
    sums = {name: value.sum().detach().numpy() for name, value in task.statistics(output, batch).items()}
    assert task.metrics(sums)["rmse"] == pytest.approx(np.sqrt(np.mean(errors**2)))
    assert task.metrics(sums)["r2"] == pytest.approx(1 - np.mean(errors**2) / np.arange(5).var())
    assert task.baselines({"target": np.array([n], np.float32)} for n in range(5))["rmse"] == {
        "mean of the targets": pytest.approx(np.arange(5).std())
    }
    with torch.no_grad():
        shown = task.examples(Sum(), arrays, batch)
    assert [each["target"] for each in shown] == list(range(5))
    assert [each["prediction"] for each in shown] == pytest.approx(answer["prediction"].tolist())


def test_an_output_that_would_be_stretched_over_the_targets_is_refused():
    batch = Line().batch({"x": VALUES, "target": np.zeros(5, np.float32)})
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        Line().loss(torch.zeros(5, 5), batch, torch.ones(5))


def test_a_classification_of_any_field_gives_probabilities_by_name():
    task = Tabular(num_classes=4, labels=list("abcd"))
    answer = task.predict(Sum(4), pandas.DataFrame({"x": list(VALUES)}))
    logits = VALUES.sum(1)[:, np.newaxis] * np.arange(4)
    expected = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert list(answer.columns) == list("abcd")
    np.testing.assert_allclose(answer.to_numpy(), expected, rtol=1e-5)
    batch = task.batch({"x": VALUES.astype(np.float32), "label": np.array([0, 1, 2, 3, 3], np.uint8)})
    found = task.loss(torch.from_numpy(logits), batch, torch.tensor([1.0, 1, 0, 1, 1]))
    rows, labels = [0, 1, 3, 4], [0, 1, 3, 3]
    assert found.item() == pytest.approx(-np.log(expected[rows, labels]).sum(), rel=1e-5)
    with pytest.raises(DataError, match="r: the label is not one of 0 to 3"):
        list(task.encode([record(label=4)], "train"))
