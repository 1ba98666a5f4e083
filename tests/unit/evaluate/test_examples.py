"""Sample predictions: which samples are shown, and what of them; the pictures are read by Pillow."""

import base64
import functools
import io

import numpy as np
import pytest
import torch
from helpers.documents import digits_config, sharded_run
from helpers.splits import open_split
from PIL import Image

from kftrain.errors import ConfigError, UserCodeError
from kftrain.evaluate import examples
from kftrain.evaluate.score import group_sums
from kftrain.models import build_model
from kftrain.tasks import Task, build_task
from kftrain.tasks.language_modeling import LanguageModeling
from kftrain.tasks.settings import TaskConfig
from kftrain.tasks.shown import format_example

nan, inf = np.nan, np.inf


@pytest.mark.parametrize(
    ("losses", "num", "spread", "worst"),
    [
        ([0.1, 0.9, 0.5, 0.9, 0.2, 0.3], 3, [0, 2, 4], [1, 3, 2]),  # of equal ones the first
        ([1.0, 1.0, 1.0, 1.0], 2, [0, 2], [0, 1]),
        ([nan, 2.0, inf, 1.0, -inf], 4, [0, 1, 2, 3], [1, 3]),  # what is not determined is never the worst
        ([0.5, 0.7], 6, [0, 1], [1, 0]),
        ([0.5, 0.7], 0, [], []),
        ([nan, nan], 1, [0], []),
    ],
)
def test_shown_are_samples_spread_over_the_data_and_those_of_the_largest_loss(losses, num, spread, worst):
    chosen = examples.choose_groups(np.array(losses), num)
    assert [group for group, is_worst in chosen if not is_worst] == spread
    assert [group for group, is_worst in chosen if is_worst] == worst


class Scores:
    """Metrics as sums."""

    loss_metric = ""

    def metrics(self, sums):
        return {"points": np.asarray(sums["points"])}


class Losses(Scores):
    loss_metric = "loss"

    def metrics(self, sums):
        return {"points": np.asarray(sums["points"]), "loss": np.asarray(sums["loss"])}


def test_the_loss_is_the_tasks_own_or_else_the_gates_metric():
    sums = {"points": np.array([1.0, 3.0]), "loss": np.array([5.0, 2.0])}

    def losses(task, metric, goal):
        return examples.losses(task, task.metrics, sums, metric, goal)

    assert losses(Losses(), "points", "maximize").tolist() == [5.0, 2.0]
    assert losses(Scores(), "points", "maximize").tolist() == [-1.0, -3.0]
    assert losses(Scores(), "points", "minimize").tolist() == [1.0, 3.0]
    assert np.isnan(losses(Scores(), "unknown", "minimize")).all()


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """An untrained model on the digits, its statistics, and what is shown of it."""
    _, config, shards = sharded_run(tmp_path_factory.mktemp("digits"))
    dataset = open_split(shards.manifest_uri, "validation")
    task = build_task(config.task)
    torch.manual_seed(0)
    model = build_model(config.model, task.model_arguments())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            model.init_weights(name, parameter, torch.default_generator)
    arrays, groups = dataset.read_range(0, dataset.num_samples)
    batch = task.batch(arrays)
    with torch.no_grad():
        statistics = {
            name: value.numpy() for name, value in task.statistics(model.eval()(*task.inputs(batch)), batch).items()
        }
    sums = group_sums(statistics, groups, dataset.num_groups)
    keys, rows = dataset.group_keys(), np.ones(dataset.num_groups, np.int64)
    chosen = examples.choose_groups(examples.losses(task, task.metrics, sums, "accuracy", "maximize"), 5)

    def collect(task=task, batch_size=32):
        device = torch.device("cpu")
        return examples.collect(
            task, task.metrics, model, dataset, sums, rows, keys, chosen, batch_size=batch_size, device=device
        )

    return task, model, arrays, statistics, keys, collect


def picture_of(example):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(example.picture))))


