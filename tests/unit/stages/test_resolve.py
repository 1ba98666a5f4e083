import shutil

import pytest
from helpers.documents import opened_run, publish_commit
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain import config
from kftrain.client.local_run import load_run
from kftrain.core import storage
from kftrain.errors import CheckpointError, ConfigError, OtherTrainingError
from kftrain.run import attempts
from kftrain.run.config import keep_config, read_config
from kftrain.run.paths import RunPaths
from kftrain.stages import resolve


def opened(tmp_path, *overrides, run_id="r-1", **options):
    resolved = config.parse("", [f"run.storage_root={tmp_path}", *overrides])
    return opened_run(resolved, run_id, **options)


def resolved_with(text, knobs, base="."):
    return resolve.resolve_run(text, knobs, "", base)[0]


def test_a_knob_left_empty_leaves_the_configuration_alone_and_any_other_wins():
    text = "train: {steps: 7}\nrun: {name: a}\noptimizer: {learning_rate: 0.5}"
    knobs = {"steps": 0, "learning_rate": 0.25, "model_name": "", "nodes": 0, "promotion": "manual"}
    resolved = resolved_with(text, knobs)
    assert resolved.train.steps == 7
    assert resolved.optimizer.learning_rate == 0.25
    assert (resolved.model_name, resolved.registry.promotion) == ("a", "manual")


@pytest.mark.parametrize("value", ["a: b", "[1]", "null", 'with "quotes"', "#x", "{{x}}"])
def test_a_knob_is_taken_literally_whatever_yaml_would_make_of_it(value):
    assert resolved_with("", {"model_name": value}).model_name == value


def test_every_knob_names_a_key_of_the_configuration():
    for key in resolve.KNOBS.values():
        *sections, field = key.split(".")
        node = config.Config
        for section in sections:
            node = node.model_fields[section].annotation
        assert field in node.model_fields


def test_a_bad_knob_is_refused_with_its_key():
    with pytest.raises(ConfigError, match=r"train\.steps"):
        resolved_with("", {"steps": -1})


def test_a_run_goes_on_with_its_own_configuration_and_the_knobs_where_no_other_is_given(tmp_path):
    paths = opened(tmp_path, "train.steps=7", "launch.nodes=3").paths
    for run, knobs in ((paths.uri, {}), ("r-1", {"storage_root": str(tmp_path)})):
        found, run_id = resolve.resolve_run("", {**knobs, "nodes": 2}, run)
        assert (run_id, found.train.steps, found.launch.nodes) == ("r-1", 7, 2)
        assert found.run.storage_root == str(tmp_path)


def test_a_configuration_that_is_given_wins_over_that_of_the_run_but_not_over_where_it_is(tmp_path):
    paths = opened(tmp_path, "train.steps=7").paths
    found, run_id = resolve.resolve_run("train: {steps: 9}", {}, paths.uri)
    assert (run_id, found.train.steps, found.run.storage_root) == ("r-1", 9, str(tmp_path))


def test_a_copy_of_a_run_is_no_run(tmp_path):
    """Its configuration would be taken, and the original trained."""
    paths = opened(tmp_path).paths
    shutil.copytree(storage.local_path(paths.uri), tmp_path / "backup" / "r-1")
    for uri in (str(tmp_path / "backup" / "r-1"), "s3://bucket/r-1"):
        with pytest.raises(ConfigError, match="not a run's folder"):
            resolve.resolve_run("", {}, uri)


def test_a_run_that_is_not_there_cannot_go_on(tmp_path):
    with pytest.raises(ConfigError, match="not a run"):
        resolve.resolve_run("", {"storage_root": str(tmp_path)}, "r-2")


def test_relative_paths_are_anchored_and_names_are_not(tmp_path):
    (tmp_path / "corpus").mkdir()
    text = "data: {{source: {0}}}\nrun: {{storage_root: store}}"
    assert resolved_with(text.format("corpus"), {}, tmp_path).data.source == str(tmp_path / "corpus")
    assert resolved_with(text.format("./x.jsonl"), {}, tmp_path).data.source == str(tmp_path / "x.jsonl")
    for pattern in ("shard-{000..012}.tar", "in/{a,b}-{0..3}.tar", "./x.parquet"):
        found = resolved_with(text.format(f"'{pattern}'"), {}, tmp_path).data.source
        assert found == str(tmp_path / pattern)
    for name in ("stdlib", "digits", "my_module:source", "s3://bucket/x", "typo"):
        resolved = resolved_with(text.format(f"'{name}'"), {}, tmp_path)
        assert resolved.data.source == name
        assert resolved.run.storage_root == str(tmp_path / "store")


def test_a_run_is_named_after_the_job_and_the_same_job_is_the_same_run():
    job = "3F2A9C1E-77aa-4b1c-9d2e-000000000000"
    first = resolve.make_run_id("", job, "stdlib-lm")
    assert first == resolve.make_run_id("", job, "stdlib-lm") == "stdlib-lm-3f2a9c1e77aa"
    assert resolve.make_run_id("old-run", job, "stdlib-lm") == "old-run"


@settings(derandomize=True, max_examples=50)
@given(st.uuids(), st.from_regex(r"\A[a-z]([-a-z0-9]{0,38}[a-z0-9])?\Z"))
def test_any_job_id_and_run_name_make_a_valid_run_id(job, name):
    run_id = resolve.make_run_id("", str(job), name)
    assert resolve.require_run_id(run_id) == run_id
    assert len(run_id) <= 63


