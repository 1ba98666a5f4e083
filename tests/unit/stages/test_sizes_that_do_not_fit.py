"""Sizes that contradict each other, of task, model and data, are refused before any data is read, or before a job."""

import subprocess
import sys

import pytest
from helpers.documents import digits_config, sharded_run

from kftrain import config, launch, tracking
from kftrain.core import storage
from kftrain.errors import ConfigError, DataError
from kftrain.models import build_model
from kftrain.parallel.tensor_plan import read_plan
from kftrain.run.error import read_error
from kftrain.sharding import shard_dataset as sharding
from kftrain.stages import dry_run
from kftrain.stages.shard import shard
from kftrain.stages.train import train
from kftrain.tasks import build_task

IMAGES = "task: {kind: image_classification, image_size: 8, num_classes: 10}\n"
TEXT = "task: {kind: language_modeling, sequence_length: 32}\n"
VISION = "kind: vision_transformer, "
NO_NAMES = "task: {kind: image_classification, image_size: 8, num_classes: 3, labels: [a, b]}\n"

REFUSED = {
    "heads": (TEXT + "model: {dim: 30, num_heads: 4}", "model.num_heads: 4 heads do not divide dim 30"),
    "default heads": (TEXT + "model: {dim: 64}", "model.num_heads: 6 heads do not divide dim 64"),
    "key-value heads": (TEXT + "model: {num_kv_heads: 4}", "model.num_kv_heads: 4 key-value heads do not divide 6"),
    "odd head": (TEXT + "model: {dim: 18}", "model.dim: rotary embedding needs an even head dim"),
    "context": (TEXT + "model: {sequence_length: 16}", "model.sequence_length: is set by the task (got 16)"),
    "vocabulary": (TEXT + "model: {vocab_size: 100}", "model.vocab_size: is set by the task (got 100)"),
    "patches": (
        IMAGES + f"model: {{{VISION} patch_size: 3}}",
        "model.patch_size: patches of 3 do not divide",
    ),
    "patch larger": (IMAGES + f"model: {{{VISION} patch_size: 16}}", "model.patch_size: patches of 16 do not divide"),
    "vision heads": (IMAGES + f"model: {{{VISION} num_heads: 5}}", "model.num_heads: 5 heads do not divide dim 64"),
    "classes": (IMAGES + f"model: {{{VISION} num_classes: 3}}", "model.num_classes: is set by the task (got 3)"),
    "labels": (
        NO_NAMES + "model: {kind: vision_transformer}",
        "task.labels: needs 3 different names",
    ),
    "images for text": (TEXT + f"model: {{{VISION} dim: 64}}", "model.kind: does not accept vocab_size"),
    "text for images": (IMAGES + "model: {kind: transformer}", "model.kind: does not accept image_size"),
    "missing": ("task: {kind: image_classification, num_classes: 3}", "task.image_size: a required option is missing"),
}

SPLIT = {
    "heads": (TEXT + "model: {dim: 60, num_heads: 3}", "num_heads"),
    "key-value heads": (TEXT + "model: {num_kv_heads: 3}", "num_kv_heads"),
    "inner width": (TEXT + "model: {ffn_dim: 33}", "ffn_dim"),
    "text": ("task: {kind: language_modeling, sequence_length: 33}", "sequence_length"),
    "patches": (IMAGES + f"model: {{{VISION} patch_size: 8}}", "sequence_length"),
}
"""What the processes that split the matrices do not divide."""

