"""The tracker against a server that fails, hangs and forgets, and its history against what was logged."""

import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kftrain.errors import TrackingError
from kftrain.tracking import client, tracker
from kftrain.tracking.base import Point, clean_metric_name
from kftrain.tracking.spool import Spool
from kftrain.tracking.tracker import MlflowTracker, open_tracker

LIMIT_SECONDS = 200.0
"""For what takes a moment on a machine that does not pause."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(tracker, "FLUSH_INTERVAL_SECONDS", 0.005)
    monkeypatch.setattr(tracker, "MAX_BACKOFF_SECONDS", 0.01)


class Server:
    """Records points; fails as told: before or after recording."""

    def __init__(self, failures=()):
        self.points = []
        self.tags = {}
        self.questions = 0
        self.failures = list(failures)
        self.asked = threading.Event()
        self.open = threading.Event()
        self.open.set()

    def send(self, points, tags):
        self.asked.set()
        assert self.open.wait(LIMIT_SECONDS)
        failure = self.failures.pop(0) if self.failures else ""
        if failure != "refused":
            self.points += points
            self.tags |= tags
        if failure:
            raise TrackingError(failure)

    def highest_steps(self):
        self.questions += 1
        highest = {}
        for point in self.points:
            highest[point.key] = max(point.step, highest.get(point.key, -1))
        return highest

    def history(self):
        return sorted((point.key, point.step, point.value) for point in self.points)


def log(server, spool, steps, close_seconds=LIMIT_SECONDS):
    opened = MlflowTracker(server.send, server.highest_steps, spool)
    for step in steps:
        opened.log_metrics({"loss": step / 2, "speed": 1.0}, step)
    opened.close(close_seconds)
    opened._thread.join(LIMIT_SECONDS)  # one that was told to hurry may not be through
    return opened


def expected(steps):
    return sorted((key, step, value) for step in steps for key, value in (("loss", step / 2), ("speed", 1.0)))


@settings(derandomize=True, max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(["", "refused", "lost"]), max_size=6))
def test_every_point_is_recorded_exactly_once_however_the_server_fails(tmp_path, failures):
    spool = tmp_path / "spool.jsonl"
    spool.unlink(missing_ok=True)
    server = Server(failures)
    log(server, spool, range(50))
    assert server.history() == expected(range(50))
    assert spool.read_bytes() == b""


def test_a_resume_from_an_earlier_step_repeats_no_point(tmp_path):
    server = Server()
    log(server, tmp_path / "a", range(0, 30))
    log(server, tmp_path / "b", range(20, 40))
    assert server.history() == expected(range(40))
    assert server.questions == 2


def test_an_outage_delays_points_and_the_next_process_delivers_them(tmp_path):
    spool = tmp_path / "folder" / "spool.jsonl"
    server = Server(["refused"] * 100_000)
    opened = log(server, spool, range(10), close_seconds=0.1)
    assert server.points == [] and opened.num_dropped == 0
    with spool.open("ab") as stream:
        stream.write(b'{"key": "loss", "val')
    server.failures.clear()
    log(server, spool, range(10, 15))
    assert server.history() == expected(range(15))


def test_a_hanging_server_blocks_neither_logging_nor_closing_and_what_does_not_fit_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(tracker, "QUEUE_LENGTH", 4)
    server = Server()
    server.open.clear()
    opened = MlflowTracker(server.send, server.highest_steps, tmp_path / "spool")
    opened.log_metrics({"loss": 1.0}, 0)
    assert server.asked.wait(LIMIT_SECONDS)
    for step in range(1, 11):
        opened.log_metrics({"loss": 1.0, "speed": 1.0}, step)
    opened.close(0.05)
    assert opened.num_dropped == 2 * (10 - 4)
    server.open.set()


def test_values_that_are_not_finite_become_a_tag_that_names_the_first(tmp_path):
    server = Server()
    opened = MlflowTracker(server.send, server.highest_steps, tmp_path / "spool")
    for step, loss in enumerate([1.0, float("nan"), float("inf")]):
        opened.log_metrics({"loss": loss, "speed": 2.0}, step)
    opened.close(LIMIT_SECONDS)
    assert server.history() == [("loss", 0, 1.0), ("speed", 0, 2.0), ("speed", 1, 2.0), ("speed", 2, 2.0)]
    assert server.tags == {"nonfinite": "loss=nan at step 1"}


def test_a_value_that_is_no_number_is_counted_and_stops_nothing(tmp_path):
    server = Server()
    opened = MlflowTracker(server.send, server.highest_steps, tmp_path / "spool")
    opened.log_metrics({"loss": "low", "speed": 1.0}, 0)
    opened.close(LIMIT_SECONDS)
    assert (server.history(), opened.num_dropped) == ([("speed", 0, 1.0)], 1)


def test_with_a_full_disk_points_go_straight_to_the_server(tmp_path, monkeypatch):
    def full(self, points):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Spool, "append", full)
    server = Server()
    log(server, tmp_path / "spool", range(5))
    assert server.history() == expected(range(5))


def test_a_spool_that_cannot_be_written_is_reported_at_once(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(TrackingError, match="cannot keep metrics on disk"):
        open_tracker("sqlite:///x.db", "run", tmp_path / "file" / "spool")


def test_points_come_out_of_the_spool_in_order_and_only_once(tmp_path):
    spool = Spool(tmp_path / "spool")
    points = [Point("loss", float(i), i, 0) for i in range(5)]
    spool.append(points[:3])
    first, num_bytes = spool.peek(2)
    spool.take(num_bytes)
    spool.append(points[3:])
    assert (first, len(spool)) == (points[:2], 3)
    rest, num_bytes = spool.peek(100)
    spool.take(num_bytes)
    assert rest == points[2:] and spool.empty and (tmp_path / "spool").stat().st_size == 0


@pytest.mark.parametrize(
    ("name", "accepted"),
    [("accuracy@5", "accuracy_5"), ("a/../b", "a/__/b"), ("/loss//x/", "loss/x"), ("x" * 300, "x" * 250), ("", "_")],
)
def test_names_become_ones_that_mlflow_takes(name, accepted):
    assert clean_metric_name(name) == accepted


def test_history_in_mlflow_equals_what_was_logged(uri, tmp_path):
    import mlflow

    experiment = client.ensure_experiment(uri, "x", str(tmp_path / "mlruns"))
    run_id = client.create_run(uri, experiment, "run", {})
    for steps in (range(0, 1500), range(1200, 1600)):
        opened = open_tracker(uri, run_id, tmp_path / "spool")
        for step in steps:
            opened.log_metrics({"loss": step / 2, "odd:name@5": float(step)}, step)
        opened.log_metrics({"loss": float("nan")}, 9999)
        opened.close(LIMIT_SECONDS)
    reader = mlflow.MlflowClient(tracking_uri=uri)
    history = [(point.step, point.value) for point in reader.get_metric_history(run_id, "loss")]
    assert history == [(step, step / 2) for step in range(1600)]
    assert len(reader.get_metric_history(run_id, "odd_name_5")) == 1600
    assert reader.get_run(run_id).data.tags["nonfinite"] == "loss=nan at step 9999"
