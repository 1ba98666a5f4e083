"""What the loop asks of its parts, and when; the parts are recorders."""

import contextlib
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from kftrain import config
from kftrain.data.counters import Counters
from kftrain.data.decoding import BadSample
from kftrain.errors import CheckpointError, DataError, DivergedError, Preempted, StorageError
from kftrain.parallel.distributed import Part
from kftrain.parallel.shape import Shape
from kftrain.run.selection import BestEvaluation
from kftrain.train import loop as loop_module
from kftrain.train import saves
from kftrain.train.engine import Parts, StepResult
from kftrain.train.loop import Loop


class Batch(NamedTuple):
    step: int
    num_terms: int
    bad_samples: tuple = ()


class Writer:
    """Commits what it is given when it is waited for."""

    overdue = False
    step = None
    committed_step = 0

    def __init__(self, fakes):
        self.fakes = fakes

    @property
    def busy(self):
        return self.fakes.taken in self.fakes.busy_at

    def save(self, state, history, step, samples):
        assert self.step is None, "one is in flight"
        self.fakes.saved.append((step, samples))
        self.fakes.selected.append(self.selected())
        self.step = step

    def wait(self):
        step, self.step = self.step, None
        if step in self.fakes.failing:
            raise StorageError("the disk is full")
        self.committed_step = step


class Fakes:
    """An engine, a loader, a recorder and a liveness in one: each writes down what it is asked."""

    rank = 0
    size = 1
    is_main = True
    rows = None

    def __init__(self, bad_steps=(), busy_at=()):
        self.events = []
        self.saved = []
        self.selected = []
        self.failing = ()
        self.points = []
        self.rates = []
        self.bad_steps = set(bad_steps)
        self.busy_at = set(busy_at)
        self.device = torch.device("cpu")
        self.task = SimpleNamespace(loss_metric="", metrics=None)
        self.model = torch.nn.Identity()
        self.state = SimpleNamespace(save=dict)
        self.history = []
        self.taken = 0
        self.stop_at = None
        self.others_stop_at = None
        self.counters = Counters()
        self.undecodable = {}
        self.metrics = {}

    # the world
    def gather(self, value):
        return [value]

    def from_main(self, value):
        return value

    def sum(self, values):
        others = self.others_stop_at is not None and self.taken >= self.others_stop_at and len(values) > 1
        return [values[0], values[1] + 1.0, *values[2:]] if others else values

    # the loader
    def steps(self, first, count):
        self.taken = first
        for step in range(first, first + count):
            yield Batch(step, 7, self.undecodable.get(step, ()))

    # the engine
    def evaluate(self, *arguments):
        return {}

    @property
    def mesh(self):
        return self

    @property
    def world(self):
        return self

    data_rank = 0
    counts_rows = True

    shape = Shape()

    def sum_both(self, of_island, of_all):
        terms, *sums = self.sum([of_island[0], *of_all, *of_island[1:]])
        return [terms, *sums[len(of_all) :]], sums[: len(of_all)]

    def sum_of_losses(self, values):
        return self.sum(values)

    def set_learning_rate(self, rate):
        self.rates.append(rate)

    def step(self, batch, num_terms, agree):
        self.events.append((batch, num_terms, torch.initial_seed()))
        good = self.taken not in self.bad_steps
        result = StepResult(torch.tensor(1.0 + self.taken), torch.tensor(0.5 if good else float("nan")), self.metrics)
        self.taken += 1
        assert agree([1.0, 2.0]) == [1.0, 2.0]
        return result

    # the recorder
    def record(self, step, values, num_steps, num_samples, data):
        assert data["data_queue_depth"] == 0
        self.points.append((step, values, num_steps, num_samples))

    def record_validation(self, step, metrics):
        self.points.append((step, "validation"))

    # the liveness and the stop
    def mark_watched(self):
        return contextlib.nullcontext()

    mark_resting = mark_watched

    def note_progress(self):
        pass

    @property
    def requested(self):
        return self.stop_at is not None and self.taken >= self.stop_at


SETTINGS = [
    "train.steps=10",
    "train.global_batch_size=4",
    "train.log_interval_steps=4",
    "checkpoint.interval_steps=3",
    "evaluate.interval_steps=5",
    "optimizer.learning_rate=1.0",
    "optimizer.warmup_steps=2",
    "optimizer.final_learning_rate_fraction=0.0",
    "run.seed=9",
]


@pytest.fixture
def make(monkeypatch):
    def build(fakes, *overrides):
        monkeypatch.setattr(loop_module, "total_metrics", lambda *arguments: {"bits_per_byte": 1.0})
        resolved = config.parse("{}", [*SETTINGS, *overrides])
        return Loop(resolved, fakes, fakes, fakes, None, Writer(fakes), fakes, fakes, fakes)

    return build


