"""Layouts over pods: runs that change theirs between two attempts, and axes that leave a pod."""

import math

import pytest
from e2e.commands import kftrain, options, running
from e2e.namespace import wait_until
from helpers.jobs import losses

from kftrain.core import storage
from kftrain.run import documents
from kftrain.run.documents import Completion
from kftrain.run.paths import RunPaths

pytestmark = pytest.mark.timeout(1200, func_only=True)

EXACT = {"precision.compute": "fp32", "train.steps": 100}
TWO_BY_TWO = {"launch.nodes": 2, "launch.processes_per_node": 2, "parallel.strategy": "fsdp", "parallel.tensor": 2}
ONE_BY_FOUR = {"launch.nodes": 1, "launch.processes_per_node": 4, "parallel.strategy": "fsdp"}
TWO_BY_ONE = {"launch.nodes": 2, "launch.processes_per_node": 1}

STAGES = {"parallel.pipeline": 2, "train.micro_batch_size": 2}
MIXTURE = {
    "model.kind": "mixture_of_experts",
    "model.num_experts": 4,
    "model.experts_per_token": 2,
    "model.expert_dim": 32,
}
EXPERTS = {"parallel.expert": 2}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, kubeconfig):
    """Losses of one process here, never interrupted."""
    folder = tmp_path_factory.mktemp("alone")
    run_uri = kftrain("shard", *options({**EXACT, "launch.processes_per_node": 1}), folder=folder)["run_uri"]
    kftrain("train", run_uri, folder=folder)
    return losses(RunPaths(run_uri))


def test_a_killed_tensor_parallel_run_goes_on_as_fsdp_on_one_node(settings, namespace, one_process, tmp_path):
    """Matrices cut in two and the state sharded in two, on 2 x 2; then sharded over 1 x 4."""
    run_uri = kftrain("shard", *options({**settings, **EXACT, **TWO_BY_TWO}), folder=tmp_path)["run_uri"]
    paths = RunPaths(run_uri)
    with running("train", run_uri, folder=tmp_path) as training:
        training.wait_for("checkpoint at step 10 committed")
        for name in namespace.workers():
            namespace.delete_pod(name, grace_seconds=0)
        training.kill()
    kftrain("cancel", run_uri, "-n", namespace.name, folder=tmp_path)
    wait_until(lambda: not namespace.workers(), 60, "the end of the pods")
    changed = options({**settings, **EXACT, **ONE_BY_FOUR})
    assert kftrain("shard", "--run", paths.run_id, *changed, folder=tmp_path)["run_uri"] == run_uri
    with running("train", run_uri, folder=tmp_path) as training:
        training.finish()
    assert "going on after step" in training.output
    assert documents.read(Completion, paths.complete).world_size == 4
    ours = losses(paths)
    assert ours.keys() == one_process.keys()
    for step, loss in one_process.items():
        assert math.isclose(ours[step], loss, rel_tol=1e-4), (step, ours[step], loss)


@pytest.mark.parametrize(
    ("model", "layout"), [({"model.tie_embeddings": "true"}, STAGES), (MIXTURE, EXPERTS)], ids=["pipeline", "expert"]
)
def test_an_axis_over_two_pods_comes_to_the_losses_of_one_process(settings, tmp_path, model, layout):
    """What stages send, and the rows of experts, travel between pods; so does an evaluation within the training."""
    same = {**EXACT, **model, "train.steps": 20, "evaluate.interval_steps": 10}
    curves = []
    for place, others in (("here", {"launch.processes_per_node": 1}), ("pods", {**settings, **TWO_BY_ONE, **layout})):
        folder = tmp_path / place
        folder.mkdir()
        run_uri = kftrain("shard", *options({**same, **others}), folder=folder)["run_uri"]
        with running("train", run_uri, folder=folder) as training:
            training.finish()
        points = storage.read_json(RunPaths(run_uri).history)
        curves.append([point["validation/bits_per_byte"] for point in points if "validation/bits_per_byte" in point])
        curves[-1] += losses(RunPaths(run_uri)).values()
    assert len(curves[0]) == 22 and curves[1] == pytest.approx(curves[0], rel=1e-4)
