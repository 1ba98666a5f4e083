"""Tracking and registry against a real `mlflow server` process, which is stopped and started under way."""

import time

import pytest

from kftrain import registry, tracking
from kftrain.errors import TrackingError
from kftrain.tracking import client, model_client

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


def history(uri, run_id, key):
    import mlflow

    points = mlflow.MlflowClient(tracking_uri=uri).get_metric_history(run_id, key)
    return sorted((point.step, point.value) for point in points)


def test_models_are_registered_promoted_and_loaded_through_a_server(server, tmp_path, make_config, finish):
    config = make_config(server.uri, tmp_path / "root")
    tracking.check(server.uri)
    first, second = finish(config, "one", 0.6), finish(config, "two", 0.7)
    assert first.submit().promoted and second.submit().promoted
    assert second.register().version == 2
    assert model_client.get_aliases(server.uri, "toy") == {"champion": 2, "previous_champion": 1}
    assert model_client.get_version(server.uri, "toy", 2).source.startswith("models:/m-")
    assert registry.rollback(config).version == 1 and registry.audit(config) == []
    tracking.log_text(server.uri, first.mlflow_run_id, "report", "report.html")
    tracking.finish_run(server.uri, first.mlflow_run_id, "FINISHED")
    assert client.read_run(server.uri, first.mlflow_run_id).status == "FINISHED"


def test_an_outage_of_the_server_neither_blocks_nor_loses_nor_repeats_a_point(server, tmp_path, make_config, finish):
    config = make_config(server.uri, tmp_path / "root")
    run_id = finish(config, "run", 0.5).mlflow_run_id
    tracker = tracking.open_tracker(server.uri, run_id, tmp_path / "spool.jsonl")
    for step in range(100):
        tracker.log_metrics({"loss": step / 2}, step)
    while len(history(server.uri, run_id, "loss")) < 100:
        time.sleep(0.2)
    server.stop()
    for step in range(100, 3000):
        tracker.log_metrics({"loss": step / 2}, step)
    with pytest.raises(TrackingError, match="does not answer"):
        tracking.check(server.uri)
    with pytest.raises(TrackingError, match=r"start it, or check tracking\.uri"):
        registry.champion(config)
    tracker.close(0.5)
    tracker._thread.join(240)  # what it has is on the disk
    assert (tmp_path / "spool.jsonl").stat().st_size > 0
    server.start()
    resumed = tracking.open_tracker(server.uri, run_id, tmp_path / "spool.jsonl")
    for step in range(2500, 3200):
        resumed.log_metrics({"loss": step / 2}, step)
    resumed.close(400)
    assert history(server.uri, run_id, "loss") == [(step, step / 2) for step in range(3200)]
    assert tracker.num_dropped == resumed.num_dropped == 0