@pytest.mark.parametrize("job_id", ["", "{{$.pipeline_job_uuid}}", "---"])
def test_a_job_id_that_names_nothing_is_refused(job_id):
    with pytest.raises(ConfigError, match="no job id"):
        resolve.make_run_id("", job_id, "a")


@pytest.mark.parametrize("run_id", ["", "../x", "a/b", "Upper", "-a", "a" * 64, "a_b"])
def test_a_run_id_that_is_no_plain_name_is_refused(run_id):
    with pytest.raises(ConfigError, match="not a run id"):
        resolve.require_run_id(run_id)


def test_a_new_run_keeps_its_resolved_configuration(tmp_path):
    run = opened(tmp_path, "train.steps=9")
    assert run.previous is None
    assert read_config(run.paths) == run.config
    assert "learning_rate" in storage.read_text(run.paths.config)


def test_a_run_opens_again_with_other_launch_settings_and_those_are_kept(tmp_path):
    opened(tmp_path, "launch.processes_per_node=2")
    again = opened(tmp_path, "launch.processes_per_node=1", must_exist=True)
    assert again.previous.launch.processes_per_node == 2
    assert read_config(again.paths).launch.processes_per_node == 1


def test_a_run_refuses_another_training_and_names_every_field_old_and_new(tmp_path):
    run = opened(tmp_path, "model.dim=32")
    publish_commit(run.paths)
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path, "model.dim=64", "optimizer.learning_rate=0.5", "run.seed=3")
    for part in ("model.dim 32 -> 64", "optimizer.learning_rate 0.001 -> 0.5", "seed 0 -> 3"):
        assert part in caught.value.line
    assert read_config(run.paths).run.seed == 0


def test_a_run_that_has_committed_nothing_may_still_become_another_training(tmp_path):
    """A typo in the model is found by the first step: nothing is lost when it is mended in the same run."""
    opened(tmp_path, "model.dim=32")
    again = opened(tmp_path, "model.dim=64", must_exist=True)
    assert read_config(again.paths).model.model_dump()["dim"] == 64


@pytest.mark.parametrize("trace", ["checkpoint", "complete", "claim"])
def test_whatever_shows_that_a_run_has_trained_makes_it_one_training(tmp_path, trace):
    """Also where every checkpoint was deleted since."""
    paths = opened(tmp_path, "model.dim=32").paths
    if trace == "checkpoint":
        publish_commit(paths)
    elif trace == "complete":
        storage.publish(paths.complete, "{}")
    else:
        attempts.claim_run(paths, start_step=10, world_size=1)
    with pytest.raises(OtherTrainingError):
        opened(tmp_path, "model.dim=64")


def test_a_run_that_must_exist_and_does_not_is_refused_with_those_that_do(tmp_path):
    opened(tmp_path, run_id="there")
    with pytest.raises(ConfigError, match=r"no such run.*there"):
        opened(tmp_path, run_id="missing", must_exist=True)
    assert not (tmp_path / "runs" / "missing").exists()


def test_a_folder_without_a_configuration_is_no_run(tmp_path):
    with pytest.raises(ConfigError, match="not a run"):
        read_config(RunPaths(str(tmp_path)))


def test_a_saved_configuration_that_is_no_text_is_refused(tmp_path):
    paths = RunPaths.of(str(tmp_path), "a-1")
    storage.publish(paths.config, b"run: {seed: 1}\xff")
    with pytest.raises(ConfigError, match=r"config\.yaml: damaged"):
        read_config(paths)


def test_what_fits_the_run_only_may_be_set_when_it_is_resumed(tmp_path):
    """`momentum` is of sgd, which the run has and the defaults have not."""
    paths = opened(tmp_path, "optimizer.kind=sgd", "checkpoint.keep_best=loss", "evaluate.interval_steps=5").paths
    further = ["train.stop_after_no_improvement=4", "optimizer.momentum=0.5", f"run.storage_root={tmp_path}"]
    found, _ = load_run((), tuple(further), tmp_path, "r-1")
    assert (found.optimizer.momentum, found.train.stop_after_no_improvement) == (0.5, 4)
    values = {"run": {"storage_root": str(tmp_path)}, "optimizer": {"momentum": 0.25}}
    found, run_id = resolve.resolve_run("", {"steps": 7}, "r-1", values=values)
    assert (found.optimizer.momentum, found.train.steps, run_id) == (0.25, 7, paths.run_id)
    with pytest.raises(ConfigError, match="no_such_key"):
        load_run((), (f"run.storage_root={tmp_path}", "optimizer.no_such_key=1"), tmp_path, "r-1")


def test_a_configuration_that_is_not_of_the_checkpoints_can_be_set_back(tmp_path):
    before = opened(tmp_path, "optimizer.learning_rate=0.5")
    identity = before.config.training_identity("d")
    publish_commit(before.paths, identity=identity)
    keep_config(before.paths, config.parse("", [f"run.storage_root={tmp_path}", "optimizer.learning_rate=0.25"]))
    with pytest.raises(OtherTrainingError, match=r"0\.25 -> 0\.125"):
        opened(tmp_path, "optimizer.learning_rate=0.125")
    opened(tmp_path, "optimizer.learning_rate=0.5")
    assert read_config(before.paths).optimizer.learning_rate == 0.5
