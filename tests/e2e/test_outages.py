"""What takes long or breaks the cluster itself: nodes, the API server, GPUs that are only counted, rights."""

import shutil
import subprocess
import time

import pytest
from e2e.commands import kftrain, options, running
from e2e.namespace import wait_until

from kftrain.run import attempts
from kftrain.run.paths import RunPaths

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200, func_only=True)]

SLOW = {"launch.nodes": 1, "launch.processes_per_node": 1, "model.dim": 256, "train.steps": 120}


@pytest.fixture
def disturb(request, kubeconfig):
    """Runs a verb of the script that breaks this cluster, and undoes everything in the end."""
    script = request.config.getoption("--disturb")
    if not script:
        pytest.skip("nothing to break the cluster with: --disturb SCRIPT")

    def run(*verb):
        subprocess.run([script, *map(str, verb)], check=True)

    yield run
    run("mend")


def test_the_api_server_is_away_for_a_minute(settings, namespace, disturb, tmp_path):
    run_uri = kftrain("shard", *options({**settings, **SLOW}), folder=tmp_path)["run_uri"]
    with running("train", run_uri, folder=tmp_path) as command:
        command.wait_for("checkpoint at step 10 started")
        disturb("pause-api")
        time.sleep(60)
        disturb("mend")
        command.wait_for("the API server answers again")
        command.finish()
    assert command.output.count("does not answer") == 1
    assert attempts.find_last_attempt(RunPaths(run_uri)) == 1 and namespace.jobs() == {}


def test_a_dead_node_is_named_and_costs_one_attempt(settings, namespace, operator, disturb, tmp_path):
    # Small enough that both workers and the operators fit on the node that is left.
    small = {"launch.kubernetes.cpu": "400m", "launch.kubernetes.termination_grace_seconds": 20}
    pairs = {**settings, **SLOW, **small, "launch.nodes": 2, "launch.timeout_seconds": 60, "train.steps": 200}
    run_uri = kftrain("shard", *options(pairs), folder=tmp_path)["run_uri"]
    with running("train", run_uri, folder=tmp_path) as command:
        command.wait_for("checkpoint at step 10 started", 300)
        victim = next(pod for pod in namespace.workers().values() if pod.spec.node_name != operator.node_name)
        disturb("stop-node", victim.spec.node_name)
        command.wait_for(f"node {victim.spec.node_name}, which does not answer", 120)
        command.wait_for("was taken off node", 400)
        command.finish(seconds=900)
    assert attempts.find_last_attempt(RunPaths(run_uri)) >= 2
    assert "going on after step" in command.output


def test_gpus_place_the_workers_and_too_many_are_refused(settings, namespace, disturb, tmp_path):
    disturb("gpus", 4)
    four = {"launch.kubernetes.gpus_per_node": 4, "launch.processes_per_node": 1, "launch.nodes": 2, "train.steps": 20}
    run_uri = kftrain("shard", *options({**settings, **four}), folder=tmp_path)["run_uri"]
    with running("train", run_uri, folder=tmp_path) as command:
        pods = wait_until(lambda: _placed(namespace), 120, "two placed workers")
        assert len({pod.spec.node_name for pod in pods}) == 2
        command.finish()
    five = {**four, "launch.kubernetes.gpus_per_node": 5, "launch.kubernetes.start_timeout_seconds": 20}
    run_uri = kftrain("shard", *options({**settings, **five}), folder=tmp_path)["run_uri"]
    with running("train", run_uri, folder=tmp_path) as command:
        command.wait_for("Insufficient nvidia.com/gpu", 60)
        command.finish(code=13)


def _placed(namespace):
    pods = [pod for pod in namespace.workers().values() if pod.spec.node_name]
    return pods if len(pods) == 2 else None


def test_a_step_says_once_what_it_may_not_read_and_needs_no_more_rights(kfp_steps, settings, tmp_path):
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    changes = {"launch.kubernetes.namespace": "''", "launch.kubernetes.start_timeout_seconds": 15}
    broken = {"launch.kubernetes.priority_class": "nope"}
    run_uri = kftrain("shard", *options({**settings, **SLOW, **changes, **broken}), folder=tmp_path)["run_uri"]
    log = kfp_steps.finish(kfp_steps.start("train", {"run_uri": run_uri}), phase="Failed")
    assert log.count("may not list events") == 1 and "no PriorityClass with name nope" not in log
    overlay = ["-k", "manifests/overlays/cluster-reader", "-n", kfp_steps.namespace.name]
    subprocess.run(["kubectl", "apply", *overlay], check=True)
    try:
        log = kfp_steps.finish(kfp_steps.start("train", {"run_uri": run_uri}), phase="Failed")
        assert "may not" not in log and "no PriorityClass with name nope" in log
    finally:
        subprocess.run(["kubectl", "delete", *overlay], check=True)
