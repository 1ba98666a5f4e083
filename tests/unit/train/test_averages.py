"""Averages of the weights: what a skipped step does to them, what is exported and scored, and when they begin late."""

import contextlib

import pytest
import torch
from helpers import in_process, jobs
from helpers.models import regression
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from kftrain import config
from kftrain.core import storage
from kftrain.errors import ConfigError, Preempted
from kftrain.run import commit, documents
from kftrain.run.documents import Completion
from kftrain.train.averages import Averages

STEPS, DECAY = 12, 0.6

TEXT = (
    regression.BASE
    + regression.SCHEDULED
    + """
run: {name: averages, seed: 3}
train: {steps: 12, global_batch_size: 10, log_interval_steps: 1, gradient_clip_norm: 3.0, max_nonfinite_steps: 2}
checkpoint: {interval_steps: 5}
"""
)
AVERAGED = f"train.average_decay={DECAY}"


def exported(paths):
    uri = documents.read(Completion, paths.complete).export_uri
    return load_file(storage.local_path(uri) / "model.safetensors")


def saved(paths):
    """The newest checkpoint's manifest."""
    name = commit.list_committed(paths)[0]
    return commit.read_checkpoint_manifest(storage.join(paths.checkpoints, str(name)))[0]


def bare_loop(paths, resolved):
    torch.manual_seed(resolved.run.seed)
    split = regression.read_split(storage.read_json(paths.shards)["manifest_uri"], "train")
    settings = {"peak": 0.02, "warmup": 5, "floor": 0.2, "clip": 3.0, "betas": (0.8, 0.9), "epsilon": 1e-2}
    return regression.BareLoop(regression.Network(), split, steps=STEPS, decay=0.3, **settings)


@pytest.fixture
def seen(tmp_path, monkeypatch):
    """Where the task writes down what it is given."""
    folder = tmp_path / "seen"
    folder.mkdir()
    monkeypatch.setenv(regression.SEEN_ENV, str(folder))
    return folder


