"""Whole trainings over stages: their evaluations, exports and checkpoints, against the same training on one process."""

import contextlib
import json

import numpy as np
import pytest
import torch
from helpers import jobs, ranks
from helpers.launching import wait_until
from helpers.parity import defects, experts, oracle
from helpers.parity import rank as parity_rank
from safetensors.torch import load_file

from kftrain import config
from kftrain.core import storage
from kftrain.parallel.mesh import Mesh
from kftrain.run import commit, documents
from kftrain.run.documents import Completion
from kftrain.tasks import build_task
from kftrain.train import pipelined, session

SCRIPTED = "task.kind=helpers.models.scripted_task:ScriptedTask"

TRAINED = [SCRIPTED, "model.tie_embeddings=true", "evaluate.interval_steps=5"]
TRAINED += ["checkpoint.keep_best=bits_per_byte", "checkpoint.keep_best_goal=minimize"]
"""What is trained; the layout is another matter."""

PIPELINE = ["parallel.pipeline=2", "train.micro_batch_size=2"]
EXPERT = ["parallel.expert=2"]

TRANSFORMER = "{kind: transformer, dim: 32, num_layers: 2, num_heads: 4, num_kv_heads: 2}"
MIXTURE = (
    "{kind: mixture_of_experts, dim: 32, num_layers: 3, num_heads: 4, num_kv_heads: 2, first_dense_layers: 1, "
    "num_experts: 4, experts_per_token: 2, expert_dim: 16, num_shared_experts: 1, scores: sigmoid, "
    "balance_rate: 0.01, balance_loss: 0.01}"
)
OWN = "{kind: 'helpers.models.staged_experts:StagedExperts'}"
"""Three blocks of unequal cost, tied ends, dropout."""


class Held:
    """Rows for validation, in memory, of which the last batch has fewer than the others."""

    def __init__(self, num_samples):
        self.num_samples = num_samples

    def read_range(self, start, stop):
        return {name: rows[start:stop] for name, rows in oracle.text_rows().items()}, None

    def group_of(self, samples):
        return samples

    def place_of(self, sample):
        return str(sample)


NUMS_OF_SAMPLES = oracle.NUM_ROWS, 1
"""The second leaves processes without a batch of their own."""


def evaluated(world, base, overrides):
    """Statistics of the first model of a run, on the first process, for each number of samples."""
    resolved = config.parse(base, list(overrides))
    mesh, task = Mesh(resolved.parallel.shape(world.size), world), build_task(resolved.task)
    with contextlib.closing(parity_rank.new_loader(resolved, task, mesh, oracle.text_rows())) as loader:
        engine, _ = session.build(resolved, task, loader, mesh)
        return [engine.evaluate(Held(number), 4, 0, lambda: None) for number in NUMS_OF_SAMPLES]


@pytest.mark.parametrize(
    ("processes", "base", "more"),
    [
        (2, oracle.BASE, ()),
        (2, oracle.BASE, ("parallel.schedule=zbv",)),
        (2, oracle.BASE, ("parallel.schedule=interleaved",)),
        (4, oracle.BASE, ()),
        (4, experts.TEXT, EXPERT),
    ],
)
def test_stages_evaluate_each_sample_as_one_process_does(processes, base, more):
    layout = ["parallel.pipeline=2", "train.micro_batch_size=1", *more]
    pairs = zip(ranks.on(processes, evaluated, base, layout)[0], ranks.on(1, evaluated, base, [])[0], strict=True)
    for (ours, theirs), num_samples in zip(pairs, NUMS_OF_SAMPLES, strict=True):
        assert ours.keys() == theirs.keys() and all(len(values) == num_samples for values in ours.values())
        for name, values in theirs.items():
            np.testing.assert_allclose(ours[name], values, rtol=1e-6, err_msg=name)


