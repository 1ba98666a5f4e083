"""Which direction of the gate's metric is better says the metric; what a run has kept refuses nothing."""

from types import MappingProxyType

import pytest
from helpers.documents import digits_config, finished_run, registration_of

from kftrain import registry, tracking
from kftrain.config import parse, parse_kept
from kftrain.core import storage
from kftrain.errors import ConfigError, UserCodeError
from kftrain.run.config import keep_config, read_config
from kftrain.run.paths import RunPaths
from kftrain.stages.comparison import compare_versions
from kftrain.stages.register import gate, register
from kftrain.stages.shard import shard
from kftrain.tasks import Classification, Regression
from kftrain.tasks.user_metrics import with_goal

DIGITS = "task: {kind: image_classification, image_size: 8, num_classes: 10}\n"
OWN = f"task: {{kind: '{__name__}:OwnTask', num_classes: 2}}\n"


class OwnTask(Classification):
    """A task that says nothing of a metric of its own."""

    def schema(self):
        raise AssertionError("nobody asks for it")


class Errors(OwnTask):
    """A task that calls by a known name what is the better the less of it there is."""

    metric_goals = MappingProxyType({"accuracy": "minimize"})


@pytest.fixture(autouse=True)
def no_mlflow(monkeypatch):
    monkeypatch.setattr(tracking, "check", lambda uri: None)
    monkeypatch.setattr(tracking, "read_status", lambda uri, mlflow_run_id: "RUNNING")
    monkeypatch.setattr(tracking, "start_run", lambda *arguments: "m-1")
    for name in ("finish_run", "log_text", "log_missing"):
        monkeypatch.setattr(tracking, name, lambda *arguments, **more: None)


def settings(text, *overrides):
    return with_goal(parse(text, [f"registry.{override}" for override in overrides])).registry


@pytest.mark.parametrize(
    ("text", "metric", "goal"),
    [
        ("task: {kind: language_modeling, sequence_length: 8}", "bits_per_byte", "minimize"),
        ("task: {kind: language_modeling, sequence_length: 8}", "perplexity", "minimize"),
        ("task: {kind: language_modeling, sequence_length: 8}", "accuracy", "maximize"),
        (DIGITS, "accuracy", "maximize"),
        (DIGITS, "cross_entropy", "minimize"),
        (OWN, "accuracy", "maximize"),
        (OWN.replace("OwnTask", "Errors"), "accuracy", "minimize"),
    ],
)
def test_a_goal_that_is_left_out_is_the_metrics(text, metric, goal):
    assert settings(text, f"metric={metric}").goal == goal
    assert settings(text, f"metric={metric}", f"goal={goal}").goal == goal


def test_every_metric_of_the_tasks_has_a_goal():
    classes = {"correct": 1.0, "cross_entropy": 1.0, "count": 2.0}
    numbers = {"squared_error": 1.0, "count": 2.0, "squared_target": 5.0, "target": 1.0}
    assert set(Classification.metric_goals) == set(Classification.metrics(None, classes))
    assert set(Regression.metric_goals) == set(Regression.metrics(None, numbers))


class Wrong(OwnTask):
    """A task that says nonsense of its metrics."""

    metric_goals = ("accuracy",)


class Vague(OwnTask):
    """A task that knows the direction by another word."""

    metric_goals = MappingProxyType({"accuracy": "up"})


def test_a_task_that_says_nonsense_of_its_metrics_is_refused():
    with pytest.raises(UserCodeError, match=r"task\.metric_goals"):
        settings(OWN.replace("OwnTask", "Wrong"), "metric=accuracy")
    with pytest.raises(ConfigError, match=r"registry\.goal"):
        settings(OWN.replace("OwnTask", "Vague"), "metric=accuracy")


def test_a_goal_that_contradicts_the_metric_is_refused():
    with pytest.raises(ConfigError, match="more of accuracy is better") as raised:
        settings(DIGITS, "metric=accuracy", "goal=minimize")
    assert raised.value.where == "registry.goal" and "maximize" in raised.value.fix