def test_a_skipped_step_leaves_the_averages_alone_and_they_are_exported_and_scored(tmp_path, monkeypatch, seen):
    bad_steps = (0, 4, 5)
    overrides = [AVERAGED, "task.nan_steps=" + "+".join(str(step + 1) for step in bad_steps)]
    paths, resolved = jobs.prepare(tmp_path, TEXT, [*overrides, "evaluate.interval_steps=12"])
    in_process.train(paths, resolved, monkeypatch)
    loop = bare_loop(paths, resolved)
    averaged = AveragedModel(loop.model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    (losses,) = regression.seen_ids(seen)
    for step, ids in enumerate(losses[-STEPS:]):
        loop.step(step, [ids], bad=step in bad_steps)
        if step not in bad_steps:
            averaged.update_parameters(loop.model)
    tensors = exported(paths)
    for name, parameter in averaged.module.named_parameters():
        torch.testing.assert_close(tensors[name], parameter.detach(), rtol=1e-5, atol=1e-6)
    split = regression.read_split(storage.read_json(paths.shards)["manifest_uri"], "validation")
    with torch.no_grad():
        errors = averaged.module(torch.from_numpy(split["x"])) - torch.from_numpy(split["y"])
    error = float(errors.double().square().mean())
    assert storage.read_json(paths.history)[-1]["validation/mse"] == pytest.approx(error, rel=1e-5)


@pytest.mark.parametrize("start_steps", [0, 7])
def test_averages_begin_with_the_weights_of_a_checkpoint_that_has_none(tmp_path, monkeypatch, capsys, start_steps):
    plain, without = jobs.prepare(tmp_path, TEXT, [], "plain")
    in_process.train(plain, without, monkeypatch)
    paths, _ = jobs.prepare(tmp_path, TEXT, [], "r")
    with contextlib.suppress(Preempted):
        in_process.train(paths, without, monkeypatch, in_process.StopAfter(STEPS - 2))
    assert saved(paths).parts == {"model": 1, "optimizer": 1}
    settings = {"average_decay": DECAY, "average_start_steps": start_steps}
    resolved = without.model_copy(update={"train": without.train.model_copy(update=settings)})
    capsys.readouterr()
    in_process.train(paths, resolved, monkeypatch)
    assert "the checkpoint has no averages, which begins anew" in capsys.readouterr().out
    assert jobs.losses(paths) == jobs.losses(plain), "the weights are trained as without averages"
    # The average of the last two steps' weights: a copy of the first, and a share of the second.
    eleven, _ = jobs.prepare(tmp_path, TEXT, [], "eleven")
    with contextlib.suppress(Preempted):
        in_process.train(eleven, without, monkeypatch, in_process.StopAfter(STEPS - 1))
    before, last = weights_of(eleven, without), exported(plain)
    for name, value in exported(paths).items():
        torch.testing.assert_close(value, DECAY * before[name] + (1 - DECAY) * last[name])


def test_averages_that_a_run_is_given_before_they_are_to_begin_are_the_weights_until_then(tmp_path, monkeypatch):
    paths, without = jobs.prepare(tmp_path, TEXT, [])
    with contextlib.suppress(Preempted):
        in_process.train(paths, without, monkeypatch, in_process.StopAfter(STEPS - 3))
    settings = {"average_decay": DECAY, "average_start_steps": STEPS - 1}
    resolved = without.model_copy(update={"train": without.train.model_copy(update=settings)})
    in_process.train(paths, resolved, monkeypatch)
    last, _ = jobs.prepare(tmp_path, TEXT, [], "plain")
    in_process.train(last, without, monkeypatch)
    for name, value in exported(last).items():
        assert torch.equal(exported(paths)[name], value), name


def weights_of(paths, resolved):
    """The weights of the newest checkpoint."""
    from kftrain.train.completing import build_task_of_run, export_model

    uri = storage.join(paths.checkpoints, str(commit.list_committed(paths)[0]))
    export_uri, _ = export_model(paths, resolved, build_task_of_run(paths, resolved), uri)
    return load_file(storage.local_path(export_uri) / "model.safetensors")


def test_a_run_may_go_on_without_its_averages(tmp_path, monkeypatch, capsys):
    plain, without = jobs.prepare(tmp_path, TEXT, [], "plain")
    in_process.train(plain, without, monkeypatch)
    paths, resolved = jobs.prepare(tmp_path, TEXT, [AVERAGED], "r")
    with contextlib.suppress(Preempted):
        in_process.train(paths, resolved, monkeypatch, in_process.StopAfter(7))
    assert saved(paths).parts == {"model": 1, "optimizer": 1, "averages": 1}
    in_process.train(paths, without, monkeypatch)
    assert "the checkpoint's averages are left out" in capsys.readouterr().out
    for name, value in exported(plain).items():
        assert torch.equal(exported(paths)[name], value), name


def test_averages_after_a_resume_are_those_without_one(tmp_path, monkeypatch):
    straight, resolved = jobs.prepare(tmp_path, TEXT, [AVERAGED, "train.average_start_steps=6"], "straight")
    in_process.train(straight, resolved, monkeypatch)
    stopped, _ = jobs.prepare(tmp_path, TEXT, [AVERAGED], "stopped")
    with contextlib.suppress(Preempted):
        in_process.train(stopped, resolved, monkeypatch, in_process.StopAfter(8))
    in_process.train(stopped, resolved, monkeypatch)
    for name, value in exported(straight).items():
        assert torch.equal(exported(stopped)[name], value), name


def test_the_weights_are_back_after_an_evaluation_that_fails():
    model = nn.Linear(3, 2)
    averages, first = Averages(model, 0.5, 0), model.weight.detach().clone()
    with torch.no_grad():
        model.weight.fill_(3.0)
    weights = model.weight.detach().clone()
    with contextlib.suppress(KeyError), averages.in_place(model):
        assert torch.equal(model.weight, first)
        raise KeyError
    assert torch.equal(model.weight, weights)


def test_half_precision_weights_are_averaged_in_fp32():
    model = nn.Linear(1, 1, bias=False).bfloat16()
    averages = Averages(model, 0.99, 0)
    with torch.no_grad():
        for value in (1.0, 1.0078125, 1.0078125):
            model.weight.fill_(value)
            averages.update(torch.zeros(()))
    (average,) = averages.make_part().save()["weights"].values()
    assert float(average) == pytest.approx(1.0 + 0.0078125 * (1 - 0.99**2), rel=1e-7)


def test_a_start_of_no_averages_is_refused():
    with pytest.raises(ConfigError, match="average_start_steps is of averages"):
        config.parse("train: {average_start_steps: 3}")
