"""The best checkpoint and early stopping: what is kept, what is exported, and what a restart makes of it."""

import contextlib
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import in_process, jobs
from helpers.models import overfitting, regression
from safetensors.torch import load_file

from kftrain import config, reports
from kftrain.cli.jobs import write_table
from kftrain.core import storage
from kftrain.errors import CheckpointError, ConfigError, Preempted
from kftrain.run import attempts, commit, completion, documents
from kftrain.run.documents import Completion
from kftrain.stages import runs
from kftrain.train import completing

BEST = ["checkpoint.keep_best=mse"]
EARLY = [*BEST, "train.stop_after_no_improvement=3"]


def trained(folder, monkeypatch, overrides, run_id="r", stop=None):
    paths, resolved = jobs.prepare(folder, overfitting.TEXT, overrides, run_id)
    in_process.train(paths, resolved, monkeypatch, stop)
    return paths, resolved, documents.read(Completion, paths.complete)


def weights_of(found):
    return load_file(Path(storage.local_path(found.export_uri)) / "model.safetensors")


def validation_error(paths, found):
    """Of the exported weights, by hand."""
    rows = regression.read_split(storage.read_json(paths.shards)["manifest_uri"], "validation")
    weights = weights_of(found)
    answers = torch.from_numpy(rows["x"]) @ weights["line.weight"][0] + weights["line.bias"]
    return float((answers - torch.from_numpy(rows["y"])).square().mean())


def errors_at(paths):
    history = storage.read_json(paths.history)
    return {point["step"]: point["validation/mse"] for point in history if "validation/mse" in point}


def steps_kept(paths):
    return [name.step for name in commit.list_committed(paths)]


def test_a_training_that_overfits_exports_its_best_checkpoint_and_not_its_last(tmp_path, monkeypatch):
    last_paths, _, last = trained(tmp_path, monkeypatch, [], "last")
    best_paths, _, best = trained(tmp_path, monkeypatch, BEST, "best")
    errors = errors_at(best_paths)
    step = min(errors, key=errors.get)
    assert 10 < step < 100 and errors == errors_at(last_paths)
    assert (last.step, last.selection, best.step, best.trained_steps) == (120, None, step, 120)
    assert validation_error(best_paths, best) == pytest.approx(errors[step], rel=1e-5)
    assert validation_error(last_paths, last) == pytest.approx(errors[120], rel=1e-5)
    assert validation_error(best_paths, best) < 0.99 * validation_error(last_paths, last)
    assert steps_kept(best_paths) == [120, step] and best.metrics["validation/mse"] == errors[step]
    assert best.explain_choice(120) == f"best validation/mse {errors[step]:.4g} at step {step} of 120"


@pytest.fixture
def whole(tmp_path, monkeypatch):
    """An uninterrupted training that stops early."""
    return trained(tmp_path, monkeypatch, EARLY, "whole")


def test_it_ends_after_so_many_evaluations_without_improvement_and_is_complete(tmp_path, monkeypatch, whole):
    paths, resolved, found = whole
    errors = errors_at(paths)
    step = min(errors, key=errors.get)
    assert max(errors) == step + 30 == found.trained_steps < 120
    assert (found.step, found.selection.step, found.selection.num_without_improvement) == (step, step, 3)
    assert found.explain_choice(120).endswith("of 120; stopped after 3 evaluations without improvement")
    assert completion.find_completion(paths, resolved) == found
    before = storage.read_bytes(paths.complete)
    in_process.train(paths, resolved, monkeypatch)
    assert storage.read_bytes(paths.complete) == before and attempts.find_last_attempt(paths) == 1
    rates = {point["learning_rate"] for point in storage.read_json(paths.history) if "learning_rate" in point}
    assert rates == {0.03}


def test_the_schedule_and_the_training_are_those_of_all_steps():
    base, early = (config.parse(overfitting.TEXT, overrides) for overrides in ([], EARLY))
    assert base.training_digest("d") == early.training_digest("d")