def test_each_step_has_its_own_learning_rate_on_all_groups(make):
    fakes = Fakes()
    assert make(fakes).run(0) == 10
    assert fakes.rates[:3] == [0.5, 1.0, 1.0]
    assert fakes.rates[-1] == pytest.approx(0.0, abs=1e-12)
    assert fakes.rates[2:] == sorted(fakes.rates[2:], reverse=True) and len(set(fakes.rates[2:])) == 8
    resumed = Fakes()
    make(resumed).run(6)
    assert resumed.rates == fakes.rates[6:]


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("square_root", 2.0)])
def test_a_resume_scales_the_learning_rate_with_the_batch_no_second_time(make, monkeypatch, rule, factor):
    monkeypatch.setattr(loop_module.load, "load_into", lambda *_: None)
    plain, resumed = Fakes(), Fakes()
    make(plain).run(0)
    resumed.state = Parts({})
    loop = make(resumed, f"optimizer.scale_learning_rate={rule}", "optimizer.reference_batch_size=1")
    before = SimpleNamespace(bad_samples=(), selection=None, parts={}, files=(), step=6)
    assert loop.run(loop.resume(SimpleNamespace(manifest=before, uri=""))) == 10
    assert resumed.rates == pytest.approx([factor * rate for rate in plain.rates[6:]])


def test_each_step_has_its_batch_its_terms_and_a_seed_of_its_own(make):
    fakes, resumed = Fakes(), Fakes()
    make(fakes).run(0)
    make(resumed).run(6)
    assert [event[:2] for event in fakes.events] == [(Batch(step, 7), 7) for step in range(10)]
    assert len({seed for _, _, seed in fakes.events}) == 10
    assert resumed.events == fakes.events[6:]


def test_points_validations_and_checkpoints_come_at_their_intervals_and_at_the_end(make):
    fakes = Fakes()
    make(fakes).run(0)
    assert fakes.saved == [(3, 12), (6, 24), (9, 36), (10, 40)]
    assert [point[0] for point in fakes.points if point[1] == "validation"] == [5, 10]
    recorded = [point for point in fakes.points if point[1] != "validation"]
    assert [(step, num_steps, num_samples) for step, _, num_steps, num_samples in recorded] == [
        (4, 4, 16),
        (8, 4, 16),
        (10, 2, 8),
    ]
    step, values, *_ = recorded[0]
    assert values == {"loss": step, "gradient_norm": 0.5, "learning_rate": fakes.rates[step - 1]}


def test_a_checkpoint_is_left_out_while_the_one_before_is_written_but_never_the_last(make):
    fakes = Fakes(busy_at=[6, 10])
    make(fakes).run(0)
    assert [step for step, _ in fakes.saved] == [3, 9, 10]


def test_a_checkpoint_is_also_due_by_the_clock_since_the_last_one_began(make, monkeypatch):
    fakes = Fakes(busy_at=[8])
    monkeypatch.setattr(saves, "monotonic", lambda: 10.0 * fakes.taken)
    loop = make(fakes, "checkpoint.interval_steps=5", "checkpoint.interval_seconds=30")
    loop.run(0)
    assert [step for step, _ in fakes.saved] == [3, 5, 9, 10]
    others = Fakes()
    others.is_main = False
    monkeypatch.setattr(saves, "monotonic", lambda: 10.0 * others.taken)
    make(others, "checkpoint.interval_steps=5", "checkpoint.interval_seconds=30").run(0)
    assert [step for step, _ in others.saved] == [5, 10], "the first process has said nothing"


def test_a_checkpoint_that_stays_is_made_also_where_the_one_before_is_still_being_written(make):
    fakes = Fakes(busy_at=[8])
    loop = make(fakes, "checkpoint.interval_steps=5", "checkpoint.keep_every=4")
    loop.run(0)
    assert [step for step, _ in fakes.saved] == [4, 5, 8, 10] and loop._saves._writer.keep_every == 4


def test_a_stop_commits_what_is_done_and_takes_no_further_step(make):
    fakes = Fakes()
    fakes.stop_at = 4
    with pytest.raises(Preempted, match="stopped at step 4 of 10"):
        make(fakes).run(0)
    assert fakes.saved == [(3, 12), (4, 16)] and len(fakes.events) == 4


def test_fault_34_a_stop_that_only_another_process_was_asked_for_is_everyones_before_the_next_step(make):
    fakes = Fakes()
    fakes.others_stop_at = 4
    with pytest.raises(Preempted, match="stopped at step 4 of 10"):
        make(fakes).run(0)
    assert fakes.saved == [(3, 12), (4, 16)] and len(fakes.events) == 4


