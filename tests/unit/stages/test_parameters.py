"""The configuration as parameters of a pipeline run: what is sent, what is pasted, and what a step makes of it."""

import json

import pytest
import yaml
from click.testing import CliRunner

from kftrain import config
from kftrain.cli.config import config_command
from kftrain.errors import ConfigError, RetryableError
from kftrain.kubeflow import parameters
from kftrain.stages import resolve

CONFIG = """
run: {name: lm, storage_root: "s3://bucket/root"}
task: {kind: "my.tasks:Task", share: 1.0, rows: 3, flag: true}
launch: {backend: pytorchjob, kubernetes: {node_selector: {pool: a100}, memory: 8Gi}}
"""


def test_what_is_sent_is_what_differs_from_the_defaults_and_means_the_same():
    resolved = config.parse(CONFIG)
    sent = parameters.make_parameters(resolved, "")
    assert config.parse(sent["config"]) == resolved
    assert config.parse(sent["config"]).training_digest("d") == resolved.training_digest("d")  # 1.0 is not 1
    assert yaml.safe_load(sent["config"]) == yaml.safe_load(CONFIG)


def test_the_defaults_are_an_empty_text():
    assert parameters.make_parameters(config.parse(""), "r") == {"config": "", "resume_run": "r"}


@pytest.mark.parametrize("text", ["", "model: {kind: vision_transformer, dim: 8}", "launch: {kubernetes: {cpu: 3}}"])
def test_the_difference_merged_over_the_defaults_is_the_whole(text):
    resolved = config.parse(text)
    assert config.parse(yaml.safe_dump(resolved.beyond_defaults())) == resolved


def test_a_configuration_larger_than_a_step_can_be_given_is_one_line():
    """200 kB end as "Argument list too long" in kfp's local runner."""
    large = config.parse(f"task: {{kind: 'a:b', words: {'x' * 70_000}}}")
    for send in (lambda: parameters.make_parameters(large, ""), lambda: parameters.format_for_form(large)):
        with pytest.raises(ConfigError, match="65,536") as caught:
            send()
        assert len(caught.value.line) < 300
    with pytest.raises(ConfigError, match="65,536"):
        resolve.resolve_run("# " + "x" * 60_000, {}, "", values={"task": {"kind": "a:b", "words": "x" * 6_000}})


def test_a_text_of_a_run_of_before_may_be_larger():
    assert resolve.resolve_run("# " + "x" * 100_000, {}, "")[0] == config.parse("").anchored(".")


def test_the_object_wins_over_the_text_and_the_knobs_over_both():
    values = {"train": {"steps": 7.0, "global_batch_size": 8.0}, "launch": {"nodes": 2.0}}
    found, _ = resolve.resolve_run("train: {steps: 5, log_interval_steps: 3}", {"nodes": 4}, "", values=values)
    train = found.train
    assert (train.steps, train.log_interval_steps, train.global_batch_size, found.launch.nodes) == (7, 3, 8, 4)


def test_a_resumed_run_keeps_its_configuration_under_the_object(tmp_path):
    text = f"run: {{storage_root: {tmp_path}}}\ntrain: {{steps: 5}}"
    before, _ = resolve.resolve_run(text, {}, "")
    resolve.keep_run(resolve.open_run(before, "r"))
    found, run_id = resolve.resolve_run("", {}, f"{tmp_path}/runs/r", values={})
    assert (found.train.steps, run_id) == (5, "r")
    found, _ = resolve.resolve_run("", {}, f"{tmp_path}/runs/r", values={"checkpoint": {"keep_last": 5}})
    assert (found.train.steps, found.checkpoint.keep_last) == (5, 5)


@pytest.mark.parametrize("number", [3, 3.0, 2**53 - 1, float(2**53 - 1), -4.0])
def test_a_whole_number_arrives_as_an_integer(number):
    """Kubeflow's objects know doubles only."""
    found = parameters.restore_object({"task": {"rows": [number]}})["task"]["rows"][0]
    assert type(found) is int and found == number


@pytest.mark.parametrize("value", [True, False, 0.5, "3", [], {}])
def test_other_values_stay_as_they_are(value):
    assert parameters.restore_object({"a": value}) == {"a": value}


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"run": {"seed": 2**53}}, "config_json: run.seed"),
        ({"run": {"seed": 1e300}}, "config_json: run.seed"),
        ({"task": {"words": [1, None]}}, "config_json: task.words[1]"),
        ({"task": None}, "config_json: task"),
    ],
)
def test_what_an_object_cannot_carry_is_named(values, key):
    with pytest.raises(ConfigError) as caught:
        resolve.resolve_run("", {}, "", values=values)
    assert caught.value.line.startswith(f"{key}: ")


def test_a_wrong_key_of_the_object_is_blamed_on_the_object():
    with pytest.raises(ConfigError, match=r"^config_json: train\.stepz: unknown key"):
        resolve.resolve_run("train: {steps: 5}", {}, "", values={"train": {"stepz": 5}})


def test_the_text_may_be_the_uri_of_a_file(tmp_path):
    (tmp_path / "c.yaml").write_text("train: {steps: 6}")
    found, _ = resolve.resolve_run(f" file://{tmp_path}/c.yaml\n", {}, "", values={"train": {"log_interval_steps": 2}})
    assert (found.train.steps, found.train.log_interval_steps) == (6, 2)


@pytest.mark.parametrize(
    ("uri", "what"),
    [
        ("file:///no/such.yaml", "there is no such configuration"),
        ("http://169.254.169.254/latest", "no configuration is read from there"),
        ("simplecache::s3://b/c", "no configuration is read from there"),
        ("s3://b/c.zip::file:///x", "a chain of URIs"),
    ],
)
def test_a_uri_that_holds_no_configuration_is_one_line(uri, what):
    with pytest.raises(ConfigError, match=what):
        resolve.resolve_run(uri, {}, "")


def test_a_file_that_is_no_text_and_one_that_is_too_large_are_refused(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "large").write_text("x" * (1 << 20) + "xx")
    for name, what in (("binary", "not a text"), ("large", "larger than 1 MiB")):
        with pytest.raises(ConfigError, match=what):
            resolve.resolve_run(f"file://{tmp_path}/{name}", {}, "")


def test_storage_that_is_away_is_no_wrong_configuration(monkeypatch):
    def refuse(uri):
        raise ConnectionError("the endpoint does not answer")

    monkeypatch.setattr(parameters.storage, "read_bytes", refuse)
    with pytest.raises(RetryableError, match=r"s3://b/c\.yaml: the configuration cannot be read"):
        resolve.resolve_run("s3://b/c.yaml", {}, "")


def test_what_config_show_prints_for_kubeflow_can_be_pasted(tmp_path):
    (tmp_path / "c.yaml").write_text(CONFIG)
    done = CliRunner().invoke(
        config_command, ["show", "--config", f"{tmp_path}/c.yaml", "--set", "train.steps=9", "--for-kubeflow"]
    )
    assert done.exit_code == 0
    pasted = json.loads(done.stdout)
    assert pasted["train"] == {"steps": 9} and "optimizer" not in pasted
    found, _ = resolve.resolve_run("", {}, "", values=pasted)
    assert found == resolve.anchor_paths(config.load([f"{tmp_path}/c.yaml"], ["train.steps=9"]), ".")