@pytest.mark.parametrize("stop_after", [3, 24, 37, 59])
def test_a_restart_at_any_step_comes_to_the_same_end(tmp_path, monkeypatch, whole, stop_after):
    paths, resolved = jobs.prepare(tmp_path, overfitting.TEXT, EARLY, "again")
    for stop in (*(in_process.StopAfter(stop_after + 1) for _ in range(2)), None):
        with contextlib.suppress(Preempted):
            in_process.train(paths, resolved, monkeypatch, stop)
    found = documents.read(Completion, paths.complete)
    expected = whole[2]
    assert (found.step, found.trained_steps, found.selection) == (
        (expected.step, expected.trained_steps, expected.selection)
    )
    assert all(torch.equal(value, weights_of(expected)[name]) for name, value in weights_of(found).items())
    assert errors_at(paths) == errors_at(whole[0])


def test_killed_between_the_last_commit_and_the_end_it_takes_no_further_step(monkeypatch, whole):
    paths, resolved, found = whole
    storage.remove(paths.complete)
    storage.remove(found.export_uri)
    in_process.train(paths, resolved, monkeypatch)
    again = documents.read(Completion, paths.complete)
    assert attempts.read_claims(paths)[-1].start_step == found.trained_steps
    assert (again.step, again.trained_steps, again.export_digest) == (
        (found.step, found.trained_steps, found.export_digest)
    )


def test_going_on_with_more_patience_takes_further_steps(tmp_path, monkeypatch, whole):
    paths, resolved, found = whole
    storage.remove(paths.complete)
    longer = resolved.model_copy(update={"train": resolved.train.model_copy(update={"stop_after_no_improvement": 5})})
    in_process.train(paths, longer, monkeypatch)
    again = documents.read(Completion, paths.complete)
    assert (again.step, again.trained_steps) == (found.step, found.trained_steps + 20)


def test_the_best_checkpoint_is_never_deleted_while_others_come_and_go(tmp_path, monkeypatch):
    seen = []
    retire = commit.retire_checkpoints

    def watched(paths, *arguments):
        retire(paths, *arguments)
        newest, _ = commit.read_checkpoint_manifest(
            storage.join(paths.checkpoints, str(commit.list_committed(paths)[0]))
        )
        seen.append((newest.step, newest.selection and newest.selection.step, steps_kept(paths)))

    monkeypatch.setattr(commit, "retire_checkpoints", watched)
    trained(tmp_path, monkeypatch, [*BEST, "checkpoint.asynchronous=false"])
    assert len(seen) > 5
    assert all(kept == sorted({newest, best}, reverse=True) for newest, best, kept in seen), seen


def test_a_restart_from_before_the_best_trains_and_finds_it_again(tmp_path, monkeypatch):
    """The best checkpoint and those after it are damaged: the attempt goes on from an earlier one."""
    paths, resolved = jobs.prepare(tmp_path, overfitting.TEXT, [*EARLY, "checkpoint.keep_last=9"], "again")
    in_process.train(paths, resolved, monkeypatch)
    first = documents.read(Completion, paths.complete)
    storage.remove(paths.complete)
    for name in commit.list_committed(paths):
        if name.step >= first.step:
            (weights,) = Path(storage.local_path(storage.join(paths.checkpoints, str(name)))).glob("__0_0.distcp")
            weights.write_bytes(b"damaged")
    in_process.train(paths, resolved, monkeypatch)
    found = documents.read(Completion, paths.complete)
    assert attempts.read_claims(paths)[-1].attempt == 2
    assert (found.step, found.trained_steps, found.selection) == (first.step, first.trained_steps, first.selection)
    assert all(torch.equal(value, weights_of(first)[name]) for name, value in weights_of(found).items())


def test_a_best_checkpoint_that_is_gone_is_no_best_one(tmp_path, monkeypatch, capsys):
    paths, resolved, found = trained(tmp_path, monkeypatch, BEST)
    storage.remove(paths.complete)
    storage.remove(storage.join(paths.checkpoints, next(str(n) for n in commit.list_committed(paths) if n.step < 120)))
    in_process.train(paths, resolved, monkeypatch)
    assert documents.read(Completion, paths.complete).step == 120
    assert f"the best checkpoint, of step {found.step}, is gone" in capsys.readouterr().out