def test_a_stop_right_after_a_commit_does_not_save_again(make):
    fakes = Fakes()
    fakes.stop_at = 3
    with pytest.raises(Preempted):
        make(fakes).run(0)
    assert fakes.saved == [(3, 12)]


@pytest.mark.parametrize(("bad", "allowed"), [([4, 5], 2), ([2, 4, 6, 8], 1), ([], 0)])
def test_skipped_steps_within_the_budget_go_on_and_are_no_numbers_in_the_record(make, bad, allowed):
    fakes = Fakes(bad_steps=bad)
    assert make(fakes, f"train.max_nonfinite_steps={allowed}", "train.log_interval_steps=1").run(0) == 10
    without = [
        step - 1 for step, values, *_ in fakes.points if values != "validation" and "gradient_norm" not in values
    ]
    assert without == bad


@pytest.mark.parametrize(("bad", "allowed", "step"), [([4, 5, 6], 2, 7), ([0], 0, 1), ([3, 5, 6], 1, 7)])
def test_more_in_a_row_than_the_budget_is_divergence(make, bad, allowed, step):
    fakes = Fakes(bad_steps=bad)
    with pytest.raises(DivergedError, match=f"gradient norm of step {step} is not finite"):
        make(fakes, f"train.max_nonfinite_steps={allowed}").run(0)

    assert len(fakes.events) == step + 1, "the next one was asked for before its numbers had come"


@pytest.mark.parametrize(("num_skipped", "num_lines"), [(10, 1), (9, 0)])
def test_a_training_that_has_skipped_all_its_steps_says_so(make, monkeypatch, num_skipped, num_lines):
    fakes, written = Fakes(bad_steps=range(10)), []
    fakes.metrics = {"loss_scale": torch.tensor(2.0**16), "skipped_steps": torch.tensor(num_skipped)}
    monkeypatch.setattr(loop_module, "to_log", written.append)
    assert make(fakes, "precision.compute=fp16").run(0) == 10
    assert sum("all 10 steps were skipped in fp16" in line for line in written) == num_lines


def test_steps_at_a_least_scale_that_fp32_rounds_count(make):
    fakes = Fakes(bad_steps=range(10))
    fakes.metrics = {"loss_scale": torch.full((), 1.0).clamp_(max=0.1)}
    with pytest.raises(DivergedError, match=r"step 3 at the least loss scale, 0.1, is not finite"):
        make(fakes, "precision.compute=fp16", "precision.loss_scale.minimum=0.1", "train.max_nonfinite_steps=2").run(0)


def test_a_step_that_diverges_is_not_committed_where_its_checkpoint_would_come_or_a_stop(make):
    fakes = Fakes(bad_steps=[5])
    with pytest.raises(DivergedError, match="step 6 is not finite"):
        make(fakes).run(0)
    assert fakes.saved == [(3, 12)] and len(fakes.events) == 6
    stopped = Fakes(bad_steps=[4])
    stopped.stop_at = 5
    with pytest.raises(DivergedError, match="step 5 is not finite"):
        make(stopped).run(0)
    assert stopped.saved == [(3, 12)] and len(stopped.events) == 5


def test_an_island_that_diverges_ends_the_training_of_all_where_they_record_or_save(make):
    fakes = Fakes(bad_steps=[3])
    fakes.shape = Shape(islands=2)
    with pytest.raises(DivergedError, match="step 4 is not finite"):
        make(fakes, "train.log_interval_steps=5").run(0)
    assert len(fakes.events) == 5 and fakes.saved == [(3, 12)]
    well = Fakes()
    well.shape, well.gather = Shape(islands=2), lambda value: [value, DivergedError("elsewhere").to_dict()]
    with pytest.raises(DivergedError, match="elsewhere"):
        make(well, "train.log_interval_steps=5").run(0)
    assert len(well.events) == 3 and not well.saved


def test_the_log_shows_the_mean_loss_of_islands(make):
    alone, islands = Fakes(), Fakes()
    islands.shape, islands.sum_of_losses = Shape(islands=2), lambda values: [2 * value + 3 for value in values]
    losses = []
    for fakes in (alone, islands):
        make(fakes).run(0)
        losses.append([values["loss"] for _, values, *_ in fakes.points if values != "validation"])
    assert losses[1] == [loss + 1.5 for loss in losses[0]]


