"""Addresses: which are refused, how fast, and what is shown of them."""

import socket
import subprocess
import sys

import pytest

from kftrain import tracking
from kftrain.errors import TrackingError
from kftrain.tracking import endpoint, model_client


@pytest.mark.parametrize("uri", ["./mlruns", "/data/mlruns", "file:///data/mlruns", "", "sqlite:///", "mlruns"])
def test_file_stores_are_refused_with_what_to_use_instead(uri):
    with pytest.raises(TrackingError, match=r"sqlite:///mlflow\.db"):
        tracking.check(uri)


@pytest.mark.parametrize(
    "uri", ["sqlite:///mlflow.db", "sqlite:////data/mlflow.db", "http://host:5000", "https://host"]
)
def test_databases_and_servers_are_accepted(uri):
    endpoint.require_supported(uri)


def test_an_unreachable_server_is_reported_without_credentials():
    with socket.socket() as mute, pytest.raises(TrackingError) as caught:
        mute.bind(("127.0.0.1", 0))
        port = mute.getsockname()[1]
        tracking.check(f"http://user:canary@127.0.0.1:{port}")
    assert "canary" not in caught.value.line and f"127.0.0.1:{port}" in caught.value.line


def test_a_server_that_accepts_but_never_answers_is_reported():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(TrackingError, match="does not answer"):
            endpoint.probe(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_seconds=0.2)


def test_credentials_are_removed_from_every_uri_in_a_text():
    text = "request to https://user:secret@host/api failed, not http://a@b/c, but sqlite:////x@y.db"
    assert endpoint.redact(text) == "request to https://host/api failed, not http://b/c, but sqlite:////x@y.db"


@pytest.mark.slow
def test_many_processes_may_create_the_same_database(tmp_path):
    command = [sys.executable, "-c", "import sys; from kftrain.tracking import client; client.ping(sys.argv[1])"]
    uri = f"sqlite:///{tmp_path}/new/mlflow.db"
    processes = [subprocess.Popen([*command, uri], stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors


def test_importing_tracking_imports_no_mlflow():
    code = "import sys, kftrain.tracking, kftrain.registry; sys.exit(bool({'mlflow', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_mlflow_the_error_names_the_extra(tmp_path):
    code = (
        "import sys; sys.modules['mlflow'] = None\n"
        "from kftrain import tracking, errors\n"
        "try: tracking.check(sys.argv[1])\n"
        "except errors.TrackingError as error: print(error.line)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, f"sqlite:///{tmp_path}/x.db"], capture_output=True, text=True, check=True
    )
    assert "pip install 'kftrain[mlflow]'" in answer.stdout


def test_a_database_is_checked_without_mlflow_and_without_creating_it(tmp_path):
    tracking.check(f"sqlite:///{tmp_path}/new/mlflow.db")
    assert not (tmp_path / "new" / "mlflow.db").exists()
    (tmp_path / "text.db").write_text("not a database")
    with pytest.raises(TrackingError, match="not an sqlite database"):
        tracking.check(f"sqlite:///{tmp_path}/text.db")
    (tmp_path / "file").touch()
    with pytest.raises(TrackingError, match="cannot use the database"):
        tracking.check(f"sqlite:///{tmp_path}/file/mlflow.db")


def test_a_database_that_cannot_be_opened_is_given_up_in_seconds(tmp_path, monkeypatch):
    """MLflow would try for 100 s."""
    from mlflow.store.db import utils

    slept = []
    monkeypatch.setattr(utils.time, "sleep", slept.append)
    with pytest.raises(TrackingError, match="unable to open database file"):
        model_client.get_registered_model(f"sqlite:///{tmp_path}", "m")
    assert sum(slept) < 5
