"""Training against a bare loop that shares no code with it: own reading of shards, AdamW, schedule and clipping."""

import contextlib
import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from helpers import in_process, jobs
from helpers.models import regression
from safetensors.torch import load_file

from kftrain.core import storage
from kftrain.errors import CheckpointError, ConfigError, DivergedError, Preempted
from kftrain.process.stop_request import StopRequest
from kftrain.run import documents
from kftrain.run.documents import Completion

STEPS, BATCH, MICRO = 50, 10, 4

TEXT = (
    regression.BASE
    + regression.SCHEDULED
    + """
run: {name: parity, seed: 3}
train: {steps: 50, global_batch_size: 10, micro_batch_size: 4, log_interval_steps: 1, gradient_clip_norm: 3.0}
checkpoint: {interval_steps: 20}
"""
)


@pytest.fixture
def seen(tmp_path, monkeypatch):
    """Where the task writes down what it is given."""
    folder = tmp_path / "seen"
    folder.mkdir()
    monkeypatch.setenv(regression.SEEN_ENV, str(folder))
    return folder


def initial_model(resolved, **options):
    torch.manual_seed(resolved.run.seed)
    return regression.Network(**options)


def bare_loop(paths, resolved):
    uri = storage.read_json(paths.shards)["manifest_uri"]
    return regression.BareLoop(
        initial_model(resolved),
        regression.read_split(uri, "train"),
        steps=resolved.train.steps,
        peak=0.02,
        warmup=5,
        floor=0.2,
        clip=3.0,
        betas=(0.8, 0.9),
        epsilon=1e-2,
        decay=0.3,
    )


