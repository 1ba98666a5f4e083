"""What is sent to Kubeflow, compiled for it, or answered by it holds no credentials."""

import json

import pytest
from helpers.fakes.kfp_server import RUN_ID, run

from kftrain import cli

CONFIG = """
run: {name: lm, storage_root: "s3://bucket/root"}
tracking: {uri: "https://mlflow.example"}
launch: {backend: pytorchjob, nodes: 2}
"""
SECRETS = {
    "KFP_EXISTING_TOKEN": "caNAry.token-1",
    "AWS_SECRET_ACCESS_KEY": "caNAry/secret+2",
    "AWS_SESSION_TOKEN": "caNAry/session=3",
    "MLFLOW_TRACKING_USERNAME": "me",
    "MLFLOW_TRACKING_PASSWORD": "caNAry@4 x",
}


@pytest.fixture(autouse=True)
def environment(nobody_logged_in, monkeypatch, tmp_path):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(CONFIG)


@pytest.fixture
def call(capfd):
    def run_command(*arguments):
        with pytest.raises(SystemExit) as caught:
            cli.main(list(arguments))
        return caught.value.code, "".join(capfd.readouterr())

    return run_command


def sent(server):
    """Everything but the header by which the token is meant to go."""
    kept = [{k: v for k, v in request.headers.items() if k != "Authorization"} for request in server.requests]
    return json.dumps([{**vars(request), "headers": each} for request, each in zip(server.requests, kept, strict=True)])


def test_what_is_submitted(server, call, tmp_path):
    server.script = [run("FAILED", {"train": "FAILED"})]
    code, shown = call("submit", "--config=c.yaml", "--host", server.url, "--wait")
    assert code == 13 and RUN_ID in shown
    assert server.requests[-1].headers["Authorization"] == "Bearer caNAry.token-1", "it is sent, where it belongs"
    assert len(server.runs) == 1 and "storage_root" in sent(server)
    assert "caNAry" not in sent(server) + shown


@pytest.mark.parametrize("status", [401, 403, 500])
def test_a_server_that_quotes_what_it_was_sent(status, server, call):
    server.answers["GET", "/pipelines/names/kftrain-train"] = (
        status,
        {
            "error": "no access with Authorization: Bearer caNAry.token-1, which is caNAry.token-1",
            "message": "https://me:caNAry@4 x@host",
        },
    )
    code, shown = call("submit", "--config=c.yaml", "--host", server.url)
    assert code not in (0, 1) and "error" in shown
    assert "caNAry" not in shown


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("tracking.uri", "https://me:caNAry%404@mlflow.example"),
        ("tracking.uri", "https://caNAryTOKEN@mlflow.example"),
        ("run.storage_root", "s3://key:caNAry@bucket/root"),
        ("data.source", "https://host/x.jsonl?X-Amz-Signature=caNAry"),
    ],
)
def test_what_would_be_kept_is_refused_before_anything_is_sent(option, value, server, call):
    code, shown = call("submit", "--config=c.yaml", "--host", server.url, f"--set={option}='{value}'")
    assert code in (10, 13), shown
    assert server.requests == [] and "caNAry" not in shown


def test_a_host_with_a_password(server, call):
    """Of the UI: it is recorded with the run, as the place where people find it."""
    code, shown = call("submit", "--config=c.yaml", "--host", server.url.replace("://", "://me:caNAry@"), "--dry-run")
    assert code == 0, shown
    assert "caNAry" not in shown


@pytest.mark.parametrize("arguments", ["submit --config=c.yaml --dry-run", "compile -o p.yaml", "config show"])
def test_what_is_written(arguments, call, tmp_path):
    code, shown = call(*arguments.split())
    assert code == 0, shown
    written = {path.name: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert "caNAry" not in shown + "".join(written.values())


@pytest.mark.parametrize("how", [[], ["--json"], ["--for-kubeflow"]])
def test_config_show_of_credentials_that_somebody_has_written(how, call):
    _, shown = call("config", "show", *how, "--set", "tracking.uri='https://me:caNAry%404@mlflow.example'")
    assert "mlflow.example" in shown
    assert "caNAry" not in shown
