"""`examples/clicks.yaml`, smaller, as a JobSet of a real cluster: whatever goes, no update is lost."""

import io
import json
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from e2e.commands import kftrain, running
from e2e.namespace import wait_until
from helpers import clicks
from helpers.jobs import losses

from kftrain.core import storage
from kftrain.core.credentials import SERVER_SECRET_VARIABLE
from kftrain.run import attempts, documents
from kftrain.run.documents import Completion
from kftrain.run.paths import RunPaths

pytestmark = pytest.mark.timeout(1200, func_only=True)

EXAMPLE = Path(__file__).parents[2] / "examples" / "clicks.yaml"
SECRET = "kftrain-servers"
STEPS = 800
SMALL = {
    "data.source": "helpers.clicks:records",
    "data.validation_fraction": 0.3,
    "task.num_fields": 3,
    "model.dim": 4,
    "server.tables": "[{name: ids, dim: 4, optimizer: row_wise_adagrad, learning_rate: 0.1}]",
    "train.steps": STEPS,
    "train.global_batch_size": 64,
    "train.log_interval_steps": 1,
    "checkpoint.interval_steps": 200,
    "evaluate.interval_steps": 0,
    "launch.nodes": 2,
    "launch.processes_per_node": 1,
    "launch.backend": "jobset",
    "launch.kubernetes.secrets": f"[kftrain-storage, {SECRET}]",
    "launch.kubernetes.cpu": "250m",
}


@pytest.fixture(scope="module")
def secret(namespace):
    """What workers and servers prove to each other that they know."""
    value = secrets.token_hex(32)
    namespace.create_secret(SECRET, {SERVER_SECRET_VARIABLE: value})
    return value


PREDICT = """
import json, sys, mlflow, pandas
rows = pandas.DataFrame({"ids": json.loads(sys.argv[1])})
answer = mlflow.pyfunc.load_model("models:/clicks@champion").predict(rows)
print(json.dumps(answer["probability"].tolist()))
"""


def options(settings, **more):
    pairs = {**settings, **SMALL, **more}
    return ["--config", EXAMPLE, *(part for key, value in pairs.items() for part in ("--set", f"{key}={value}"))]


def prepare(settings, folder):
    return kftrain("shard", *options(settings), folder=folder)["run_uri"]


@pytest.fixture(scope="module")
def whole(settings, secret, tmp_path_factory):
    """A run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
        run_uri = prepare(settings, folder)
        kftrain("train", run_uri, folder=folder)
    return run_uri


def find_pod(namespace, run_uri, role, number):
    """The pod of a role with this number that runs."""
    run = f"kftrain.io/run={RunPaths(run_uri).run_id},jobset.sigs.k8s.io/replicatedjob-name={role}"
    selector = f"{run},batch.kubernetes.io/job-completion-index={number}"
    running_pods = (name for name, pod in namespace.pods(selector).items() if pod.status.phase == "Running")
    return next(running_pods)


def read_rows(run_uri):
    """Every number of every row of the last checkpoint, ordered by key."""
    uri = documents.read(Completion, RunPaths(run_uri).complete).checkpoint_uri
    names = [name for name in storage.list_names(uri) if name.endswith("-ids-rows.npy")]
    assert len(names) == 2, names
    rows = np.concatenate([np.load(io.BytesIO(storage.read_bytes(storage.join(uri, name)))) for name in names])
    return rows[np.argsort(rows["key"])]


def test_a_run_that_loses_pods_of_both_roles_has_the_tables_of_one_that_does_not(
    settings, namespace, secret, whole, monkeypatch, tmp_path
):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    run_uri = prepare(settings, tmp_path)
    with running("train", run_uri, folder=tmp_path) as command:
        command.wait_for("checkpoint at step 200 committed", 300)
        namespace.delete_pod(find_pod(namespace, run_uri, "worker", 1), grace_seconds=0)
        command.wait_for("attempt 2:", 300)
        command.wait_for("checkpoint at step 400 committed", 300)
        # At once: one that is told to go serves until its grace is over, in which these steps may end.
        namespace.delete_pod(find_pod(namespace, run_uri, "server", 1), grace_seconds=0)
        command.wait_for("attempt 3:", 300)
        command.finish()
    assert sorted(losses(RunPaths(run_uri))) == list(range(1, STEPS + 1))
    assert attempts.find_last_attempt(RunPaths(run_uri)) == 3
    assert len(read_rows(run_uri)) and read_rows(run_uri).tobytes() == read_rows(whole).tobytes()
    assert secret not in command.output
    wait_until(lambda: not namespace.pods(), 120, "the end of the pods")


def test_a_run_that_is_stopped_goes_on_with_one_server_more_is_registered_and_answers(
    settings, namespace, secret, whole, monkeypatch, tmp_path
):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    one = options(settings, **{"server.num_servers": 1, "evaluate.num_bootstrap": 100})
    with running("run", *one, folder=tmp_path) as command:
        line = command.wait_for("checkpoint at step 400 committed", 600)
        run_uri = command.wait_for("run clicks").split(" in ")[1].split()[0]
        command.process.send_signal(signal.SIGTERM)
        command.process.wait(300)
    assert line and documents.read_if_exists(Completion, RunPaths(run_uri).complete) is None
    more = ["--set", "server.num_servers=2", "--set", "launch.kubernetes.cpu=200m"]
    with running("run", "--resume", run_uri, *more, folder=tmp_path) as command:
        command.finish(seconds=900)
    assert sorted(losses(RunPaths(run_uri))) == list(range(1, STEPS + 1))
    assert len(read_rows(run_uri)) and read_rows(run_uri).tobytes() == read_rows(whole).tobytes()
    ids = [record.fields["ids"].tolist() for record, _ in zip(clicks.records(), range(5), strict=False)]
    environment = {**os.environ, "MLFLOW_TRACKING_URI": settings["tracking.uri"]}
    command = [sys.executable, "-P", "-c", PREDICT, json.dumps([*ids, [1, 2, 3]])]  # nobody has seen the last ones
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert len(answer) == 6 and all(0 < one < 1 for one in answer) and len(set(answer)) == 6
    wait_until(lambda: not namespace.pods(), 120, "the end of the pods")