def test_samples_that_are_left_out_are_counted_and_saved_and_too_many_end_the_run(make, monkeypatch):
    def bad(*numbers):
        return [BadSample(number, DataError("damaged")) for number in numbers]

    fakes = Fakes()
    fakes.undecodable = {2: bad(30, 31), 6: bad(31), 9: bad(40)}
    loop = make(fakes, "data.max_bad_samples=3")
    loop.resume(None)
    assert loop.run(0) == 10
    assert [values.get("bad_samples") for _, values, *_ in fakes.points if values != "validation"] == [2, 2, 3]
    assert sorted(loop._saves._writer.bad_samples) == [30, 31, 40]
    resumed, before = Fakes(), SimpleNamespace(bad_samples=(30, 99), selection=None, parts={}, files=(), step=6)
    resumed.state = Parts({})
    loop = make(resumed, "data.max_bad_samples=3")
    monkeypatch.setattr(loop_module.load, "load_into", lambda *_: None)
    assert loop.resume(SimpleNamespace(manifest=before, uri="")) == 6
    assert sorted(loop._saves._writer.bad_samples) == [30, 99]
    again = Fakes()
    again.undecodable = fakes.undecodable
    with pytest.raises(DataError, match="3 samples cannot be decoded"):
        make(again, "data.max_bad_samples=2").run(0)
    assert len(again.events) == 9, "found a step ahead"


def test_the_next_step_is_agreed_on_within_a_step_in_one_exchange(make):
    fakes, sums = Fakes(), []
    fakes.sum = lambda values: sums.append(len(values)) or values
    make(fakes, "train.log_interval_steps=100").run(0)
    assert sums == [6, *[6 + 2] * 10, 1, 22], "one before the first step, one in each, two for the numbers at the end"


def test_a_checkpoint_of_parts_that_the_engine_does_not_know_is_refused_before_it_is_read(make, monkeypatch):
    fakes = Fakes()
    fakes.state = Parts({"model": Part(1, dict, lambda state: None)})
    monkeypatch.setattr(loop_module.load, "load_into", lambda *arguments: pytest.fail("was read"))
    manifest = SimpleNamespace(parts={"model": 1, "scaler": 1}, files={}, step=3)
    with pytest.raises(CheckpointError, match="'scaler'"):
        make(fakes).resume(SimpleNamespace(uri="file:///c", manifest=manifest))


BEST = ["checkpoint.keep_best=loss", "checkpoint.keep_best_goal=minimize", "evaluate.interval_steps=2"]


def evaluating(make, monkeypatch, fakes, values, *overrides):
    """A loop whose evaluations have these values."""
    loop = make(fakes, *BEST, *overrides)
    found = iter(values)
    monkeypatch.setattr(loop_module, "total_metrics", lambda *_: {"bits_per_byte": 1.0, "loss": next(found)})
    return loop


def test_each_improvement_is_saved_even_where_the_save_before_is_still_written(make, monkeypatch):
    fakes = Fakes(busy_at=[4, 8])
    assert evaluating(make, monkeypatch, fakes, [5.0, 4.0, 6.0, 3.0, 7.0]).run(0) == 10
    assert [step for step, _ in fakes.saved] == [2, 3, 4, 6, 8, 9, 10]
    assert [found.step for found in fakes.selected] == [2, 2, 4, 4, 8, 8, 8]


def test_training_ends_at_the_evaluation_that_was_one_too_many_and_commits_it(make, monkeypatch):
    fakes = Fakes()
    values = [5.0, float("nan"), 6.0, 3.0, 7.0]
    loop = evaluating(make, monkeypatch, fakes, values, "train.stop_after_no_improvement=2")
    assert loop.run(0) == 6 and loop.best.is_enough
    assert len(fakes.events) == 6 and fakes.saved[-1] == (6, 24)
    assert (fakes.selected[-1].step, fakes.selected[-1].num_without_improvement) == (2, 2)


def test_a_loop_that_has_waited_for_long_enough_before_takes_no_step(make):
    fakes = Fakes()
    loop = make(fakes, *BEST, "train.stop_after_no_improvement=2")
    loop.best.resume(BestEvaluation(metric="loss", goal="minimize", step=2, value=1.0, num_without_improvement=2))
    assert loop.run(6) == 6 and fakes.events == [] and fakes.saved == []


def test_a_best_checkpoint_that_cannot_be_written_leaves_the_one_before(make, monkeypatch):
    fakes = Fakes()
    fakes.failing = (4,)
    loop = evaluating(make, monkeypatch, fakes, [5.0, 3.0, 4.0, 4.5, 6.0], "checkpoint.interval_steps=50")
    assert loop.run(0) == 10
    assert [step for step, _ in fakes.saved] == [2, 4, 6, 10]
    assert [found.step for found in fakes.selected] == [2, 4, 6, 6]


def test_without_keep_best_nothing_is_known_of_a_best_one(make):
    fakes = Fakes()
    make(fakes).run(0)
    assert set(fakes.selected) == {None}
