"""The whole pipeline with everything in an object store: a real S3 server, and SIGKILL in the middle."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from helpers import ports
from helpers.documents import DIGITS
from helpers.fakes.object_store import BUCKET, ObjectStore
from helpers.jobs import losses

from kftrain.core import storage
from kftrain.run import commit
from kftrain.run.documents import Registration, read
from kftrain.run.paths import RunPaths

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = f"s3://{BUCKET}/root"
OTHER = ["--set", "registry.model_name=other"]
"""A registered model belongs to one storage root."""


@pytest.fixture(scope="module")
def store():
    running = ObjectStore()
    running.start()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**running.environment, "OMP_NUM_THREADS": "1"}.items():
            patch.setenv(name, value)
        yield running
    running.stop()


def kftrain(folder, *arguments):
    command = [sys.executable, "-m", "kftrain", *arguments]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_files_are_created_once_published_whole_and_listed(store):
    uri = f"{ROOT}/claims/1.json"
    storage.create_json(uri, {"n": 1})
    with pytest.raises(FileExistsError):
        storage.create_json(uri, {"n": 2})
    assert storage.read_json(uri) == {"n": 1}
    storage.publish_json(uri, {"n": 3})
    assert storage.read_json(uri) == {"n": 3}
    assert storage.list_names(f"{ROOT}/claims") == ["1.json"]
    with storage.new_folder(f"{ROOT}/folder") as folder:
        (folder / "a").write_text("a")
    assert storage.list_names(f"{ROOT}/folder") == ["a"]
    storage.remove(f"{ROOT}/folder")
    assert not storage.exists(f"{ROOT}/folder/a") and storage.list_names(f"{ROOT}/folder") == []


def test_a_killed_run_goes_on_from_the_object_store_and_equals_one_that_was_left_alone(store, tmp_path):
    (tmp_path / "c.yaml").write_text(DIGITS)
    overrides = [f"run.storage_root={ROOT}", "train.steps=100", "train.log_interval_steps=1"]
    overrides += ["checkpoint.interval_steps=10", "checkpoint.asynchronous=false"]
    options = [part for override in overrides for part in ("--set", override)]
    first = kftrain(tmp_path, "run", "--config", "c.yaml", *options)
    lines = []
    for line in first.stdout:
        lines.append(line)
        if line.startswith("checkpoint at step 20"):
            break
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    uri = next(line.split(" in ")[1].strip() for line in lines if line.startswith("run ") and " in " in line)
    paths = RunPaths(uri)
    assert uri.startswith(ROOT) and not storage.exists(paths.complete)

    second = kftrain(tmp_path, "run", "--resume", uri)
    output = second.communicate(timeout=900)[0]
    assert second.returncode == 0, output
    assert "going on after step" in output
    assert read(Registration, paths.registration).promoted
    assert commit.find_last_step(paths) == 100
    assert "<html" in storage.read_text(paths.report)

    reference = kftrain(
        tmp_path, "run", "--config", "c.yaml", *options, "--set", f"run.storage_root={tmp_path}/local", *OTHER
    )
    output = reference.communicate(timeout=900)[0]
    assert reference.returncode == 0, output
    (uninterrupted,) = (tmp_path / "local" / "runs").iterdir()
    assert losses(paths) == losses(RunPaths(str(uninterrupted)))
    assert list(losses(paths)) == list(range(1, 101))


MODEL = "models:/served@champion"
STRANGER = f"""
import json, mlflow, pandas, pathlib
folder = pathlib.Path(mlflow.artifacts.download_artifacts({MODEL!r}))
request = (folder / "serving_input_example.json").read_text()
split = json.loads(request)["dataframe_split"]
answer = mlflow.pyfunc.load_model({MODEL!r}).predict(pandas.DataFrame(split["data"], columns=split["columns"]))
print(json.dumps([request, (folder / "requirements.txt").read_text(), answer.to_dict("records")]))
"""


def test_a_version_whose_weights_lie_in_the_object_store_is_loaded_and_served(store, tmp_path, monkeypatch):
    """By processes that know MLflow's address and the store's credentials, and nothing else of the run."""
    (tmp_path / "c.yaml").write_text(DIGITS)
    tracking = f"sqlite:///{tmp_path}/mlflow.db"
    overrides = [f"run.storage_root=s3://{BUCKET}/served", f"tracking.uri={tracking}", "registry.model_name=served"]
    run = kftrain(
        tmp_path, "run", "--config", "c.yaml", *(part for override in overrides for part in ("--set", override))
    )
    output = run.communicate(timeout=900)[0]
    assert run.returncode == 0, output

    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking)
    (tmp_path / "elsewhere").mkdir()
    command = [sys.executable, "-P", "-c", STRANGER]
    done = subprocess.run(command, cwd=tmp_path / "elsewhere", capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    request, requirements, answer = json.loads(done.stdout.splitlines()[-1])
    assert "s3fs==" in requirements and "botocore==" in requirements
    assert sum(answer[0].values()) == pytest.approx(1.0, abs=1e-5)
    with served(tmp_path / "elsewhere") as url:
        headers = {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, request.encode(), headers), timeout=200) as reply:
            [row] = json.load(reply)["predictions"]
    assert row == pytest.approx(answer[0], abs=1e-6)


@contextlib.contextmanager
def served(folder):
    """`mlflow models serve` with the packages that are here; its address, once it answers."""
    held = ports.Held()
    port = held.number
    options = ["-m", MODEL, "--env-manager", "local", "--host", "127.0.0.1", "--port", str(port)]
    command = [sys.executable, "-P", "-m", "mlflow", "models", "serve", *options]
    with (folder / "log").open("w") as log:
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        server = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 200
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/ping", timeout=10):
                break
            assert server.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/invocations"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        del held