EXPERTS = "model: {kind: mixture_of_experts, dim: 64, num_heads: 4, num_experts: 6}"
AXES = {
    "experts": (TEXT + EXPERTS, "expert: 4", "model num_experts: has no 4 equal parts, as parallel.expert asks for"),
    "no experts": (TEXT, "expert: 4", "parallel.expert: the model has no experts (got 4); use model.kind: mixture_of"),
    "tensor of experts": (TEXT + EXPERTS, "tensor: 4", "parallel.tensor: no plan splits the matrices of experts"),
    "stages": (TEXT + "model: {num_layers: 1}", "pipeline: 4", "parallel.pipeline: the model has 3 pieces, too few"),
    "two stages each": (TEXT, "pipeline: 4, schedule: zbv", "parallel.pipeline: the model has 6 pieces, too few for 8"),
    "stages of experts": (
        TEXT + EXPERTS[:-1] + ", num_layers: 1}",
        "pipeline: 4",
        "parallel.pipeline: the model has 3",
    ),
    "stages of images": (IMAGES + f"model: {{{VISION} num_layers: 1}}", "pipeline: 4", "parallel.pipeline: the model"),
    "sequences": (
        "task: {kind: language_modeling, sequence_length: 36}",
        "context: 4",
        "model sequence_length: cannot",
    ),
    "sequences of experts": (TEXT.replace("32", "36") + EXPERTS, "context: 4", "model sequence_length: cannot be cut"),
    "sequences of images": (IMAGES + f"model: {{{VISION}}}", "context: 4", "parallel.context: the batches of the task"),
}
"""What four processes along an axis cannot share; the rows of refusals in the tables of parity say that of workers."""


@pytest.fixture
def no_data(monkeypatch):
    monkeypatch.setattr(sharding, "shard_dataset", lambda *arguments: pytest.fail("data was read"))
    monkeypatch.setattr(tracking, "check", lambda uri: None)


@pytest.mark.parametrize("case", REFUSED)
def test_the_first_step_refuses_it_in_one_line(tmp_path, no_data, case):
    text, line = REFUSED[case]
    resolved = config.parse(text, [f"run.storage_root={tmp_path}"])
    with pytest.raises(ConfigError) as caught:
        shard(resolved, "r-1", progress=lambda line: None)
    assert caught.value.line.startswith(line) and "\n" not in caught.value.line
    assert storage.read_json(f"{tmp_path}/runs/r-1/error.json")["exit_code"] == 10
    with pytest.raises(ConfigError) as again:
        dry_run.describe_jobs_of_new_run(resolved)
    assert again.value.line == caught.value.line


@pytest.mark.parametrize("case", REFUSED)
def test_the_worker_that_builds_the_model_says_the_same(case):
    text, line = REFUSED[case]
    resolved = config.parse(text)
    with pytest.raises(ConfigError) as caught:
        build_model(resolved.model, build_task(resolved.task).model_arguments())
    assert caught.value.line.startswith(line)


@pytest.mark.parametrize("case", SPLIT)
def test_sizes_that_cannot_be_split_are_refused_before_any_job_as_in_the_worker(case):
    text, name = SPLIT[case]
    resolved = config.parse(f"{text}\nparallel: {{tensor: 2}}\nlaunch: {{processes_per_node: 2}}")
    with pytest.raises(
        ConfigError, match=f"^model {name}: has no 2 equal parts, as parallel.tensor asks for"
    ) as caught:
        dry_run.describe_jobs_of_new_run(resolved)
    with pytest.raises(ConfigError) as again:
        read_plan(build_model(resolved.model, build_task(resolved.task).model_arguments()), 2, True)
    assert again.value.line == caught.value.line and caught.value.exit_code == 10


ON_FOUR = "launch: {processes_per_node: 4}\ntrain: {global_batch_size: 8, micro_batch_size: 1}"


@pytest.mark.parametrize("case", AXES)
def test_an_axis_that_does_not_fit_is_refused_before_data_is_read(tmp_path, no_data, case):
    text, axes, line = AXES[case]
    resolved = config.parse(f"{text}\nparallel: {{{axes}}}\n{ON_FOUR}", [f"run.storage_root={tmp_path}"])
    with pytest.raises(ConfigError) as caught:
        shard(resolved, "r-1", progress=lambda line: None)
    assert caught.value.line.startswith(line) and "\n" not in caught.value.line and caught.value.exit_code == 10