def steps_of(folder, num_steps=STEPS):
    """The ids of each step, as lists of what one process took at a time."""
    ranks = [losses[-num_steps * (len(losses) // num_steps) :] for losses in regression.seen_ids(folder)]
    per_step = len(ranks[0]) // num_steps
    assert per_step == math.ceil(math.ceil(BATCH / len(ranks)) / MICRO), "what the probe saw does not count"
    return [[part for losses in ranks for part in losses[s * per_step : (s + 1) * per_step]] for s in range(num_steps)]


def exported(paths):
    uri = documents.read(Completion, paths.complete).export_uri
    return load_file(storage.local_path(uri) / "model.safetensors")


def based_on(tmp_path, monkeypatch, steps=7):
    """A trained run whose weights another one starts with, and the overrides that say so."""
    base, resolved = jobs.prepare(tmp_path, TEXT, [f"train.steps={steps}"], "base")
    in_process.train(base, resolved, monkeypatch)
    for file in Path(os.environ.get(regression.SEEN_ENV, "nowhere")).glob("*"):
        file.unlink()
    found = documents.read(Completion, base.complete)
    weights = {"asked": "x/y", "origin": "y", "export_uri": found.export_uri, "export_digest": found.export_digest}
    return base, ["train.from=x/y", f"train.initial_weights={json.dumps(weights)}", "run.seed=11", "train.steps=20"]


def continued_loop(base, paths, resolved):
    """A bare loop with the weights of a run that is complete, and a new optimizer."""
    loop = bare_loop(paths, resolved)
    loop.model.load_state_dict(exported(base))
    return loop


def assert_parity(loop, paths, weight_tolerance=1e-5):
    """Every recorded number of every step to 1e-5, and every weight at the end."""
    history = storage.read_json(paths.history)
    assert [point["step"] for point in history] == [point["step"] for point in loop.points]
    for ours, theirs in zip(history, loop.points, strict=True):
        for name, value in theirs.items():
            if math.isfinite(value):
                assert ours[name] == pytest.approx(value, rel=1e-5), (theirs["step"], name)
            else:
                assert name not in ours
    tensors = exported(paths)
    for name, parameter in loop.model.named_parameters():
        torch.testing.assert_close(tensors[name], parameter.detach(), rtol=weight_tolerance, atol=weight_tolerance / 10)


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_fifty_steps_are_those_of_a_bare_loop(tmp_path, monkeypatch, seen, strategy):
    paths, resolved = jobs.prepare(tmp_path, TEXT, [f"parallel.strategy={strategy}", "precision.compute=fp32"])
    in_process.train(paths, resolved, monkeypatch)
    loop = bare_loop(paths, resolved)
    steps = steps_of(seen)
    for step, ids in enumerate(steps):
        loop.step(step, ids)
    assert_parity(loop, paths)
    clipped = sum(point["gradient_norm"] > 3.0 for point in loop.points)
    assert 5 < clipped < 45, "the clip must act on some steps and not on others"
    assert loop.points[-1]["loss"] < 0.2 * loop.points[0]["loss"]
    flat = [number for ids in steps for part in ids for number in part]
    num_samples = len(loop.row_of)
    assert sorted(flat[:num_samples]) == sorted(loop.row_of), "an epoch has each sample once"


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_steps_in_bf16_are_those_of_a_bare_loop(tmp_path, monkeypatch, seen, strategy):
    """Twelve: later an error of 1e-8 in a weight may have flipped a rounding of bf16, on either side."""
    overrides = [f"parallel.strategy={strategy}", "precision.compute=bf16", "train.steps=12"]
    paths, resolved = jobs.prepare(tmp_path, TEXT, overrides)
    in_process.train(paths, resolved, monkeypatch)
    loop = bare_loop(paths, resolved)
    for step, ids in enumerate(steps_of(seen, num_steps=12)):
        loop.step(step, ids, half=True)
    assert_parity(loop, paths, weight_tolerance=2e-3)  # a rounding of a gradient is 4e-3 of it


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_two_processes_take_the_steps_of_a_bare_loop(tmp_path, seen, strategy):
    paths, resolved = jobs.prepare(tmp_path, TEXT, [f"parallel.strategy={strategy}"])
    done = jobs.run_worker(paths, resolved, processes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    loop = bare_loop(paths, resolved)
    for step, ids in enumerate(steps_of(seen)):
        loop.step(step, ids)
    assert_parity(loop, paths)


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_a_continued_training_is_a_bare_loop_with_those_weights(tmp_path, monkeypatch, seen, strategy):
    base, overrides = based_on(tmp_path, monkeypatch)
    paths, resolved = jobs.prepare(tmp_path, TEXT, [*overrides, f"parallel.strategy={strategy}"])
    in_process.train(paths, resolved, monkeypatch)
    loop = continued_loop(base, paths, resolved)
    for step, ids in enumerate(steps_of(seen, num_steps=20)):
        loop.step(step, ids)
    assert_parity(loop, paths)
    scratch, resolved = jobs.prepare(tmp_path, TEXT, ["run.seed=11", "train.steps=20"], "scratch")
    in_process.train(scratch, resolved, monkeypatch)
    assert jobs.losses(scratch)[1] > 1.5 * jobs.losses(paths)[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "layout"),
    [
        (2, ["parallel.strategy=fsdp"]),
        (2, ["parallel.strategy=ddp"]),
        (4, ["parallel.strategy=fsdp", "parallel.replicate=2"]),
    ],
)
def test_a_continued_training_in_any_layout_is_a_bare_loop_with_those_weights(
    tmp_path, monkeypatch, seen, processes, layout
):
    base, overrides = based_on(tmp_path, monkeypatch)
    paths, resolved = jobs.prepare(tmp_path, TEXT, [*overrides, *layout])
    done = jobs.run_worker(paths, resolved, processes=processes)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("starting with the weights of y: ") == 1
    loop = continued_loop(base, paths, resolved)
    for step, ids in enumerate(steps_of(seen, num_steps=20)):
        loop.step(step, ids)
    assert_parity(loop, paths)


def test_a_resume_loads_the_checkpoint_and_asks_for_the_first_weights_no_more(tmp_path, monkeypatch):
    base, overrides = based_on(tmp_path, monkeypatch)
    straight, resolved = jobs.prepare(tmp_path, TEXT, overrides, "straight")
    in_process.train(straight, resolved, monkeypatch)
    stopped, _ = jobs.prepare(tmp_path, TEXT, overrides, "stopped")
    with contextlib.suppress(Preempted):
        in_process.train(stopped, resolved, monkeypatch, StopAt(5))
        pytest.fail("was not stopped")
    shutil.rmtree(storage.local_path(base.uri) / "export")
    in_process.train(stopped, resolved, monkeypatch)
    assert jobs.losses(stopped) == jobs.losses(straight)
    for name, tensor in exported(straight).items():
        assert torch.equal(exported(stopped)[name], tensor), name


def test_another_model_than_the_one_of_the_weights_is_refused_by_the_name_of_a_tensor(tmp_path, monkeypatch):
    base, overrides = based_on(tmp_path, monkeypatch, steps=2)
    paths, resolved = jobs.prepare(tmp_path, TEXT, [*overrides, "model.dim=8"])
    with pytest.raises(ConfigError, match=r"not the one of y: enter.weight is \[8, 6\], and \[16, 6\] there"):
        in_process.train(paths, resolved, monkeypatch)
    file = storage.local_path(documents.read(Completion, base.complete).export_uri) / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.chmod(0o644)
    file.write_bytes(content)
    paths, resolved = jobs.prepare(tmp_path, TEXT, overrides, "damaged")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        in_process.train(paths, resolved, monkeypatch)
    elsewhere = jobs.prepare(tmp_path / "other", TEXT, overrides)
    with pytest.raises(ConfigError, match="does not lie below a storage root that may be read here"):
        in_process.train(*elsewhere, monkeypatch)


def test_a_step_that_is_not_finite_is_skipped_as_a_bare_loop_skips_it(tmp_path, monkeypatch, seen):
    bad_steps = (7, 8, 30)
    losses = "+".join(str(3 * step + 1) for step in bad_steps)  # the first of the three micro batches of a step
    overrides = [f"task.nan_steps='{losses}'", "train.max_nonfinite_steps=2"]
    paths, resolved = jobs.prepare(tmp_path, TEXT, overrides)
    in_process.train(paths, resolved, monkeypatch)
    loop = bare_loop(paths, resolved)
    for step, ids in enumerate(steps_of(seen)):
        loop.step(step, ids, bad=step in bad_steps)
        if step in bad_steps:
            loop.points[-1].update(loss=math.nan, gradient_norm=math.nan)
    assert_parity(loop, paths)


def test_more_steps_in_a_row_than_the_budget_end_the_run(tmp_path, monkeypatch, seen):
    overrides = ["task.nan_steps='22+25'", "train.max_nonfinite_steps=1"]
    paths, resolved = jobs.prepare(tmp_path, TEXT, overrides)
    with pytest.raises(DivergedError, match="step 9 is not finite"):
        in_process.train(paths, resolved, monkeypatch)


class StopAt(StopRequest):
    """Asks to stop before a step."""

    def __init__(self, step):
        self._questions = 0
        self._step = step

    @property
    def requested(self):
        self._questions += 1
        return self._questions > self._step


def test_dropout_after_a_resume_is_dropout_without_one(tmp_path, monkeypatch):
    overrides = ["model.dropout=0.3", "train.steps=16"]
    straight, resolved = jobs.prepare(tmp_path, TEXT, overrides, "straight")
    in_process.train(straight, resolved, monkeypatch)
    stopped, _ = jobs.prepare(tmp_path, TEXT, overrides, "stopped")
    for step in (5, 6):  # asks at every step of its own attempt: the second one stops after step 11
        with contextlib.suppress(Preempted):
            in_process.train(stopped, resolved, monkeypatch, StopAt(step))
            pytest.fail("was not stopped")
    assert len(storage.list_names(stopped.checkpoints)) == 2
    in_process.train(stopped, resolved, monkeypatch)
    assert jobs.losses(stopped) == jobs.losses(straight)
    for name, tensor in exported(straight).items():
        assert torch.equal(exported(stopped)[name], tensor), name
    assert len({loss for loss in jobs.losses(straight).values()}) == 16


def test_validation_leaves_dropout_out_and_training_keeps_it(tmp_path, monkeypatch):
    overrides = ["train.steps=6", "evaluate.interval_steps=3", "evaluate.batch_size=4", "model.dropout=0.4"]
    paths, resolved = jobs.prepare(tmp_path, TEXT, overrides)
    in_process.train(paths, resolved, monkeypatch)
    model = regression.Network(dropout=0.4).eval()
    model.load_state_dict(exported(paths))
    split = regression.read_split(storage.read_json(paths.shards)["manifest_uri"], "validation")
    with torch.no_grad():
        errors = model(torch.from_numpy(split["x"])) - torch.from_numpy(split["y"])
    history = storage.read_json(paths.history)
    assert history[-1]["validation/mse"] == pytest.approx(float(errors.double().square().mean()), rel=1e-6)
    never, _ = jobs.prepare(tmp_path, TEXT, overrides, "never")
    settings = resolved.evaluate.model_copy(update={"interval_steps": 0})
    in_process.train(never, resolved.model_copy(update={"evaluate": settings}), monkeypatch)
    assert jobs.losses(never) == jobs.losses(paths), "a validation changes no step"
