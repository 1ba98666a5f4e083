import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain import config
from kftrain.errors import ConfigError


def test_an_empty_configuration_has_a_default_for_everything():
    resolved = config.parse("")
    assert resolved.model_name == resolved.experiment == resolved.run.name


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("train: {stps: 4}", [], "config: train.stps: unknown key (got 4); did you mean 'steps'?"),
        ("trian: {}", [], "config: trian: unknown key (got {}); did you mean 'train'?"),
        ("train: {steps: many}", [], "config: train.steps: input should be a valid integer"),
        ("train: {steps: 0}", [], "greater than or equal to 1 (got 0)"),
        ("parallel: {strategy: zero}", [], "input should be 'auto', 'ddp', 'zero1', 'zero2' or 'fsdp' (got 'zero')"),
        ("train: {global_batch_size: 2, micro_batch_size: 3}", [], "exceeds train.global_batch_size (2)"),
        ("a: [", [], "not valid YAML"),
        ("- 1", [], "must be a mapping of sections"),
        ("a: &x 1\nb: *x", [], "aliases are not supported"),
        ("train: {steps: 5, steps: 6}", [], "the key 'steps' is there twice"),
        ("run: {seed: 1}\ntrain: {steps: 5}\ntrain: {}", [], "the key 'train' is there twice"),
        ("train: {<<: {steps: 5}}", [], "train.<<: unknown key"),
        ("train: {steps: true}", [], "train.steps: must be a number (got True)"),
        ("checkpoint: {interval_seconds: yes}", [], "checkpoint.interval_seconds: must be a number (got True)"),
        ("train: {steps: 1:30}", [], "train.steps: input should be a valid integer"),
        ("precision: {compute: fp16, loss_scale: {initial: 1.0e+39}}", [], "loss_scale.initial: input should be less"),
        ("precision: {compute: fp16, loss_scale: {minimum: 1.0e-50}}", [], "minimum: input should be greater than or"),
        ("train: {activation_checkpointing: selectve}", [], "'none', 'blocks', 'selective' or 'offload' (got 'sel"),
        ("train: {checkpointed_blocks: 2}", [], "checkpointed_blocks is of activation_checkpointing: set that, too"),
        ("train: {checkpointed_blocks: [true]}", [], "checkpointed_blocks: must be a number (got [True])"),
        ("train: {activation_checkpointing: blocks, checkpointed_blocks: []}", [], "checkpointed_blocks is empty: set"),
        ("train: {micro_batch_size: autp}", [], "config: train.micro_batch_size: input should be 'auto' (got 'autp')"),
        ("train: {micro_batch_size: auto}\nparallel: {expert: 2}", [], "auto measures the whole model, which axes of"),
        ("", ["steps=4"], "an override is section.field=value (got 'steps=4')"),
        ("", ["train.steps"], "an override is section.field=value"),
        ("train: 4", ["train.steps=4"], "must name a field of a section"),
    ],
)
def test_bad_input_is_refused_with_key_value_and_fix(text, overrides, message):
    with pytest.raises(ConfigError) as caught:
        config.parse(text, overrides)
    assert message in caught.value.line
    assert "\n" not in caught.value.line
    assert caught.value.exit_code == 10


def test_an_integer_that_begins_with_0_is_decimal():
    assert config.parse("train: {steps: 010}").train.steps == 10
    assert config.parse("train: {steps: 1_000}").train.steps == 1000


def test_a_missing_file_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the configuration"):
        config.load(tmp_path / "none.yaml")