def test_of_a_metric_that_the_task_does_not_declare_the_goal_must_be_given():
    with pytest.raises(ConfigError, match=r"registry\.goal.*recall") as raised:
        settings(OWN, "metric=recall")
    assert "accuracy" in raised.value.fix
    assert settings(OWN, "metric=recall", "goal=maximize").goal == "maximize"


def test_whoever_names_another_metric_without_a_goal_does_not_mean_the_goal_of_the_one_before():
    config = parse_kept("registry: {metric: accuracy, goal: maximize}", "run", ["registry.metric=cross_entropy"])
    assert config.registry.goal == ""
    for overrides in (["registry.metric=accuracy"], ["registry.goal=maximize", "registry.metric=other"]):
        assert parse_kept("registry: {metric: accuracy, goal: maximize}", "run", overrides).registry.goal == "maximize"
    above = {"values": {"registry": {"metric": "cross_entropy"}}}
    assert parse("registry: {metric: accuracy, goal: maximize}", above=above).registry.goal == ""


def without_goal(root, *overrides):
    return digits_config(root, "registry.goal=''", *overrides)


def test_the_first_step_keeps_the_goal_with_the_run_and_refuses_a_wrong_one(tmp_path):
    paths = RunPaths(shard(without_goal(tmp_path), "r-1", progress=print).run_uri)
    assert read_config(paths) == digits_config(tmp_path)  # as one that says it, with an equal digest
    for override in ("registry.goal=minimize", "registry.metric=recall"):
        with pytest.raises(ConfigError):
            shard(without_goal(tmp_path, override), "r-2", progress=print)
        assert storage.read_json(f"{tmp_path}/store/runs/r-2/error.json")["stage"] == "shard"


def test_a_run_that_kept_the_default_of_before_goes_on_with_the_goal_of_its_metric(tmp_path):
    kept = digits_config(tmp_path, "registry.goal=minimize")
    keep_config(RunPaths.of(kept.run.storage_root, "r-1"), kept)
    paths = RunPaths(shard(kept, "r-1", must_exist=True, progress=print).run_uri)
    assert read_config(paths).registry.goal == "maximize"
    shard(kept, "r-1", must_exist=True, progress=print)  # the pod that runs it again
    schedule = ["schedule.name=nightly", "schedule.cron=0 0 2 * * *"]  # as a CronJob has kept it
    scheduled = digits_config(tmp_path, "registry.goal=minimize", *schedule)
    assert read_config(RunPaths(shard(scheduled, "r-2", progress=print).run_uri)).registry.goal == "maximize"


def test_the_gate_decides_by_the_metrics_goal_whatever_an_old_run_has_kept(tmp_path, monkeypatch):
    paths, resolved = finished_run(tmp_path, "registry.goal=minimize")
    asked = []
    monkeypatch.setattr(registry, "register", lambda *arguments: "registered")
    monkeypatch.setattr(registry, "remove_dead_writers", lambda *arguments: None)
    monkeypatch.setattr("kftrain.stages.register.count_seen_records", lambda *arguments: None)

    def decide(config, *arguments):
        asked.append((config.registry.metric, config.registry.goal))
        return registration_of(paths, resolved)

    monkeypatch.setattr(registry, "gate_and_promote", decide)
    register(paths.uri, print)
    gate(paths.uri, (), print)
    gate(paths.uri, ("registry.metric=cross_entropy",), print)
    assert asked == [("accuracy", "maximize"), ("accuracy", "maximize"), ("cross_entropy", "minimize")]
    assert "higher is better" in storage.read_text(paths.report)
    with pytest.raises(ConfigError, match=r"registry\.goal"):
        gate(paths.uri, ("registry.goal=minimize",), print)


def test_versions_are_compared_by_the_metrics_goal(tmp_path, monkeypatch):
    _, config = finished_run(tmp_path, "registry.goal=minimize")
    found = registry.ComparedVersions(config.model_name, "e" * 64, None, [])
    monkeypatch.setattr(registry, "compare", lambda *arguments: found)
    assert compare_versions(config).goal == "maximize"


def test_what_the_training_is_does_not_depend_on_the_goal(tmp_path):
    said, left_out = digits_config(tmp_path), without_goal(tmp_path)
    assert said.training_digest("d") == left_out.training_digest("d")
