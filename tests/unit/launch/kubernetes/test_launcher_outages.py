"""A launcher whose API server refuses, breaks connections or is away: training must not notice."""

import contextlib
import os
import socket
import threading
from pathlib import Path

import pytest
from helpers.fakes.api_server import LOST, RESET, kubeconfig
from helpers.fakes.clock import Clock
from helpers.launching import JOB, WORKERS, job_client, wait_until

from kftrain.core import outages
from kftrain.errors import LaunchError
from kftrain.launch.kubernetes import client, retry, watcher

AWAY, BACK = "the API server does not answer (", "the API server answers again"

CALLS = {
    "create": ("POST", "/pytorchjobs"),
    "read": ("GET", f"/pytorchjobs/{JOB}"),
    "list pods": ("GET", r"/pods\?labelSelector=[^&]*$"),
    "delete": ("DELETE", f"/pytorchjobs/{JOB}"),
}
"""What a launcher cannot do without."""

EXPLAINING = {
    "annotate": ("PATCH", f"/pytorchjobs/{JOB}"),
    "events": ("GET", "/events"),
    "nodes": ("GET", "/nodes/"),
    "watch": ("GET", "watch=true"),
    "log": ("GET", "/log"),
    "read a pod": ("GET", f"/pods/{WORKERS[0]}$"),
}


@pytest.fixture(autouse=True)
def every_look(monkeypatch, fast):
    """The job is annotated at every look."""
    monkeypatch.setattr(watcher, "ANNOTATE_SECONDS", 0.0)


def run_to_its_end(one, namespace):
    wait_until(namespace.jobs)
    namespace.run_pods(JOB)
    namespace.step(JOB, 1, 20)
    one.wait_for("Training")
    namespace.finish(JOB)
    assert one.finish() == 0
    assert namespace.created == [JOB]


@pytest.mark.parametrize("problem", [429, 500, 503, RESET, LOST])
@pytest.mark.parametrize("call", CALLS)
def test_fault_55_an_error_at_any_call_is_ridden_out(call, problem, launch, server, namespace):
    """HTTP 500 also of the operator's webhook. One line when it begins, one when it is over; exactly one job."""
    headers = {"Retry_After": "0"} if problem == 429 else {}
    server.fail(*CALLS[call], problem, times=3 if problem != LOST else 1, **headers)
    one = launch()
    run_to_its_end(one, namespace)
    assert server.num_failures_left() == 0
    assert one.output.count(AWAY) == one.output.count(BACK) == 1
    if problem == 500:
        assert 'failed calling webhook "validator.pytorchjob"' in one.output


@pytest.mark.parametrize("problem", [429, 500, RESET])
@pytest.mark.parametrize("call", EXPLAINING)
def test_an_error_of_what_only_explains_holds_nothing_up(call, problem, launch, server, namespace, monkeypatch):
    """The webhook of an operator that is away refuses every annotation: training goes on all the same."""
    times = 3 if call == "read a pod" else float("inf")
    if times > 3:
        monkeypatch.setattr(retry, "OUTAGE_SECONDS", 1.0)
    server.fail(*EXPLAINING[call], problem, times=times, Retry_After="0")
    namespace.objects["nodes"]["node-1"] = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    one = launch()
    wait_until(namespace.jobs)
    namespace.make_pods(JOB)
    namespace.run_pod(WORKERS[0])
    namespace.set_pod(WORKERS[0], conditions=[("Ready", "False")], phase="Running", running={})  # its node is in doubt
    one.wait_for(f"Scheduling: {WORKERS[0]} runs on node node-1")
    wait_until(lambda: server.num_failures > 2)
    namespace.finish(JOB)
    assert one.finish() == 0


@pytest.mark.parametrize("call", ["events", "nodes", "annotate", "log", "watch"])
def test_what_is_forbidden_costs_one_warning(call, launch, server, namespace):
    server.fail(*EXPLAINING[call], 403, times=float("inf"))
    one = launch()
    wait_until(namespace.jobs)
    one.wait_for("Scheduling")
    namespace.run_pods(JOB)
    namespace.set_pod(WORKERS[0], conditions=[("Ready", "False")], phase="Running", running={})
    one.wait_for("may not ")
    looks = namespace.num_looks
    wait_until(lambda: namespace.num_looks > looks + 4)
    namespace.finish(JOB)
    assert one.finish() == 0
    assert one.output.count("may not ") == 1, one.output
    if call != "annotate":  # goes on: `kftrain gc` takes a job that nobody has looked at
        assert server.num_failures <= 2, "it is not asked again, by neither of two logs"


def test_what_is_refused_for_good_is_an_error_at_once(launch, server, namespace):
    server.fail("POST", "/pytorchjobs", 403)
    with pytest.raises(LaunchError, match="the API server refused the job: 403 Forbidden"):
        launch().finish()
    assert not namespace.created


def test_credentials_that_were_accepted_before_are_tried_again(server, fast, namespace):
    """A token that is replaced at that moment, or an authenticator that is away."""
    cluster = job_client()
    server.fail("GET", "/pytorchjobs", 401)
    with pytest.raises(LaunchError, match="401 Unauthorized"):
        cluster.read_job("x")
    assert cluster.read_job("x") is None
    server.fail("GET", "/pytorchjobs", 401, times=3)
    assert cluster.read_job("x") is None
    assert server.num_failures_left() == 0


