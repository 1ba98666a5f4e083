"""A run whose matrices are split or whose sequences are shared, from one layout to the next, against one process."""

import numpy as np
import pytest
from helpers import jobs
from safetensors.numpy import load_file

from kftrain import config
from kftrain.core import storage
from kftrain.run import commit, documents
from kftrain.run.documents import Completion

pytestmark = pytest.mark.slow

SETTINGS = (
    *("task.attention=documents", "train.micro_batch_size=2"),
    *("evaluate.interval_steps=5", "checkpoint.keep_last=5"),
)
TENSOR = ["parallel.tensor=2"]
CONTEXT = ["parallel.context=2"]


def train(paths, resolved, processes, layout=(), after=0):
    """From a checkpoint to the end, in a layout; losses, the figures of the evaluations and the exported weights."""
    told = config.parse(resolved.to_yaml(), list(layout))
    storage.publish(paths.config, told.to_yaml())
    done = jobs.run_worker(paths, told, processes=processes)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"going on after step {after}" in done.stdout or not after
    history = storage.read_json(paths.history)
    validations = {
        point["step"]: {name: value for name, value in point.items() if name.startswith("validation")}
        for point in history
        if any("bits_per_byte" in name for name in point)
    }
    folder = storage.local_path(documents.read(Completion, paths.complete).export_uri)
    return jobs.losses(paths), validations, load_file(folder / "model.safetensors")


def go_back(paths, step):
    """The run as it was when this step was committed."""
    storage.remove(paths.complete)
    for name in commit.list_committed(paths):
        if name.step > step:
            storage.remove(storage.join(paths.checkpoints, str(name)))
    assert commit.find_last_step(paths) == step


def assert_same(found, expected):
    jobs.assert_same_curve(found[0], expected[0])
    assert found[1].keys() == expected[1].keys() == {5, 10, 15, 20}
    for step, figures in expected[1].items():
        assert found[1][step].keys() == figures.keys() and len(figures) >= 3
        for name, value in figures.items():
            assert found[1][step][name] == pytest.approx(value, rel=1e-5), (step, name)
    assert found[2].keys() == expected[2].keys()
    for name, weights in expected[2].items():
        np.testing.assert_allclose(found[2][name], weights, rtol=0, atol=2e-5, err_msg=name)


def test_a_checkpoint_of_any_layout_goes_on_in_any_other_and_the_export_is_that_of_one_process(tmp_path):
    """FSDP x tensor on four processes, from step 10 on FSDP alone on two, from step 15 on tensor alone on two."""
    paths, resolved = jobs.make_run(tmp_path, SETTINGS, "alone")
    expected = train(paths, resolved, 1)
    paths, resolved = jobs.make_run(tmp_path, SETTINGS, "split")
    assert_same(train(paths, resolved, 4, TENSOR), expected)
    go_back(paths, 10)
    assert_same(train(paths, resolved, 2, after=10), expected)
    go_back(paths, 15)
    assert_same(train(paths, resolved, 2, TENSOR, 15), expected)
    go_back(paths, 15)
    assert_same(train(paths, resolved, 4, [*TENSOR, "parallel.replicate=2"], 15), expected)


def test_the_export_of_a_vocabulary_without_equal_parts_is_that_of_one_process(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(jobs.TESTS))
    settings = (*SETTINGS, "model.kind=helpers.models.tensor:one_word_more")
    paths, resolved = jobs.make_run(tmp_path, settings, "alone")
    expected = train(paths, resolved, 1)
    (words,) = {weights.shape[0] for name, weights in expected[2].items() if "embed" in name}
    assert words % 2
    paths, resolved = jobs.make_run(tmp_path, settings, "split")
    assert_same(train(paths, resolved, 2, TENSOR), expected)


def test_a_run_whose_sequences_are_shared_is_that_of_one_process(tmp_path):
    """FSDP x context on four processes, from step 10 on FSDP alone on two, from step 15 on with context again."""
    paths, resolved = jobs.make_run(tmp_path, SETTINGS, "alone")
    expected = train(paths, resolved, 1)
    paths, resolved = jobs.make_run(tmp_path, SETTINGS, "shared")
    assert_same(train(paths, resolved, 4, CONTEXT), expected)
    go_back(paths, 10)
    assert_same(train(paths, resolved, 2, after=10), expected)
    go_back(paths, 15)
    assert_same(train(paths, resolved, 2, CONTEXT, 15), expected)
    go_back(paths, 15)
    assert_same(train(paths, resolved, 4, [*CONTEXT, *TENSOR], 15), expected)