@pytest.mark.parametrize(
    ("model", "axes"),
    [
        (EXPERTS.replace("6}", "8}"), "expert: 4"),
        (EXPERTS, "pipeline: 2, expert: 2"),
        ("model: {num_layers: 2}", "pipeline: 4"),
        ("model: {num_layers: 6}", "pipeline: 4, schedule: interleaved"),
        ("model: {kind: 'no_such_module:Model'}", "pipeline: 2, expert: 2"),
        ("", "context: 4"),
    ],
)
def test_axes_that_fit_or_a_model_that_is_not_known_pass(model, axes):
    resolved = config.parse(f"{TEXT}{model}\nparallel: {{{axes}}}\n{ON_FOUR}")
    assert "train" in dry_run.describe_jobs_of_new_run(resolved)


@pytest.mark.parametrize("kind", ["transformer", "no_such_module:Model"])
def test_sizes_that_can_be_split_or_are_not_known_pass(kind):
    more = "\nparallel: {tensor: 2, sequence_parallel: false}\nlaunch: {processes_per_node: 2}"
    text = f"task: {{kind: language_modeling, sequence_length: 33}}\nmodel: {{kind: '{kind}'}}"
    assert "train" in dry_run.describe_jobs_of_new_run(config.parse(text + more))


@pytest.mark.parametrize(
    "text",
    [
        "",
        TEXT + "model: {dim: 64, num_heads: 4, num_kv_heads: 2}",
        IMAGES + f"model: {{{VISION} patch_size: 8}}",
        # what a user's own classes require is known to the workers only
        "task: {kind: 'no_such_module:Task'}\nmodel: {kind: transformer, dim: 64, num_heads: 4}",
        IMAGES + "model: {kind: 'no_such_module:Model'}",
    ],
)
def test_what_fits_or_cannot_be_known_yet_passes(text):
    assert "train" in dry_run.describe_jobs_of_new_run(config.parse(text))


def test_a_users_model_is_told_what_the_task_gives_it(tmp_path, monkeypatch):
    """From its source alone; nothing of it is imported."""
    (tmp_path / "own_sized.py").write_text(
        "raise SystemExit('imported')\n"
        "class Wants:\n    def __init__(self, *, image_size, num_channels, num_classes, width): pass\n"
        "class Lacks:\n    def __init__(self, *, image_size, width=3): pass\n"
        "class Takes:\n    def __init__(self, *, width, **arguments): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for options, line in {
        "Wants": "model.width: a required option is missing",
        "Wants, num_classes: 3": "model.num_classes: is set by the task",
        "Lacks": "model.kind: does not accept num_channels, num_classes",
        "Takes": "model.width: a required option is missing",
    }.items():
        kind, _, rest = options.partition(",")
        resolved = config.parse(IMAGES + f"model: {{kind: 'own_sized:{kind}', {rest}}}")
        with pytest.raises(ConfigError) as caught:
            dry_run.describe_jobs_of_new_run(resolved)
        assert caught.value.line.startswith(line)
    assert dry_run.describe_jobs_of_new_run(config.parse(IMAGES + "model: {kind: 'own_sized:Takes', width: 3}"))


def test_the_check_imports_no_torch():
    code = (
        "import sys; from kftrain import config; from kftrain.stages import preflight; "
        "preflight.check_model(config.parse('parallel: {tensor: 2}')); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def smaller_images(paths, tmp_path):
    """Somebody has changed the task after the shards were written."""
    storage.publish(paths.config, digits_config(tmp_path, "task.image_size=16").to_yaml())


def test_shards_that_do_not_hold_what_the_task_reads_end_the_training_before_any_job(tmp_path, monkeypatch):
    paths, _, _ = sharded_run(tmp_path)
    smaller_images(paths, tmp_path)
    monkeypatch.setattr(launch, "run_training", lambda *arguments: pytest.fail("a job was started"))
    monkeypatch.setattr(launch, "run_evaluation", lambda *arguments: pytest.fail("a job was started"))
    with pytest.raises(DataError) as caught:
        train(paths.uri, lambda line: None)
    assert "image: uint8 [8, 8, 1]" in caught.value.line and "image: uint8 [16, 16, 1]" in caught.value.line
    assert (read_error(paths.error).exit_code, read_error(paths.error).stage) == (11, "train")
