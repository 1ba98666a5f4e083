"""A run goes on with as many samples in the statistics of its batch norms as it began with, or is refused."""

import contextlib
from types import SimpleNamespace

import pytest
from helpers import in_process, jobs
from helpers.models import overfitting
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from kftrain.core import storage
from kftrain.data.order import BatchPlan
from kftrain.errors import ConfigError, Preempted
from kftrain.run import commit
from kftrain.train.spmd_factory import count_norm_samples, require_same_samples

TRAINED = SimpleNamespace(are_trained=True)
SMALL = [
    "model.kind=helpers.models.overfitting:NormedLine",
    "train.steps=12",
    "evaluate.interval_steps=0",
    "train.log_interval_steps=1",
]


def parts_of(plan):
    """The places of the samples that share statistics, by hand: of each micro batch, or of all processes."""
    rows = [
        {int(place) for place, weight in zip(places, weights, strict=True) if weight}
        for rank in range(plan.num_ranks)
        for places, weights in zip(plan.offsets(rank), plan.weights(rank), strict=True)
    ]
    return [set().union(*rows)] if plan.num_ranks > 1 else rows


def can_go_on(first, second):
    try:
        require_same_samples(count_norm_samples(TRAINED, first), TRAINED, second)
    except ConfigError as error:
        return str(error.fix)
    return True


@settings(derandomize=True)
@given(*[st.integers(1, 24), *[st.tuples(st.integers(1, 4), st.integers(0, 24))] * 2])
def test_a_run_goes_on_where_the_same_samples_share_statistics(batch, first, second):
    """Several processes have one micro batch: anything else is refused before this is asked."""
    plans = [BatchPlan(batch, min(ranks, batch), size if ranks == 1 else 0) for ranks, size in (first, second)]
    assert (can_go_on(*plans) is True) == (parts_of(plans[0]) == parts_of(plans[1]))


@settings(derandomize=True)
@given(*[st.integers(2, 24), st.integers(1, 24), st.integers(1, 4), st.integers(0, 24)])
def test_what_the_refusal_advises_is_right(batch, size, ranks, other):
    plan, now = BatchPlan(batch, 1, size), BatchPlan(batch, min(ranks, batch), other)
    fix = can_go_on(plan, now)
    if fix is True:
        return
    advised = int(fix.split("train.micro_batch_size=")[1].split(",")[0])
    ranks = 1 if "one process" in fix else now.num_ranks
    assert parts_of(BatchPlan(batch, ranks, advised)) == parts_of(plan)


def test_nothing_is_asked_of_a_model_without_batch_norms_or_of_a_checkpoint_of_before():
    plan = BatchPlan(8, 1, 2)
    none = SimpleNamespace(are_trained=False)
    assert count_norm_samples(none, plan) is None
    require_same_samples(8, none, plan)
    require_same_samples(None, TRAINED, plan)


def test_as_many_samples_on_each_of_several_processes_are_not_the_same_samples():
    assert "one process and train.micro_batch_size=5" in can_go_on(BatchPlan(20, 1, 5), BatchPlan(20, 2, 5))


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """Some steps on one process, of micro batches of seven rows: 7, 7 and 6."""
    paths, resolved = jobs.prepare(tmp_path, overfitting.TEXT, [*SMALL, "train.micro_batch_size=7"])
    with contextlib.suppress(Preempted):
        in_process.train(paths, resolved, monkeypatch, in_process.StopAfter(6))
    (name,) = commit.list_committed(paths)
    manifest, _ = commit.read_checkpoint_manifest(storage.join(paths.checkpoints, str(name)))
    assert 0 < manifest.step < 12 and manifest.batch_norm_samples == 7
    return paths, resolved


def with_micro_batch(resolved, size):
    return resolved.model_copy(update={"train": resolved.train.model_copy(update={"micro_batch_size": size})})


@pytest.mark.parametrize("size", [0, 7])
def test_a_run_of_micro_batches_does_not_go_on_with_several_processes(begun, size):
    paths, resolved = begun
    changed = with_micro_batch(resolved, size)
    storage.publish(paths.config, changed.to_yaml())
    done = jobs.run_worker(paths, changed, processes=2)
    assert done.returncode == 10, done.stdout + done.stderr
    assert "go on with one process and train.micro_batch_size=7" in done.stdout + done.stderr
    assert 0 < commit.find_last_step(paths) < 12


def test_it_goes_on_with_the_same_micro_batches_only(begun, monkeypatch):
    paths, resolved = begun
    for size in (0, 10, 5):
        with pytest.raises(ConfigError, match="take 7 samples at a time"):
            in_process.train(paths, with_micro_batch(resolved, size), monkeypatch)
    in_process.train(paths, with_micro_batch(resolved, 9), monkeypatch)  # 9 make three parts, too: 7, 7, 6
    assert commit.find_last_step(paths) == 12


def test_a_run_of_several_processes_goes_on_with_any_number_of_them_but_not_with_micro_batches(tmp_path, monkeypatch):
    paths, resolved = jobs.prepare(tmp_path, overfitting.TEXT, [*SMALL, "checkpoint.interval_steps=5"])
    process = jobs.start_worker(paths, resolved, processes=2)
    jobs.wait_for_line(process, "checkpoint at step 5 committed")
    jobs.kill_tree(process)
    with pytest.raises(ConfigError, match=r"train\.micro_batch_size=0"):
        in_process.train(paths, with_micro_batch(resolved, 10), monkeypatch)
    in_process.train(paths, resolved, monkeypatch)
    assert commit.find_last_step(paths) == 12


def test_norms_that_stay_in_evaluation_mode_share_nothing(tmp_path, monkeypatch):
    overrides = [*SMALL, "model.kind=helpers.models.overfitting:StillLine", "train.micro_batch_size=7"]
    paths, resolved = jobs.prepare(tmp_path, overfitting.TEXT, overrides)
    with contextlib.suppress(Preempted):
        in_process.train(paths, resolved, monkeypatch, in_process.StopAfter(6))
    in_process.train(paths, with_micro_batch(resolved, 0), monkeypatch)
    assert isinstance(overfitting.StillLine().norm, nn.BatchNorm1d) and commit.find_last_step(paths) == 12
