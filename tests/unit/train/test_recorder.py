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