def test_more_of_a_metric_may_be_better(tmp_path, monkeypatch, whole):
    overrides = [override.replace("mse", "gain") for override in EARLY]
    paths, resolved = jobs.prepare(tmp_path, overfitting.TEXT, overrides, "gain")
    with pytest.raises(ConfigError, match="less or more"):
        in_process.train(paths, resolved, monkeypatch)
    _, _, found = trained(tmp_path, monkeypatch, [*overrides, "checkpoint.keep_best_goal=maximize"], "gain")
    assert (found.step, found.trained_steps) == (whole[2].step, whole[2].trained_steps)


def test_a_metric_that_the_task_does_not_have_ends_the_training_at_the_first_evaluation(tmp_path, monkeypatch):
    overrides = ["checkpoint.keep_best=msee", "checkpoint.keep_best_goal=minimize"]
    paths, resolved = jobs.prepare(tmp_path, overfitting.TEXT, overrides)
    with pytest.raises(ConfigError, match="known: gain, mse"):
        in_process.train(paths, resolved, monkeypatch)


def without_a_value(sums):
    return {"none": np.full_like(sums["squares"], np.nan)}


def test_where_no_value_is_finite_the_last_one_is_the_model_and_the_log_says_so(tmp_path, monkeypatch, capsys):
    metric = [f"evaluate.metrics=[{__name__}:without_a_value]", "checkpoint.keep_best_goal=minimize"]
    paths, resolved, found = trained(tmp_path, monkeypatch, [*metric, "checkpoint.keep_best=none"])
    assert (found.step, found.selection.step, found.selection.value) == (120, 0, None)
    line = "no finite validation/none in 12 evaluations: the last checkpoint is the model"
    assert f"warning: {line}" in capsys.readouterr().out
    page = reports.render_section(
        reports.describe_training(resolved, found, storage.read_json(paths.history)),
        resolved.run.name,
        resolved.to_yaml(),
    )
    assert line[1:] in page and "Best checkpoint" not in page