def test_a_right_that_was_there_before_is_missed_for_a_minute(server, fast, namespace, monkeypatch):
    monkeypatch.setattr(retry, "FORBIDDEN_SECONDS", 0.5)
    monkeypatch.setattr(retry, "time", Clock())
    cluster = job_client()
    server.fail("GET", "/pods", 403)
    with pytest.raises(LaunchError, match="403 Forbidden"):
        cluster.list_pods("x")
    assert cluster.list_pods("x") == []
    server.fail("GET", "/pods", 403, times=3)
    assert cluster.list_pods("x") == []
    server.fail("GET", "/pods", 403, times=float("inf"))
    with pytest.raises(LaunchError, match="the pods cannot be listed: 403 Forbidden"):
        cluster.list_pods("x")


def test_a_stream_that_was_allowed_before_is_asked_again(training, server, namespace):
    """All streams break when an API server is restarted, and it may not know the rights yet when they come again."""
    namespace.write(WORKERS[0], "before")
    training.wait_for("worker-0: before")
    server.fail(*EXPLAINING["log"], 403)
    server.cut_streams()
    wait_until(lambda: server.num_failures_left() == 0)
    namespace.write(WORKERS[0], "after")
    training.wait_for("worker-0: after")
    namespace.finish(JOB)
    assert training.finish() == 0 and "may not" not in training.output


def test_a_right_that_is_withdrawn_for_good_costs_one_request_and_later_none(server, fast, namespace, monkeypatch):
    warnings = []
    cluster = job_client(warn=warnings.append)
    assert cluster.list_warnings() == [] and not warnings
    server.fail("GET", "/events", 403, times=float("inf"))
    asked = len(server.requests)
    for _ in range(3):
        assert cluster.list_warnings() == []
    assert (len(server.requests) - asked, warnings) == (3, [])
    monkeypatch.setattr(client, "FORBIDDEN_SECONDS", 0.0)
    for _ in range(3):
        assert cluster.list_warnings() == []
    assert len(server.requests) - asked == 4
    assert [line.startswith("may not list events") for line in warnings] == [True]


@pytest.fixture
def torn_handshakes(monkeypatch, tmp_path):
    """A kubeconfig for a TLS server that closes each connection at once; how many it has closed."""
    closed = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def close_each():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    connection.close()
                    closed.append(1)

        threading.Thread(target=close_each, daemon=True).start()
        path = tmp_path / "kubeconfig"
        path.write_text(kubeconfig(f"https://127.0.0.1:{listener.getsockname()[1]}"))
        monkeypatch.setenv("KUBECONFIG", str(path))
        yield closed
        listener.shutdown(socket.SHUT_RDWR)


def test_handshakes_that_break_are_ridden_out(torn_handshakes, fast, monkeypatch):
    """So it looks when an API server is restarted behind a load balancer that goes on to accept connections."""
    monkeypatch.setattr(retry, "OUTAGE_SECONDS", 0.5)
    monkeypatch.setattr(retry, "time", Clock())
    with pytest.raises(LaunchError, match=r"did not answer for [01] s: 0 .*SSL"):
        job_client().read_job("x")
    assert len(torn_handshakes) > 2


def test_a_server_that_speaks_no_tls_is_an_error_at_once(server, fast, monkeypatch, tmp_path):
    path = tmp_path / "kubeconfig"
    path.write_text(Path(os.environ["KUBECONFIG"]).read_text().replace("http://", "https://"))
    monkeypatch.setenv("KUBECONFIG", str(path))
    with pytest.raises(LaunchError, match="the job cannot be read: 0 SSLError"):
        job_client().read_job("x")


def test_the_lost_answer_of_a_creation_makes_no_second_job(launch, server, namespace):
    server.fail("POST", "/pytorchjobs", LOST)
    one = launch()
    one.wait_for("is there already: following it")
    run_to_its_end(one, namespace)
    assert [path for verb, path in server.requests if verb == "POST"] == 2 * [
        "/apis/kubeflow.org/v1/namespaces/train/pytorchjobs"
    ]


def test_fault_56_the_api_server_is_away_for_a_while(training, server, namespace):
    with server.away():
        training.wait_for(AWAY)
        wait_until(lambda: len(server.requests) > 40)
    training.wait_for(BACK)
    namespace.write(WORKERS[0], "still there")
    training.wait_for("worker-0: still there")
    namespace.finish(JOB)
    assert training.finish() == 0
    assert training.output.count(AWAY) == training.output.count(BACK) == 1, "one line, of all threads together"


def test_an_api_server_that_stays_away_is_an_error(training, server, namespace, monkeypatch):
    monkeypatch.setattr(retry, "OUTAGE_SECONDS", 0.5)
    with server.away(), pytest.raises(LaunchError, match=r"the API server did not answer for \d+ s"):
        training.finish()
    assert "the job may still be there" in training.output
    namespace.delete("pytorchjobs", JOB)


def test_a_server_that_asks_to_wait_is_asked_again_when_it_said(server, fast, monkeypatch):
    """Not sooner, and not by the client library on its own: that would sleep for as long as the server says."""
    monkeypatch.setattr(outages, "MAX_DELAY_SECONDS", 1.5)
    slept = []
    monkeypatch.setattr(retry.RetryPolicy, "_sleep", lambda self, seconds: slept.append(seconds))
    server.fail("GET", "/pytorchjobs", 429, Retry_After="1")
    server.fail("GET", "/pytorchjobs", 429, Retry_After="20")
    assert job_client().read_job("x") is None
    assert slept == [1.0, 1.5]
    assert len(server.requests) == 3


def test_a_broken_connection_is_not_tried_again_behind_our_back(server, fast):
    server.fail("GET", "/pytorchjobs", RESET, times=2)
    assert job_client().read_job("x") is None
    assert len(server.requests) == 3
