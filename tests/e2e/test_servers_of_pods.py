"""`examples/clicks.yaml`, smaller, as a JobSet of a real cluster: pods of both roles go, and no update is lost."""

import io
import secrets
from pathlib import Path

import numpy as np
import pytest
from e2e.commands import kftrain, running
from e2e.namespace import wait_until
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


def prepare(settings, folder):
    overrides = (part for key, value in {**settings, **SMALL}.items() for part in ("--set", f"{key}={value}"))
    return kftrain("shard", "--config", EXAMPLE, *overrides, folder=folder)["run_uri"]


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
    settings, namespace, secret, monkeypatch, tmp_path
):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    whole, run_uri = prepare(settings, tmp_path), prepare(settings, tmp_path)
    kftrain("train", whole, folder=tmp_path)
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