def test_a_training_without_any_finite_value_ends_after_its_patience_and_is_complete(tmp_path, monkeypatch, capsys):
    metric = [f"evaluate.metrics=[{__name__}:without_a_value]", "checkpoint.keep_best_goal=minimize"]
    overrides = [*metric, "checkpoint.keep_best=none", "train.stop_after_no_improvement=3"]
    paths, resolved = jobs.prepare(tmp_path, overfitting.TEXT, overrides)
    with contextlib.suppress(Preempted):
        in_process.train(paths, resolved, monkeypatch, in_process.StopAfter(15))  # after the first evaluation
    in_process.train(paths, resolved, monkeypatch)
    found = documents.read(Completion, paths.complete)
    assert (found.step, found.num_trained, found.selection.num_without_improvement) == (30, 30, 3)
    assert steps_kept(paths) == [30] and completion.find_completion(paths, resolved) == found
    assert "the last checkpoint is the model; stopped after 3 evaluations" in capsys.readouterr().out
    in_process.train(paths, resolved, monkeypatch)
    assert attempts.find_last_attempt(paths) == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["checkpoint.keep_best=mse", "evaluate.interval_steps=0"], "evaluate.interval_steps must not be 0"),
        (["train.stop_after_no_improvement=3"], "checkpoint.keep_best must not be empty"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(overrides, message):
    with pytest.raises(ConfigError, match=message):
        config.parse("", overrides)


def damage(paths, step, how):
    (folder,) = [
        Path(storage.local_path(paths.checkpoints)) / str(n) for n in commit.list_committed(paths) if n.step == step
    ]
    (weights,) = folder.glob("__0_0.distcp")
    if how == "flipped":
        content = bytearray(weights.read_bytes())
        content[len(content) // 2] ^= 1
        weights.write_bytes(content)
    elif how == "folder":
        shutil.rmtree(folder)
    else:
        {"missing": weights, "marker": folder / "COMMITTED", "manifest": folder / "manifest.json"}[how].unlink()


def trained_and_damaged(folder, monkeypatch, overrides, damaged):
    """What becomes of a training whose checkpoints are damaged before the first of them is exported."""
    paths, resolved = jobs.prepare(folder, overfitting.TEXT, overrides)
    complete = completing.complete

    def first_damages(training, finished, seconds):
        for step, how in damaged(finished):
            damage(paths, step, how)
        monkeypatch.setattr(completing, "complete", complete)
        complete(training, finished, seconds)

    monkeypatch.setattr(completing, "complete", first_damages)
    in_process.train(paths, resolved, monkeypatch)
    return paths, resolved, documents.read(Completion, paths.complete)


@pytest.mark.parametrize("how", ["flipped", "missing", "marker", "manifest", "folder"])
def test_a_damaged_best_checkpoint_gives_way_to_the_next_best_which_everybody_is_told(
    tmp_path, monkeypatch, capsys, how
):
    overrides = [*EARLY, "checkpoint.keep_last=9", "checkpoint.interval_steps=10", "checkpoint.asynchronous=false"]
    paths, resolved, found = trained_and_damaged(
        tmp_path, monkeypatch, overrides, lambda finished: [(finished.selection.step, how)]
    )
    errors = errors_at(paths)
    best = min(errors, key=errors.get)
    (_, second), *_ = sorted((error, step) for step, error in errors.items() if step != best)
    assert (found.step, found.selection.step, found.trained_steps) == (second, best, best + 30)
    assert validation_error(paths, found) == pytest.approx(errors[second], rel=1e-5)
    assert found.metrics["validation/mse"] == errors[second] and f"-{second:08d}-" in found.checkpoint_uri
    said = f"of step {best}, is damaged or gone: that of step {second} is exported as the model"
    assert said in capsys.readouterr().out
    page = reports.render_section(
        reports.describe_training(resolved, found, storage.read_json(paths.history)),
        resolved.run.name,
        resolved.to_yaml(),
    )
    assert f"damaged or gone: that of step {second} is the model" in page and "Best checkpoint" not in page
    assert completion.find_completion(paths, resolved) == found


def test_where_nothing_else_was_evaluated_the_newest_whole_checkpoint_is_the_model(tmp_path, monkeypatch):
    overrides = [*BEST, "train.steps=75", "evaluate.interval_steps=60", "checkpoint.keep_last=3"]
    overrides += ["checkpoint.asynchronous=false"]
    _, _, found = trained_and_damaged(
        tmp_path, monkeypatch, overrides, lambda finished: [(60, "flipped"), (75, "missing")]
    )
    assert (found.step, found.selection.step, found.trained_steps) == (50, 60, 75)


@pytest.mark.parametrize("overrides", [[], EARLY])
def test_where_none_is_whole_the_advice_is_to_resume_which_goes_on_from_an_earlier_one(
    tmp_path, monkeypatch, overrides
):
    settings = [*overrides, "checkpoint.keep_last=2", "checkpoint.interval_steps=10", "checkpoint.asynchronous=false"]
    expected = trained(tmp_path, monkeypatch, settings, "whole")[2]

    def all_that_may_be_the_model(finished):
        steps = [finished.last_step] if not overrides else steps_kept(paths)
        return [(step, "flipped") for step in steps]

    paths, resolved = jobs.prepare(tmp_path, overfitting.TEXT, settings)
    advice = "manifest; start a new run" if overrides else "manifest; resume the run"
    with pytest.raises(CheckpointError, match=rf"no checkpoint .* is whole: a file is damaged.*{advice}"):
        trained_and_damaged(tmp_path, monkeypatch, settings, all_that_may_be_the_model)
    assert not storage.exists(paths.complete)
    if overrides:
        with pytest.raises(CheckpointError, match=r"all .* are damaged.*start a new run"):
            in_process.train(paths, resolved, monkeypatch)
        return
    in_process.train(paths, resolved, monkeypatch)
    again = documents.read(Completion, paths.complete)
    assert again.checkpoint_uri.endswith("step-00000120-a2"), "trained anew from step 110 on"
    assert all(torch.equal(value, weights_of(expected)[name]) for name, value in weights_of(again).items())


def test_a_run_says_which_step_and_why(whole):
    paths, resolved, found = whole
    line = found.explain_choice(120)
    assert line in reports.render_section(
        reports.describe_training(resolved, found, storage.read_json(paths.history)),
        resolved.run.name,
        resolved.to_yaml(),
    ).replace("Best", "best")
    overview = runs.read_run_overview(paths)
    assert (overview.step, overview.chosen) == (found.step, line)
    assert any(line in row for row in write_table([overview]))
