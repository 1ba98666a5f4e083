"""Sharding on the pods of an Indexed Job: the dataset is that of one process, whoever dies on the way."""

import json
import random
import shutil
import subprocess
import sys

import pytest
from e2e.commands import kftrain, options, running
from e2e.namespace import wait_until
from helpers.fakes.object_store import BUCKET
from kubernetes import client

from kftrain.core import storage

pytestmark = pytest.mark.timeout(900, func_only=True)

FILES, FILE_BYTES = 40, 1 << 20
"""More than pays for two pods."""


@pytest.fixture(scope="module")
def source(store):
    """Texts in the object store."""
    chance, uri = random.Random(0), f"s3://{BUCKET}/texts"
    words = [bytes(chance.choices(b"abcdefghijklmnopqrstuvwxyz", k=chance.randint(2, 9))) for _ in range(5000)]
    for number in range(FILES):
        text = b" ".join(chance.choices(words, k=FILE_BYTES // 6))
        storage.publish(f"{uri}/{number:03}.txt", text[:FILE_BYTES])
    return uri


@pytest.fixture
def sharding(settings, source):
    return {
        **settings,
        "data.source": source,
        "data.part_size_bytes": 1 << 21,
        "task.tokenizer": "bytes",
        "data.shard_pods": 2,
        "data.processes": 1,
    }


@pytest.fixture(scope="module")
def digest_of_one_process(source, mlflow_uri, tmp_path_factory):
    folder = tmp_path_factory.mktemp("here")
    here = {"data.source": source, "data.part_size_bytes": 1 << 21, "task.tokenizer": "bytes", "data.processes": 1}
    root = {"run.storage_root": f"s3://{BUCKET}/here", "tracking.uri": mlflow_uri}
    return kftrain("shard", *options({**here, **root}), folder=folder)["dataset_digest"]


def jobs(namespace):
    return client.BatchV1Api().list_namespaced_job(namespace.name).items


def pods_of_job(namespace):
    return namespace.pods("batch.kubernetes.io/job-name")


def test_killed_in_the_middle_the_dataset_is_that_of_one_process(sharding, namespace, digest_of_one_process, tmp_path):
    sharding["run.storage_root"] += "-killed"
    with running("shard", *options(sharding), folder=tmp_path) as command:
        command.wait_for("is encoded")
        (job,) = jobs(namespace)
        assert job.spec.completion_mode == "Indexed" and job.spec.pod_failure_policy.rules[0].action == "FailJob"
        first = pods_of_job(namespace)
        assert len(first) == 2
        namespace.delete_pod(next(name for name in first if "is encoded" in namespace.log(name)), grace_seconds=0)
        new = wait_until(lambda: pods_of_job(namespace).keys() - first.keys(), 60, "the pod's successor")
        result = command.finish()
    assert result["dataset_digest"] == digest_of_one_process
    assert len(new) == 1 and "was there" in command.output, "parts that the pod had encoded were encoded again"
    assert not jobs(namespace)
    folder = f"{result['run_uri']}/sharding"
    assert storage.list_names(folder) == [], "what led to the parts has done its work"


def test_cancel_takes_the_job_away(sharding, namespace, tmp_path):
    sharding["run.storage_root"] += "-cancelled"
    with running("shard", *options(sharding), folder=tmp_path) as command:
        command.wait_for("is encoded")
        run = jobs(namespace)[0].metadata.labels["kftrain.io/run"]
        status = subprocess.run(
            [sys.executable, "-m", "kftrain", "status", "-n", namespace.name, "--json"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert [line["task"] for line in json.loads(status.stdout)] == ["shard"]
        kftrain("cancel", run, "-n", namespace.name, folder=tmp_path)
        command.finish(code=13)
    assert "somebody deleted the job" in command.output
    assert not jobs(namespace) and wait_until(lambda: not pods_of_job(namespace), 30, "the end of the pods")


def test_the_server_accepts_every_field(sharding, kubeconfig, namespace, tmp_path):
    """As kubectl asks it, strictly: a field that it does not know is an error."""
    text = subprocess.run(
        [sys.executable, "-m", "kftrain", "run", *options(sharding), "--dry-run"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    (job,) = (part for part in text.split("---\n") if "kind: Job\n" in part)
    kubectl = shutil.which("kubectl") or pytest.skip("no kubectl")
    command = [kubectl, "apply", "-n", namespace.name, "--dry-run=server", "--validate=strict", "-f", "-"]
    done = subprocess.run(command, input=job, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "created (server dry run)" in done.stdout, done.stderr