def test_overrides_win_over_the_file(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("train: {steps: 4}\n")
    assert config.load(path, ["train.steps=7", "task.sequence_length=64"]).train.steps == 7
    assert config.load(path, ["task.sequence_length=64"]).task.options() == {"sequence_length": 64}


def test_the_resolved_configuration_survives_a_round_trip():
    resolved = config.parse("run: {seed: 3}", ["model.dim=64"])
    again = config.parse(resolved.to_yaml())
    assert again == resolved
    assert again.digest() == resolved.digest()


def test_how_and_where_it_runs_does_not_make_it_another_training():
    base = config.parse("")
    moved = config.parse(
        "parallel: {strategy: ddp}\nlaunch: {processes_per_node: 4}\ntracking: {uri: 'http://x'}\n"
        "checkpoint: {interval_steps: 7}\ntrain: {micro_batch_size: 2}\nevaluate: {num_bootstrap: 200}"
    )
    assert moved.training_digest("d") == base.training_digest("d")
    assert moved.digest() != base.digest()


@pytest.mark.parametrize(
    "override",
    [
        "run.seed=9",
        "train.steps=9",
        "train.global_batch_size=9",
        "optimizer.beta2=0.5",
        "model.dim=9",
        "precision.compute=bf16",
        "data.shuffle_range_samples=2",
        "data.shuffle_window_ranges=2",
    ],
)
def test_what_changes_the_numbers_makes_it_another_training(override):
    assert config.parse("", [override]).training_digest("d") != config.parse("").training_digest("d")
    assert config.parse("").training_digest("d") != config.parse("").training_digest("e")


def test_a_window_of_more_samples_than_a_table_holds_is_refused():
    assert config.parse("data: {shuffle_window_ranges: 4096}").data.shuffle_window_ranges == 4096
    with pytest.raises(ConfigError, match=r"4,195,328, and at most 4,194,304 samples"):
        config.parse("data: {shuffle_window_ranges: 4097}")


def test_relative_paths_are_anchored_and_others_left_alone(tmp_path):
    anchored = config.parse("").anchored(tmp_path)
    assert anchored.run.storage_root == f"{tmp_path}"
    assert anchored.tracking.uri == f"sqlite:///{tmp_path}/mlflow.db"
    assert anchored.anchored("/elsewhere") == anchored
    remote = config.parse("run: {storage_root: 's3://b/x'}\ntracking: {uri: 'http://h:5000'}")
    assert remote.anchored(tmp_path) == remote


@settings(derandomize=True, max_examples=60)
@given(st.text(max_size=60))
def test_any_text_is_a_configuration_or_a_config_error(text):
    try:
        config.parse(text)
    except ConfigError as error:
        assert "\n" not in error.line


def test_the_schema_describes_every_field():
    schema = config.schema()
    for name, section in schema["$defs"].items():
        for key, field in section.get("properties", {}).items():
            assert field.get("description"), f"{name}.{key} has no docstring"


def test_a_later_file_wins_key_by_key_and_is_named_in_errors(tmp_path):
    cluster, job = tmp_path / "cluster.yaml", tmp_path / "job.yaml"
    cluster.write_text("launch: {nodes: 4, kubernetes: {queue: gpus, node_selector: {a: b}}}\ntrain: {steps: 9}")
    job.write_text("train: {steps: 7}\nlaunch: {kubernetes: {node_selector: {c: d}}}")
    loaded = config.load([str(cluster), str(job)])
    assert (loaded.train.steps, loaded.launch.nodes, loaded.launch.kubernetes.queue) == (7, 4, "gpus")
    assert loaded.launch.kubernetes.node_selector == {"a": "b", "c": "d"}
    assert config.load([str(job), str(cluster)], ["train.steps=3"]).train.steps == 3
    cluster.write_text("launch: {nodes: -4}")
    with pytest.raises(ConfigError, match=r"cluster.yaml: launch.nodes"):
        config.load([str(cluster), str(job)])
    job.write_text("train: {stepz: 7}")
    cluster.write_text("launch: {nodes: 4}")
    with pytest.raises(ConfigError, match=r"job.yaml: train.stepz: unknown key.*did you mean 'steps'"):
        config.load([str(cluster), str(job)])


def test_a_wrong_override_is_blamed_and_not_the_file(tmp_path):
    file = tmp_path / "good.yaml"
    file.write_text("train: {steps: 5}\n")
    with pytest.raises(ConfigError) as raised:
        config.load(file, ["run.seed=1", "train.steps=many"])
    assert raised.value.where == "--set train.steps=many: train.steps" and raised.value.value == "many"
    with pytest.raises(ConfigError) as raised:
        config.load(file, ["train.stepz=3", "run.seed=1"])
    assert raised.value.where == "--set train.stepz=3: train.stepz" and "did you mean 'steps'?" in raised.value.fix
    file.write_text("train: {steps: many}\n")
    with pytest.raises(ConfigError) as raised:
        config.load(file, ["run.seed=1"])
    assert raised.value.where == f"{file}: train.steps"


def test_settings_at_odds_are_not_blamed_on_the_last_override(tmp_path):
    with pytest.raises(ConfigError) as raised:
        config.load(None, ["train.micro_batch_size=64", "run.seed=1"])
    assert "--set" not in raised.value.where and "train.micro_batch_size (64) exceeds" in raised.value.line


def test_a_metric_that_the_task_does_not_have_is_mended_by_a_resume():
    settings = config.load(None, ["registry.metric=mse"]).registry
    with pytest.raises(ConfigError) as raised:
        settings.require_metric(["mae", "accuracy"])
    assert "known: accuracy, mae" in raised.value.fix and raised.value.value == "mse"
    assert raised.value.fix.endswith("--resume RUN --set registry.metric=mae")
    settings.require_metric(["mse"])
