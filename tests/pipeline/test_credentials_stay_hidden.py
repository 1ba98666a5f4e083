"""Credentials of a whole run are in nothing that it leaves: an MLflow server with a password, an object store."""

import base64
import os
import subprocess
import sys
from urllib.parse import quote

import pytest
from helpers.documents import DIGITS
from helpers.fakes.mlflow_server import Server
from helpers.fakes.object_store import BUCKET, ObjectStore
from helpers.fakes.proxies import AuthProxy

from kftrain.core import storage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

USER, PASSWORD = "me", "caNAry@1/2 x"
SECRETS = {"AWS_SECRET_ACCESS_KEY": "secretCANary/1+2", "AWS_SESSION_TOKEN": "tokenCAnary=="}
FORMS = ("caNAry", "CANary", "CAnary", base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode())
ROOT = f"s3://{BUCKET}/root"


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory):
    """A server behind a proxy that asks for the password, and the server's folder."""
    folder = tmp_path_factory.mktemp("mlflow")
    server = Server(folder)
    server.start()
    with AuthProxy(server.uri, USER, PASSWORD) as proxy:
        yield proxy, folder
    server.stop()


@pytest.fixture(scope="module")
def store():
    running = ObjectStore()
    running.start()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in running.environment.items():
            patch.setenv(name, value)
        yield running
    running.stop()


@pytest.fixture
def command(tmp_path, mlflow, store, monkeypatch):
    """Runs kftrain with a folder of its own for temporary files; gives the exit code and what it prints."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "c.yaml").write_text(DIGITS)
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments, password=PASSWORD, **overrides):
        uri = f"http://{USER}:{quote(password, safe='')}@127.0.0.1:{mlflow[0].port}"
        settings = {"tracking.uri": uri, "run.storage_root": ROOT, "train.steps": 4, **overrides}
        options = [f"--set={key}={value}" for key, value in settings.items()]
        environment = {**os.environ, **store.environment, **SECRETS, "TMPDIR": str(tmp_path / "tmp")}
        done = subprocess.run(
            [sys.executable, "-m", "kftrain", *arguments, "--config=c.yaml", *options],
            cwd=tmp_path,
            env={**environment, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    return run


def everything(*folders):
    """Name -> content of all files of the folders and of all objects of the store."""
    found = {str(path): path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()}
    return found | {uri: storage.read_bytes(uri) for uri in storage.find(f"s3://{BUCKET}")}


def leaks(contents):
    return [name for name, content in contents.items() if any(form.encode() in content for form in FORMS)]


def test_a_run_with_an_authenticated_server_and_an_object_store_keeps_no_credentials(command, mlflow, tmp_path):
    proxy, folder = mlflow
    code, printed = command("run")
    assert code == 0, printed
    assert proxy.num_allowed > 20
    contents = everything(tmp_path, folder)
    for part in ("/logs/", "server.db", "COMPLETE.json", "/shards/", "config.yaml", ".html", "metrics.json"):
        assert any(part in name for name in contents), f"{part} is not among what is searched"
    assert leaks({**contents, "what it prints": printed.encode()}) == []


def test_a_run_that_the_server_refuses_keeps_no_credentials(command, mlflow, tmp_path):
    proxy, folder = mlflow
    code, printed = command("run", password="caNAry@wrong", **{"run.name": "refused"})
    assert code == 15, printed
    assert proxy.num_refused > 0
    contents = everything(tmp_path, folder)
    assert any("runs/refused" in name and name.endswith("error.json") for name in contents)
    assert leaks({**contents, "what it prints": printed.encode()}) == []


def test_a_run_whose_own_task_raises_with_its_environment_keeps_no_credentials(command, mlflow, tmp_path):
    """As drivers do whose messages quote a URI, a header or a key."""
    (tmp_path / "leaky.py").write_text(
        "import os\n"
        "from kftrain.tasks.image_classification import ImageClassification\n"
        "class Leaky(ImageClassification):\n"
        "    def loss(self, output, batch, weight):\n"
        "        password, key = os.environ['MLFLOW_TRACKING_PASSWORD'], os.environ['AWS_SECRET_ACCESS_KEY']\n"
        "        raise RuntimeError(f'no answer of http://me:{password}@host, signed with {key}')\n"
    )
    code, printed = command("run", **{"run.name": "leaky", "task.kind": "leaky:Leaky"})
    assert code == 16, printed
    contents = everything(tmp_path, mlflow[1])
    assert any("runs/leaky" in name and name.endswith("error.json") for name in contents)
    assert leaks({**contents, "what it prints": printed.encode()}) == []