def test_a_digit_is_shown_with_its_picture_class_and_prediction(digits):
    task, model, arrays, statistics, keys, collect = digits
    found = collect()
    assert [example.is_worst for example in found] == [False] * 5 + [True] * 5
    with torch.no_grad():
        probabilities = model(task.batch(arrays)["image"]).double().softmax(dim=-1).numpy()
    for example in found:
        row = keys.index(example.key)
        predicted, label = probabilities[row].argmax(), arrays["label"][row]
        assert example.shown["class"] == f"{label} (p = {probabilities[row][label]:.3f})"
        assert example.shown["predicted"] == f"{predicted} (p = {probabilities[row].max():.3f})"
        assert example.metrics["cross_entropy"] == pytest.approx(-np.log(probabilities[row][label]), rel=1e-5)
        assert np.array_equal(picture_of(example), (arrays["image"][row, ..., 0] * (255 / 16)).astype(np.uint8))
    worst = np.argsort(-statistics["cross_entropy"], kind="stable")[:5]
    assert [example.key for example in found[5:]] == [keys[row] for row in worst]
    assert [example.key for example in found[:5]] == [keys[number * len(keys) // 5] for number in range(5)]


def test_a_small_batch_size_is_kept_to(digits):
    task, collect = digits[0], digits[-1]
    sizes = []

    class Counted(type(task)):
        def __init__(self):
            self.__dict__.update(task.__dict__)

        def examples(self, model, arrays, batch):
            sizes.append(len(arrays["label"]))
            return [{"n": np.int64(3), "p": 0.1234567891} for _ in arrays["label"]]

    assert collect(Counted(), batch_size=4)[0].shown == {"n": "3", "p": "0.123457"}
    assert max(sizes) == 4 and sum(sizes) >= 5


class Answers:
    decodes = False

    def __init__(self, answer):
        self.answer = answer

    def batch(self, arrays):
        return {}

    def metrics(self, sums):
        return {"count": np.asarray(sums["count"])}

    def examples(self, model, arrays, batch):
        return self.answer(len(arrays["label"]))


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (lambda n: [{}] * (n - 1), "must return a mapping for each of"),
        (lambda n: ["text"] * n, "must return a mapping for each of"),
        (lambda n: [{"x": np.zeros((4, 4))}] * n, "a picture must be uint8"),
        (lambda n: [{"x": np.zeros((0, 4), np.uint8)}] * n, "a picture must be uint8"),
        (lambda n: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_what_a_task_must_not_answer_is_refused_with_its_place(digits, answer, problem):
    with pytest.raises(UserCodeError, match=problem) as raised:
        digits[-1](Answers(answer))
    assert raised.value.where == "task.examples"


def test_a_task_that_shows_nothing_has_its_metrics_shown(digits):
    task, collect = digits[0], digits[-1]
    quiet = Answers(None)
    quiet.metrics, quiet.examples = task.metrics, functools.partial(Task.examples, task)
    found = collect(quiet)
    assert all(not example.shown and not example.picture and "accuracy" in example.metrics for example in found)


@pytest.mark.parametrize("shape", [(8, 8), (300, 200, 3), (1, 500), (500, 1, 3), (49, 48)])
def test_a_picture_is_made_small_by_the_means_of_squares(shape):
    picture = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    found = format_example({"it": picture, "name": "n" * 999}, "task.examples")
    read = np.asarray(Image.open(io.BytesIO(base64.b64decode(found["picture"]))))
    assert max(read.shape[:2]) <= 48 and len(found["shown"]["name"]) == 200
    side = -(-max(shape[:2]) // 48)
    assert np.array_equal(read[0, 0], picture[:side, :side].mean(axis=(0, 1)).astype(np.uint8))


class NextByte(torch.nn.Module):
    """Says that each byte is followed by the next one in the alphabet."""

    def forward(self, tokens):
        return torch.nn.functional.one_hot((tokens + 1).clamp(max=319), 320).float()


@pytest.mark.parametrize("sequence_length", [1, 2, 8, 16])
def test_the_model_writes_on_from_the_middle_of_a_text(sequence_length):
    task = LanguageModeling(sequence_length=sequence_length)
    arrays = {"tokens": task.rows({"text": b"abcdXYZabcd"})["tokens"][:1]}
    (shown,) = task.examples(NextByte(), arrays, task.batch(arrays))
    written = shown["the model writes"]
    assert (shown["text"] + shown["goes on"]) == "abcdXYZabcd"[: len(shown["text"] + shown["goes on"])]
    assert len(written) == len(shown["goes on"]) > 0
    if shown["text"]:
        first = ord(shown["text"][-1]) + 1
        assert written == "".join(chr(first + number) for number in range(len(written)))


def test_a_text_of_one_byte_or_not_of_text_is_shown_all_the_same():
    task = LanguageModeling(sequence_length=8)
    rows = np.array([[256, 97, *[257] * 7], [256, *[255] * 8]], np.uint16)
    one, odd = task.examples(NextByte(), {"tokens": rows}, task.batch({"tokens": rows}))
    assert one["goes on"] == "a" and one["text"] == "" and len(one["the model writes"]) == 1
    assert set(odd["text"]) == {"\ufffd"}


def test_what_a_task_declares_is_text(monkeypatch):
    monkeypatch.setattr(LanguageModeling, "loss_unit", 3)
    with pytest.raises(ConfigError, match="loss_unit must be text"):
        build_task(TaskConfig(kind="language_modeling"))


def test_the_number_of_examples_is_limited(tmp_path):
    with pytest.raises(ConfigError, match=r"evaluate\.num_examples"):
        digits_config(tmp_path, "evaluate.num_examples=13")
