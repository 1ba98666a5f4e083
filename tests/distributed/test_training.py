"""Training as the launcher starts it, against the oracle: one process, uninterrupted."""

import json
import math

import pytest
import torch
from helpers import jobs
from helpers.toy_data import shard_folder
from safetensors.torch import load_file

from kftrain.core import storage
from kftrain.run import commit, documents
from kftrain.run.documents import Completion

pytestmark = pytest.mark.slow


def test_the_loss_falls(reference):
    _, losses = reference
    assert losses[20] < 0.8 * losses[1]


def test_two_processes_with_fsdp_give_the_curve_of_one(reference, two_processes):
    jobs.assert_same_curve(two_processes[1], reference[1])


@pytest.mark.parametrize(
    ("processes", "overrides"),
    [
        (2, ["parallel.strategy=ddp"]),
        (3, []),  # 8 samples over 3 processes: uneven shares
        (2, ["train.micro_batch_size=1"]),
        (2, ["parallel.strategy=ddp", "train.micro_batch_size=3", "train.activation_checkpointing=blocks"]),
        (4, ["parallel.replicate=2", "parallel.reshard_after_forward=false"]),
    ],
)
def test_any_layout_gives_the_curve_of_one_process(tmp_path, reference, processes, overrides):
    paths, resolved = jobs.make_run(tmp_path, overrides)
    done = jobs.run_worker(paths, resolved, processes=processes)
    assert done.returncode == 0, done.stdout + done.stderr
    jobs.assert_same_curve(jobs.losses(paths), reference[1])


def test_completion_states_what_was_reached(two_processes):
    paths, losses = two_processes
    completion = documents.read(Completion, paths.complete)
    assert (completion.step, completion.samples_consumed, completion.world_size, completion.attempt) == (20, 160, 2, 1)
    assert completion.metrics["loss"] == losses[20]
    manifest, digest = commit.read_checkpoint_manifest(completion.checkpoint_uri)
    assert digest == completion.checkpoint_digest
    commit.verify_files(completion.checkpoint_uri, manifest.files)
    assert 1 <= len(commit.list_committed(paths)) <= 2


def test_a_loss_that_is_not_finite_ends_the_run_as_diverged(tmp_path):
    paths, resolved = jobs.make_run(tmp_path, ["optimizer.learning_rate=1e30", "train.gradient_clip_norm=0"])
    done = jobs.run_worker(paths, resolved)
    assert done.returncode == 19
    assert "lower optimizer.learning_rate" in storage.read_json(paths.error)["line"]


@pytest.mark.parametrize(
    ("overrides", "processes", "code", "message"),
    [
        (["train.global_batch_size=2"], 3, 10, "3"),
        (["parallel.shard=2"], 3, 10, "parallel.replicate x parallel.shard"),
        (["model.num_heads=5"], 1, 10, "num_heads"),
    ],
)
def test_a_layout_that_cannot_be_is_a_config_error(tmp_path, overrides, processes, code, message):
    paths, resolved = jobs.make_run(tmp_path, overrides)
    done = jobs.run_worker(paths, resolved, processes=processes)
    assert done.returncode == code, done.stdout + done.stderr
    assert message in storage.read_json(paths.error)["line"]
    assert not storage.exists(paths.complete)
    assert commit.list_committed(paths) == []


def test_weights_that_numpy_and_random_draw_are_the_same_on_any_number_of_processes(tmp_path):
    curves = []
    for processes in (1, 2):
        paths, resolved = jobs.make_run(
            tmp_path, ["model.kind=helpers.models.drawn:FromGlobalGenerators"], str(processes)
        )
        done = jobs.run_worker(paths, resolved, processes=processes)
        assert done.returncode == 0, done.stdout + done.stderr
        curves.append(jobs.losses(paths))
    jobs.assert_same_curve(*curves)


def test_a_model_that_each_process_draws_anew_is_that_of_rank_0_and_goes_on_after_a_kill(tmp_path):
    """Part of it has no gradient, and so no state of the optimizer but the first one."""
    kinds = ["model.kind=helpers.models.drawn:FromNowhere", "task.kind=helpers.models.scripted_task:ScriptedTask"]
    # The kill at step 12 must come after the commit of step 10.
    paths, resolved = jobs.make_run(tmp_path, [*kinds, "checkpoint.asynchronous=false"])
    killed = jobs.run_worker(paths, resolved, SCRIPT=json.dumps({"step": 12, "rank": 1, "do": "kill"}))
    assert killed.returncode == 137, killed.stdout + killed.stderr
    assert (
        killed.stdout.count(
            "the model is built by its constructor on the first process, and its weights are scattered to the others"
        )
        == 1
    )
    done = jobs.run_worker(paths, resolved)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "going on after step 10" in done.stdout
    export = storage.local_path(documents.read(Completion, paths.complete).export_uri)
    tensors = load_file(export / "model.safetensors")
    assert torch.equal(tensors["first"], tensors["second"]) and tensors["first"].unique().numel() == 4


def test_a_model_of_other_parts_on_each_process_is_refused(tmp_path):
    paths, resolved = jobs.make_run(tmp_path, ["model.kind=helpers.models.drawn:ByRank"])
    done = jobs.run_worker(paths, resolved)
    assert done.returncode == 10
    assert "the model does not have the same parts on all processes" in storage.read_json(paths.error)["line"]


def test_a_torn_shard_is_found_before_the_first_step(tmp_path):
    paths, resolved = jobs.make_run(tmp_path)
    manifest_uri = storage.read_json(paths.shards)["manifest_uri"]
    shard = next(shard_folder(manifest_uri).glob("train-*.tar"))
    shard.chmod(0o644)
    shard.write_bytes(shard.read_bytes()[:-1024])
    done = jobs.run_worker(paths, resolved)
    assert done.returncode == 11
    assert shard.name in storage.read_json(paths.error)["line"]
    assert "step 1/" not in done.stdout and commit.find_last_step(paths) == 0


def test_bf16_trains_and_says_so(tmp_path, reference):
    paths, resolved = jobs.make_run(tmp_path, ["precision.compute=bf16"])
    done = jobs.run_worker(paths, resolved)
    assert done.returncode == 0, done.stdout + done.stderr
    ours, theirs = jobs.losses(paths)[20], reference[1][20]
    assert ours != theirs and math.isclose(ours, theirs, rel_tol=0.05)


def test_the_history_of_a_run_is_json_that_a_report_can_read(two_processes):
    history = json.loads(storage.read_text(two_processes[0].history))
    assert [point["step"] for point in history] == list(range(1, 21))
    assert {"loss", "learning_rate", "gradient_norm", "samples_per_second", "seconds"} <= history[0].keys()