def run_to_the_end(paths, resolved, processes):
    done = jobs.run_worker(paths, resolved, processes=processes)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The same training on one process."""
    paths, resolved = jobs.make_run(tmp_path_factory.mktemp("one"), TRAINED)
    run_to_the_end(paths, resolved, 1)
    return paths


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "processes", "hangs_at", "later", "later_processes"),
    [
        (PIPELINE, 2, 9 * 4 + 2, [], 2),
        ([*PIPELINE, "parallel.pipeline=3"], 3, 9 * 4 + 2, [], 1),
        ([], 2, 9, PIPELINE, 4),
        ([*PIPELINE, "parallel.pipeline=4"], 4, 9 * 4 + 2, ["parallel.tensor=2"], 2),
        (["parallel.context=2"], 2, 9, [], 2),
    ],
    ids=[
        "pipeline - fsdp",
        "three stages - one process",
        "fsdp - fsdp x pipeline",
        "four stages - tensor",
        "context - fsdp",
    ],
)
def test_a_training_that_is_killed_goes_on_in_another_layout(
    tmp_path, expected, layout, processes, hangs_at, later, later_processes
):
    paths, resolved = jobs.make_run(tmp_path, TRAINED + layout)
    # Losses are computed by the last stage alone: one of each micro batch, and before them one of torch's own.
    script = json.dumps({"rank": processes - 1, "step": hangs_at, "do": "hang"})
    kill_within_a_step(paths, resolved, processes, script)
    paths, resolved = jobs.make_run(tmp_path, TRAINED + later)
    assert "going on after step 5" in run_to_the_end(paths, resolved, later_processes)
    require_same_training(paths, expected)


def kill_within_a_step(paths, resolved, processes, script):
    process = jobs.start_worker(paths, resolved, processes=processes, SCRIPT=script)
    jobs.wait_for_line(process, "step 8/20")
    wait_until(lambda: commit.find_last_step(paths) == 5)  # its thread goes on while the step hangs
    jobs.kill_tree(process)


def require_same_training(paths, expected):
    """Completed trainings with the same curves, validations and exported weights."""
    ours, theirs = (documents.read(Completion, of.complete) for of in (paths, expected))
    assert ours.num_parameters == theirs.num_parameters
    histories = [storage.read_json(of.history) for of in (paths, expected)]
    for name in ("loss", "gradient_norm", "validation/bits_per_byte"):
        series = [[point[name] for point in history if name in point] for history in histories]
        assert len(series[1]) >= 4 and series[0] == pytest.approx(series[1], rel=1e-5), name
    weights = [load_file(f"{storage.local_path(of.export_uri)}/model.safetensors") for of in (ours, theirs)]
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[1].items():
        torch.testing.assert_close(weights[0][name], value, rtol=0, atol=2e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout", "processes", "others"),
    [
        (MIXTURE, [*PIPELINE, *EXPERT], 4, None),
        (MIXTURE, ["parallel.expert=4"], 4, None),
        # Its dropout draws by the place among the processes that read other samples. So the training to compare with
        # has these in the same steps; but it never had stages.
        (OWN, [*PIPELINE, "parallel.pipeline=3"], 3, ["train.micro_batch_size=2"]),
    ],
    ids=["expert x pipeline", "expert of four", "own model in three stages"],
)
def test_experts_that_are_killed_go_on_as_fsdp_x_expert(tmp_path, model, layout, processes, others):
    hangs_at, spread = 9 * 4 + 2 if PIPELINE[0] in layout else 9, EXPERT
    script = json.dumps({"rank": processes - 1, "step": hangs_at, "do": "hang"})
    paths, resolved = make_run_of(model, tmp_path / "ours", layout)
    kill_within_a_step(paths, resolved, processes, script)
    paths, resolved = make_run_of(model, tmp_path / "ours", spread)
    assert "going on after step 5" in run_to_the_end(paths, resolved, 4)
    expected, other = make_run_of(model, tmp_path / "theirs", others or [])
    if others is not None:
        kill_within_a_step(expected, other, 1, script.replace(f'"rank": {processes - 1}', '"rank": 0'))
        expected, other = make_run_of(model, tmp_path / "theirs", spread)
    run_to_the_end(expected, other, 1 if others is None else 4)
    require_same_training(paths, expected)
    jobs.request_evaluation(paths)
    done = jobs.run_worker(paths, resolved, "evaluate", 2)
    assert done.returncode == 0, done.stdout + done.stderr


def make_run_of(model, root, layout):
    root.mkdir(exist_ok=True)
    text = jobs.TINY.replace(TRANSFORMER, model).replace("SOURCE", str(jobs.write_texts(root / "texts")))
    return jobs.prepare(root, text, [SCRIPTED, *TRAINED[2:], "checkpoint.asynchronous=false", *layout])


@pytest.mark.slow
def test_stages_begin_with_the_weights_of_an_export(tmp_path):
    first, resolved = jobs.make_run(tmp_path, TRAINED)
    run_to_the_end(first, resolved, 1)
    done = documents.read(Completion, first.complete)
    start = {"export_uri": done.export_uri, "export_digest": done.export_digest, "origin": "the first run"}
    start = [f"train.initial_weights.{key}={value}" for key, value in start.items()]
    curves = []
    for name, layout, processes in (("one", [], 1), ("pipeline", PIPELINE, 2)):
        paths, resolved = jobs.make_run(tmp_path, [*TRAINED, *start, "train.steps=4", *layout], name)
        assert "starting with the weights of the first run" in run_to_the_end(paths, resolved, processes)
        curves.append(list(jobs.losses(paths).values()))
    assert curves[0] == pytest.approx(curves[1], rel=1e-5) and curves[0][0] < min(jobs.losses(first).values()) + 0.5


def live_micro_batches(world, overrides):
    """The most micro batches of which a stage keeps activations at a time."""
    most, forward = [0], pipelined.Stage.forward_one_chunk

    def forward_and_count(stage, *arguments, **keywords):
        answer = forward(stage, *arguments, **keywords)
        most[0] = max(most[0], len(stage.fwd_cache))
        return answer

    with defects.patched(pipelined.Stage, "forward_one_chunk", forward_and_count):
        parity_rank.train(world, parity_rank.Job(oracle.BASE, ("train.steps=1", *overrides), oracle.text_rows))
    return most[0]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_stage_keeps_activations_of_as_many_micro_batches_as_are_under_way(schedule):
    layout = ["parallel.pipeline=3", "train.micro_batch_size=1", f"parallel.schedule={schedule}"]
    found = ranks.on(3, live_micro_batches, layout)
    assert found == ([min(6, 3 - stage) for stage in range(3)] if schedule == "1f1b" else [6] * 3)
