import itertools
import math

from kftrain.core import storage
from kftrain.train import recorder
from kftrain.train.recorder import Recorder


class Tracker:
    def __init__(self):
        self.logged = []

    def log_metrics(self, metrics, step):
        self.logged.append((step, dict(metrics)))

    def close(self, timeout_seconds):
        pass


def test_a_point_goes_to_history_log_and_tracker(capsys):
    tracker = Tracker()
    mine = Recorder([], tracker, num_steps=10)
    mine.record(2, {"loss": 1.5}, num_steps=2, num_samples=64)
    mine.record_validation(2, {"accuracy": 0.5})
    assert [point["step"] for point in mine.history] == [2]
    assert mine.history[0]["loss"] == 1.5 and mine.history[0]["validation/accuracy"] == 0.5
    assert tracker.logged[0][0] == 2 and tracker.logged[0][1]["loss"] == 1.5
    assert tracker.logged[1] == (2, {"validation/accuracy": 0.5})
    assert capsys.readouterr().out.startswith("kftrain| step 2/10 loss 1.5 | ")


def test_a_quick_evaluation_says_which_part_of_the_validation_it_is_of(capsys):
    Recorder([], None, 10, 256).record_validation(2, {"bits_per_byte": 1.37})
    assert capsys.readouterr().out == "kftrain| step 2/10 validation/bits_per_byte 1.37 (first 256 samples)\n"
    Recorder([], None, 10).record_validation(2, {"bits_per_byte": 1.37})
    assert capsys.readouterr().out == "kftrain| step 2/10 validation/bits_per_byte 1.37\n"


def test_what_waiting_for_data_costs_goes_to_log_and_tracker_alone(capsys, monkeypatch):
    tracker, now = Tracker(), [100.0]
    monkeypatch.setattr(recorder.time, "monotonic", lambda: now[0])
    mine = Recorder([], tracker, num_steps=10)
    for stall, shown in ((1.0, ", 25% waiting for data,"), (0.01, " samples/s, ")):
        now[0] += 4.0
        mine.record(2, {"loss": 1.5}, 2, 64, {"data_stall_seconds": stall, "data_queue_depth": 2.0})
        (_, found), own = tracker.logged[-1], mine.history[-1].keys() - {"step"}
        costs = {name: value for name, value in found.items() if name not in own}
        assert costs == {"data_stall_seconds": stall, "data_queue_depth": 2.0, "data_stall_share": stall / 4}
        assert own <= found.keys(), "one call has all of a step"
        assert shown in capsys.readouterr().out and not any("data" in name for name in mine.history[-1])


def test_the_log_shows_what_is_worth_a_look():
    quiet = {"data_stall_share": 0.001, "storage_retries": 0.0, "disk_used_share": 0.3, "memory_bytes": 5e8}
    assert recorder.format_costs(quiet) == ""
    busy = {"gpu_use_share": 0.87, "gpu_memory_share": 0.4, "storage_retries": 3.0, "data_cache_hit_share": 0.92}
    assert recorder.format_costs({**busy, "disk_used_share": 0.91, "memory_bytes": 6.25e9, "data_bytes": 1.0}) == (
        ", 92% from the cache, 3 retries, GPU 87%, GPU memory 40%, 6.2 GB, disk 91% full"
    )


def test_a_resumed_history_goes_on_in_time():
    mine = Recorder([{"step": 5, "loss": 1.0, "seconds": 100.0}], None, num_steps=10)
    mine.record(6, {"loss": 0.9}, num_steps=1, num_samples=1)
    assert mine.history[1]["seconds"] >= 100.0


def test_a_long_history_is_thinned_and_keeps_its_end(monkeypatch):
    monkeypatch.setattr(recorder, "MAX_POINTS", 64)
    mine = Recorder([], None, num_steps=1000)
    for step in range(1, 1001):
        mine.record(step, {"loss": 1.0 / step}, num_steps=1, num_samples=1)
    steps = [point["step"] for point in mine.history]
    assert len(steps) <= 64 and steps == sorted(steps) and steps[-1] == 1000


def test_a_thinned_history_is_as_dense_at_its_beginning_as_later_and_never_loses_its_end(monkeypatch):
    monkeypatch.setattr(recorder, "MAX_POINTS", 64)
    mine = Recorder([], None, num_steps=10_000)
    for number in range(1, 5001):
        mine.record(10 * number, {"loss": 1.0}, num_steps=10, num_samples=1)
        assert mine.history[-1]["step"] == 10 * number and len(mine.history) <= 64
        if number % 97 == 0:  # resumed from a checkpoint
            mine = Recorder(mine.history, None, num_steps=10_000)
    steps = [point["step"] for point in mine.history]
    assert steps[0] == 10
    assert max(b - a for a, b in itertools.pairwise(steps)) <= 2 * 50_000 / 16


def test_a_thinned_history_keeps_validations_among_many_points(monkeypatch):
    monkeypatch.setattr(recorder, "MAX_POINTS", 64)
    mine = Recorder([], None, num_steps=1000)
    for step in range(1, 1001):
        mine.record(step, {"loss": 1.0}, num_steps=1, num_samples=1)
        if step % 100 == 0:
            mine.record_validation(step, {"loss": 2.0})
    assert [point["step"] for point in mine.history if "validation/loss" in point] == list(range(100, 1001, 100))


def test_a_validation_that_is_not_finite_is_shown_and_not_kept(capsys):
    tracker = Tracker()
    mine = Recorder([], tracker, num_steps=10)
    mine.record(2, {"loss": 1.5}, num_steps=2, num_samples=64)
    mine.record_validation(2, {"f1": math.nan, "accuracy": 0.5})
    mine.record_validation(2, {"f1": math.nan})
    mine.record_validation(3, {"f1": math.inf})
    assert [sorted(point) for point in mine.history] == [
        ["loss", "samples_per_second", "seconds", "step", "validation/accuracy"]
    ]
    assert tracker.logged[1:] == [(2, {"validation/accuracy": 0.5})]
    assert "validation/f1 nan" in capsys.readouterr().out
    storage.dump_json(mine.history)
