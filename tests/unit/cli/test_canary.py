"""A password that somebody has written into a URI is found nowhere afterwards."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.toy_data import text_folder

from kftrain import cli, config
from kftrain.core import plugins
from kftrain.errors import ConfigError, KftrainError, LaunchError, TrackingError
from kftrain.launch.kubernetes.diagnosis import diagnose
from kftrain.launch.kubernetes.reachable import require_tracking_server
from kftrain.run.best_effort import best_effort
from kftrain.run.error import ErrorDocument
from kftrain.stages import failure, preflight, resolve, runs
from kftrain.tracking.endpoint import require_private_credentials
from kftrain.tracking.runs import flatten
from kftrain.tracking.settings import TrackingConfig
from kftrain.worker import rank

CANARY = "caNAry@1/2"
QUOTED = "caNAry%401%2F2"
VARIABLES = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_a_password_in_the_configuration_is_in_no_file_and_no_line(tmp_path: Path) -> None:
    text_folder(tmp_path / "texts")
    settings = [f"tracking.uri=http://me:{QUOTED}@127.0.0.1:9", f"data.source={tmp_path}/texts"]
    command = [sys.executable, "-m", "kftrain", "shard", "--run", "a-1", *(f"--set={pair}" for pair in settings)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ, check=False)
    assert done.returncode == 15, done.stderr
    assert "does not answer" in done.stderr and "127.0.0.1:9" in done.stderr
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"config.yaml", "error.json"} <= {path.name for path in written}
    texts = [done.stdout, done.stderr, *(path.read_text(errors="replace") for path in written)]
    assert not [text for text in texts if "caNAry" in text]


def test_a_laptops_password_moves_to_the_environment(tmp_path: Path) -> None:
    resolved = resolve.anchor_paths(config.parse("", [f"tracking.uri=https://me:{QUOTED}@host"]), tmp_path)
    assert resolved.tracking.uri == "https://host" and "caNAry" not in resolved.to_yaml()
    assert [os.environ.get(name) for name in VARIABLES] == ["me", CANARY, None]


def test_a_cluster_takes_no_credentials_in_a_uri(tmp_path: Path) -> None:
    for uri in (f"http://me:{QUOTED}@host", "https://TOKEN@host"):
        text = f"launch: {{backend: pytorchjob}}\nrun: {{storage_root: 's3://b'}}\ntracking: {{uri: '{uri}'}}"
        resolved = resolve.anchor_paths(config.parse(text, ["data.source=digits"]), tmp_path)
        with pytest.raises(LaunchError, match="Kubeflow would show the password or token") as caught:
            preflight.require_remote(resolved)
        assert "caNAry" not in caught.value.line and "TOKEN" not in caught.value.line


@pytest.mark.parametrize(
    "override",
    [
        "tracking.uri=https://CANARYTOKEN@host",
        "run.storage_root=s3://key:CANARYTOKEN@bucket",
        "data.source=https://host/x.jsonl?X-Amz-Signature=CANARYTOKEN",
        "task.tokenizer=https://me:CANARYTOKEN@host/tokenizer.json",
        "task.tokenizer.uri=https://me:CANARYTOKEN@host/tokenizer.json",
        "evaluate.reference=simplecache::https://me:CANARYTOKEN@host/data",
        "registry.trusted_roots=['s3://ok', 's3://key:CANARYTOKEN@bucket']",
        "launch.kubernetes.trainer_image=https://me:CANARYTOKEN@registry/trainer",
        "launch.kubernetes.volumes=[{name: a, csi: {volumeAttributes: {source: 'https://h/x?sig=CANARYTOKEN'}}}]",
        "tracking.kubeflow_url=https://me:CANARYTOKEN@kubeflow",
    ],
)
def test_a_run_that_would_keep_credentials_is_refused_before_it_is_written(override: str) -> None:
    with pytest.raises(ConfigError, match="a URI with credentials") as caught:
        preflight.check_credentials(config.parse("", [override]))
    assert "CANARYTOKEN" not in caught.value.line
    with pytest.raises(LaunchError, match="show the password") as caught_too:
        preflight._require_no_password(config.parse("", [override]))
    assert "CANARYTOKEN" not in caught_too.value.line


def test_values_that_are_shown_or_recorded_hold_none() -> None:
    uri = f"postgresql://me:{CANARY}@host/db"
    assert "caNAry" not in "".join(flatten({"tracking": {"uri": uri}}).values())
    for raises in (
        lambda: preflight.check_writable(config.parse("", ["run.storage_root='nodriver://me:caNAry@h'"])),
        lambda: require_tracking_server(config.parse("", [f"tracking.uri='{uri}'"]), "pods"),
    ):
        with pytest.raises((ConfigError, LaunchError)) as caught:
            raises()
        assert "caNAry" not in caught.value.line


@pytest.mark.parametrize(
    ("uri", "allowed", "refused"),
    [
        ("http://mlflow.example:5000", False, True),
        ("http://mlflow.example:5000", True, False),
        ("https://mlflow.example", False, False),
        *[(f"http://{host}:5000", False, False) for host in ("localhost", "127.0.0.1", "127.8.8.8", "[::1]")],
        *[(f"http://{host}:5000", False, True) for host in ("localhost.example", "127.0.0.1.example", "10.0.0.1")],
        ("sqlite:///mlflow.db", False, False),
    ],
)
@pytest.mark.parametrize("variables", [VARIABLES[:2], VARIABLES[2:]])
def test_credentials_cross_no_network_in_plain_text(
    uri: str, allowed: bool, refused: bool, variables: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    tracking = TrackingConfig(uri=uri, allow_credentials_over_http=allowed)
    require_private_credentials(tracking)
    for name in variables:
        monkeypatch.setenv(name, CANARY)
    if not refused:
        require_private_credentials(tracking)
        return
    with pytest.raises(TrackingError, match=r"plain http.*allow_credentials_over_http") as caught:
        require_private_credentials(tracking)
    assert "caNAry" not in caught.value.line


def drivers_call(*arguments: object) -> None:
    key = os.environ["AWS_SECRET_ACCESS_KEY"]
    raise RuntimeError(f"no answer of postgresql://me:{CANARY}@host, signed with {key}")


def drivers_error() -> RuntimeError:
    with pytest.raises(RuntimeError) as caught:
        drivers_call()
    return caught.value


def in_user_code() -> None:
    with plugins.user_code("task.loss"):
        drivers_call()


def in_a_rank() -> None:
    rank.report_error(drivers_error())
    raise KftrainError("as reported")


def in_a_command() -> None:
    cli.main(["runs", "/nowhere"])


def in_a_step() -> None:
    failure._show_in_one_line(RuntimeError, drivers_error(), None)
    raise KftrainError("as shown")


@pytest.mark.parametrize("place", [in_user_code, in_a_rank, in_a_command, in_a_step])
def test_tracebacks_hold_none(
    place: Callable[[], None], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "caNAry/secret")
    monkeypatch.setattr(runs, "list_runs", drivers_call)
    with pytest.raises((KftrainError, SystemExit, RuntimeError)) as caught:
        place()
    shown = capfd.readouterr().err
    assert "Traceback" in shown and "no answer of postgresql://" in shown
    assert "caNAry" not in shown
    assert not isinstance(caught.value, RuntimeError), "Python would print it"


def test_what_workers_and_drivers_said_last_holds_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It goes into the report of a failure, into annotations, and to the console."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "caNAry/secret")
    said = str(drivers_error())
    for error in (ErrorDocument.salvage({"kind": "X", "exit_code": 1, "line": said}), None):
        found = diagnose("train", error, [], {"worker-0": ["step 1", said]})
        assert found.last_lines[0] == "step 1" and "postgresql://" in found.last_lines[1]
        assert "caNAry" not in str(found.to_dict())
    with best_effort("the attempts could not be read"):
        raise OSError(str(drivers_error()))
    shown = capsys.readouterr().out
    assert "could not be read: OSError: no answer of postgresql://" in shown and "caNAry" not in shown
