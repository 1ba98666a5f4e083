"""What Kubeflow Trainer is told of a training, by a server of ours with a certificate of its own."""

import http.server
import json
import ssl
import subprocess
import threading
from datetime import datetime, timezone

import pytest
from helpers.launching import wait_until

from kftrain.train import trainer_status
from kftrain.train.recorder import Recorder
from kftrain.train.trainer_status import TrainerStatus, build_status

NOW = datetime(2026, 11, 27, tzinfo=timezone.utc)


class StatusServer:
    """The manager's server: keeps what comes, and answers as often with an error as it is told to."""

    def __init__(self, folder):
        self.requests = []
        self.errors = []
        key, self.certificate = folder / "key.pem", folder / "certificate.pem"
        options = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "1", "-nodes"]
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", *options, "-keyout", key, "-out", self.certificate]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append((self.path, self.headers["Authorization"], body["trainerStatus"]))
                self.send_response(outer.errors.pop() if outer.errors else 200)
                self.end_headers()

            def log_message(self, *arguments):
                pass

        self.server = http.server.ThreadingHTTPServer(("localhost", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, key)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def environment(self):
        return {
            trainer_status.URL_ENV: f"https://localhost:{self.server.server_port}/trainjobs/r/status",
            trainer_status.CERTIFICATE_ENV: str(self.certificate),
            trainer_status.TOKEN_ENV: str(self.certificate.with_name("token")),
        }


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    started = StatusServer(tmp_path_factory.mktemp("trainer"))
    yield started
    started.server.shutdown()
    started.server.server_close()


@pytest.fixture(autouse=True)
def environment(server, monkeypatch):
    server.requests.clear()
    server.certificate.with_name("token").write_text("first\n")
    monkeypatch.setattr(trainer_status, "PAUSE_SECONDS", 0.05)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)


def test_what_is_recorded_is_sent_with_the_token_of_now(server):
    recorder = Recorder([], None, num_steps=4)
    recorder.record(1, {"loss": 1.5}, num_steps=1, num_samples=8)
    wait_until(lambda: server.requests)
    server.certificate.with_name("token").write_text("second\n")
    recorder.record(2, {"loss": 1.25}, num_steps=1, num_samples=8)
    wait_until(lambda: len(server.requests) == 2)
    (path, first, status), (_, second, newer) = server.requests
    assert (path, first, second) == ("/trainjobs/r/status", "Bearer first", "Bearer second")
    assert (status["progressPercentage"], newer["progressPercentage"]) == (25, 50)
    assert status["metrics"][0] == {"name": "loss", "value": "1.5"}
    assert datetime.fromisoformat(status["lastUpdatedTime"]).tzinfo is not None


def test_the_newest_is_sent_after_a_pause_and_the_last_one_at_once(server, monkeypatch):
    monkeypatch.setattr(trainer_status, "PAUSE_SECONDS", 600.0)
    status = TrainerStatus()
    status.report(0, 100, 1.0, {})
    wait_until(lambda: server.requests)
    for step in range(1, 101):
        status.report(step, 100, 1.0, {})
    wait_until(lambda: len(server.requests) == 2)
    assert [sent["progressPercentage"] for *_, sent in server.requests] == [0, 100]


def test_a_manager_that_fails_costs_one_warning_and_no_step(server, capsys):
    server.errors.extend([503, 403])
    status = TrainerStatus()
    for number in (1, 2, 3):
        status.report(number, 4, 1.0, {})
        wait_until(lambda number=number: len(server.requests) == number)
    output = capsys.readouterr().out
    assert output.count("warning: the TrainJob's status could not be sent") == 1 and "HTTP Error 403" in output


def test_nothing_is_sent_where_nobody_asks(server, monkeypatch):
    monkeypatch.delenv(trainer_status.TOKEN_ENV)
    status = TrainerStatus()
    status.report(1, 1, 0.0, {})
    assert status._thread is None and not server.requests


def test_the_limits_of_the_definition_are_kept():
    metrics = {"n" * 100: float("nan"), **{f"m{number}": 1 / 3 for number in range(300)}, "": 1.0}
    status = build_status(7, 9, 1e18, metrics, NOW)["trainerStatus"]
    assert status["progressPercentage"] == 77 and status["estimatedRemainingSeconds"] == 2**31 - 1
    assert status["metrics"][:2] == [{"name": "n" * 64, "value": "nan"}, {"name": "m0", "value": "0.333333"}]
    assert len(status["metrics"]) == 256 and status["lastUpdatedTime"] == "2026-11-27T00:00:00+00:00"
