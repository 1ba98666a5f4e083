"""The example of docs/own-task.md and docs/own-model.md does what the pages say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch

from kftrain import config
from kftrain.models import build_model
from kftrain.sharding.sources.resolve_source import choose_split, resolve
from kftrain.tasks import build_task

REPOSITORY = Path(__file__).parents[3]
EXAMPLE = REPOSITORY / "examples" / "own_task"


@pytest.fixture
def loaded(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE)
    return config.load(EXAMPLE / "diabetes.yaml")


def encoded(loaded, task):
    """Arrays of each split, as sharding makes them."""
    rows = {"train": [], "validation": []}
    for record in resolve(loaded.data).records():
        split = choose_split(record, loaded.data.validation_fraction)
        rows[split] += [block.arrays for block in task.encode([record], split)]
    return {
        split: {name: np.concatenate([arrays[name] for arrays in parts]) for name in parts[0]}
        for split, parts in rows.items()
    }


def train(model, task, arrays, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batch, weight = task.batch(arrays), torch.ones(len(arrays["target"]))
    for _ in range(steps):
        optimizer.zero_grad()
        (task.loss(model(*task.inputs(batch)), batch, weight) / task.count_terms(arrays).sum()).backward()
        optimizer.step()


def test_the_example_learns_and_predicts_what_evaluation_computes(loaded):
    task = build_task(loaded.task)
    torch.manual_seed(0)
    model = build_model(loaded.model, task.model_arguments())
    arrays = encoded(loaded, task)
    train(model, task, arrays["train"], steps=150)
    held_out = arrays["validation"]
    answer = task.predict(model, pandas.DataFrame(held_out["features"]))["prediction"].to_numpy()
    batch = task.batch(held_out)
    with torch.no_grad():
        statistics = {
            name: value.numpy() for name, value in task.statistics(model.eval()(batch["features"]), batch).items()
        }
    metrics = task.metrics({name: value.sum() for name, value in statistics.items()})
    errors = answer - held_out["target"]
    assert metrics["rmse"] == pytest.approx(np.sqrt(np.mean(errors**2)))
    assert metrics["r2"] == pytest.approx(1 - np.mean(errors**2) / held_out["target"].var(), rel=1e-5)
    assert metrics["r2"] > 0.35
    assert len(model.blocks()) == loaded.model.options()["num_layers"]
    slices = np.array(task.slice_names([""] * len(errors), statistics))
    assert held_out["target"][slices == "mild"].max() < 152 <= held_out["target"][slices == "severe"].min()
    assert (loaded.registry.metric, loaded.registry.goal) == ("rmse", "minimize") and "rmse" in metrics


def test_the_exported_configuration_builds_a_model_of_the_same_shapes(loaded):
    from diabetes.model import Perceptron

    model = Perceptron(num_features=3, dim=5, num_layers=4)
    again = Perceptron(**model.export_config())
    assert [each.shape for each in again.parameters()] == [each.shape for each in model.parameters()]


def test_the_example_is_scaled_as_its_configuration_says(loaded):
    task = build_task(loaded.task)
    rows = encoded(loaded, task)
    features, targets = (np.concatenate([rows[split][name] for split in rows]) for name in ("features", "target"))
    assert np.allclose(features.mean(axis=0), 0, atol=1e-4) and np.allclose(features.std(axis=0), 1, atol=1e-4)
    assert targets.mean() == pytest.approx(task.target_mean, abs=1) and targets.std() == pytest.approx(
        task.target_std, abs=1
    )


def test_the_digits_are_scaled_as_their_configuration_says():
    loaded = config.load(REPOSITORY / "examples" / "digits.yaml")
    task = build_task(loaded.task)
    blocks = [block.arrays for block in task.encode(resolve(loaded.data).records(), "train")]
    batch = task.batch({name: np.concatenate([arrays[name] for arrays in blocks]) for name in blocks[0]})
    assert abs(batch["image"].mean()) < 0.05 and abs(batch["image"].std() - 1) < 0.05
    assert batch["label"].unique().tolist() == list(range(loaded.task.options()["num_classes"]))


WITHOUT_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, *_):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("there is no torch here", name="torch")

sys.meta_path.insert(0, NoTorch())
from kftrain import config
from kftrain.sharding.sources.resolve_source import resolve
from kftrain.tasks import build_task
loaded = config.load("diabetes.yaml")
task = build_task(loaded.task)
records = list(resolve(loaded.data).records())
blocks = list(task.encode(records, "train"))
assert len(blocks) == len({block.key for block in blocks}) == 442
assert 70 < task.baselines(block.arrays for block in blocks)["rmse"]["mean of the targets"] < 80
"""


def test_the_example_is_sharded_without_torch():
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH], check=True, cwd=EXAMPLE, env=_with_path())


def test_the_page_shows_the_files_as_they_are():
    page = "".join((REPOSITORY / "docs" / name).read_text() for name in ("own-task.md", "own-model.md"))
    base = REPOSITORY / "kftrain" / "tasks" / "regression.py"
    files = [path.read_text() for path in (*EXAMPLE.glob("*.yaml"), *EXAMPLE.glob("diabetes/*.py"), base)]
    blocks = re.findall(r"```(?:python|yaml)\n(.*?)```", page, flags=re.DOTALL)
    assert len(blocks) >= 4
    for block in blocks:
        if "def tensor_plan" in block:  # of a transformer; the example has no matrices worth splitting
            continue
        assert any(block in content for content in files), block


def test_the_task_is_what_is_particular_to_it():
    assert len((EXAMPLE / "diabetes" / "task.py").read_text().splitlines()) <= 40


@pytest.mark.parametrize(("name", "goal"), [("stdlib-lm", "minimize"), ("digits", "maximize")])
def test_the_built_in_examples_build(name, goal):
    loaded = config.load(REPOSITORY / "examples" / f"{name}.yaml")
    task = build_task(loaded.task)
    task.learn([_first_record(loaded)])
    model = build_model(loaded.model, task.model_arguments())
    (block,) = task.encode([_first_record(loaded)], "validation")
    arrays = task.rows({name: rows[0] for name, rows in block.arrays.items()}) or block.arrays
    batch, weight = task.batch(arrays), torch.ones(len(next(iter(arrays.values()))))
    with torch.no_grad():
        output = model(*task.inputs(batch))
        assert torch.isfinite(task.loss(output, batch, weight))
        sums = {name: value.sum().numpy() for name, value in task.statistics(output, batch).items()}
    assert loaded.registry.metric in task.metrics(sums) and loaded.registry.goal == goal


def _first_record(loaded):
    return next(iter(resolve(loaded.data).records()))


def _with_path():
    return {**os.environ, "PYTHONPATH": f"{EXAMPLE}:{REPOSITORY}"}


def test_the_example_shows_targets_and_predictions(loaded):
    task = build_task(loaded.task)
    model = build_model(loaded.model, task.model_arguments())
    held_out = {name: rows[:3] for name, rows in encoded(loaded, task)["validation"].items()}
    with torch.no_grad():
        shown = task.examples(model.eval(), held_out, task.batch(held_out))
    answer = task.predict(model, pandas.DataFrame(held_out["features"]))["prediction"]
    assert [each["target"] for each in shown] == held_out["target"].tolist()
    assert [each["prediction"] for each in shown] == pytest.approx(answer.tolist())
