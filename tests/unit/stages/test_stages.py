"""What each stage reads, asks for and leaves behind; MLflow, jobs and the registry are records of calls."""

import json
import re
from types import SimpleNamespace

import pytest
from helpers.documents import (
    completion_of,
    digits_config,
    evaluation_of,
    finished_run,
    publish_commit,
    publish_described_export,
    registration_of,
    sharded_run,
)

from kftrain import launch, registry, tracking
from kftrain.config import parse
from kftrain.core import storage
from kftrain.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    FencedError,
    LaunchError,
    OtherJobError,
    OtherTrainingError,
    TrackingError,
)
from kftrain.registry import Champion
from kftrain.run import documents
from kftrain.run.config import read_config
from kftrain.run.error import read_error, summarize_failure
from kftrain.run.paths import RunPaths
from kftrain.stages.evaluate import evaluate
from kftrain.stages.finish import finish
from kftrain.stages.register import gate, register
from kftrain.stages.shard import shard, shard_from_pipeline
from kftrain.stages.train import train
from kftrain.tasks.run_dataset import read_dataset
from kftrain.tracking import mlflow_run

TEXTS = """
task: {kind: language_modeling, sequence_length: 16, tokenizer: bytes}
train: {global_batch_size: 4}
data: {shard_size_bytes: 100000, validation_fraction: 0.2}
"""


@pytest.fixture
def calls(monkeypatch):
    """What the stages asked others to do, by name."""
    made = SimpleNamespace(started=[], finished=[], evaluated=[], texts=[], trained=[], scored=[], curves=[], lines=[])

    def start_run(config, run_id, lineage, further_tags):
        made.started.append((run_id, lineage))
        return "m-1"

    monkeypatch.setattr(tracking, "check", lambda uri: None)
    monkeypatch.setattr(tracking, "read_status", lambda uri, mlflow_run_id: "RUNNING")
    monkeypatch.setattr(tracking, "start_run", start_run)
    monkeypatch.setattr(tracking, "finish_run", lambda uri, run, status, tags=None: made.finished.append((run, status)))
    monkeypatch.setattr(tracking, "log_evaluation", lambda uri, run, metrics: made.evaluated.append((run, metrics)))
    monkeypatch.setattr(tracking, "log_text", lambda uri, run, text, name: made.texts.append((run, name)))
    monkeypatch.setattr(tracking, "log_missing", lambda uri, run, history: made.curves.append((run, history)))
    return made


def train_with(monkeypatch, calls, completion_of_run):
    def run_training(paths, config, mlflow_run_id):
        calls.trained.append(mlflow_run_id())
        return completion_of_run(paths, config)

    monkeypatch.setattr(launch, "run_training", run_training)


def test_sharding_opens_the_run_names_it_first_and_writes_the_pointer(tmp_path, calls):
    config = digits_config(tmp_path)
    outcome = shard(config, "r-1", progress=calls.lines.append)
    pointer = storage.read_json(f"{outcome.run_uri}/shards.json")
    assert calls.lines[0] == f"run {outcome.run_uri}"
    assert storage.exists(pointer["manifest_uri"])
    assert outcome.summary["dataset_digest"] == pointer["dataset_digest"]
    assert next(iter(outcome.summary)) == "result"
    assert outcome.metrics["train_samples"] + outcome.metrics["validation_samples"] == 1797
    assert "1,633" in outcome.markdown


def test_a_pipeline_run_gets_its_folder_from_the_job_and_a_retry_finds_it(tmp_path, calls):
    text = digits_config(tmp_path).to_yaml()
    first = shard_from_pipeline(text, {"steps": 7}, "", "8F-11", calls.lines.append)
    again = shard_from_pipeline(text, {"steps": 7}, "", "8F-11", calls.lines.append)
    assert first.run_uri == again.run_uri and first.run_uri.endswith("/runs/tiny-8f11")
    assert read_config(RunPaths(first.run_uri)).train.steps == 7


def test_a_resumed_run_keeps_its_data_when_the_source_has_grown(tmp_path, calls):
    source = tmp_path / "texts"
    source.mkdir()
    for i in range(20):
        (source / f"{i}.txt").write_text("some words " * 50)
    config = parse(TEXTS, [f"data.source={source}", f"run.storage_root={tmp_path}/store"])
    first = shard(config, "r-1", progress=calls.lines.append)
    (source / "new.txt").write_text("more words " * 50)
    resumed = shard(config, "r-1", must_exist=True, progress=calls.lines.append)
    assert resumed.summary["dataset_digest"] == first.summary["dataset_digest"]
    fresh = shard(config, "r-2", progress=calls.lines.append)
    assert fresh.summary["dataset_digest"] != first.summary["dataset_digest"]


def test_a_resumed_run_refuses_other_data(tmp_path, calls):
    first = shard(digits_config(tmp_path), "r-1", progress=calls.lines.append)
    publish_commit(RunPaths(first.run_uri))
    other = digits_config(tmp_path, "data.validation_fraction=0.3")
    with pytest.raises(CheckpointError, match=r"another training: dataset .* -> "):
        shard(other, "r-1", progress=calls.lines.append)


@pytest.mark.parametrize(
    ("override", "where"),
    [
        ("launch.processes_per_node=17", "train.global_batch_size"),
        ("train.global_batch_size=100000", "train.global_batch_size"),
        ("data.shard_size_bytes=1000000000000", "run.storage_root"),
    ],
)
def test_what_cannot_end_well_ends_before_the_first_expensive_step(tmp_path, calls, override, where):
    with pytest.raises(ConfigError, match=where) as caught:
        shard(digits_config(tmp_path, override), "r-1", progress=calls.lines.append)
    found = storage.read_json(f"{tmp_path}/store/runs/r-1/error.json")
    assert (found["stage"], found["line"]) == ("shard", caught.value.line)


def test_a_pipeline_that_would_have_too_few_micro_batches_ends_before_the_data_is_sharded(tmp_path, calls):
    config = digits_config(tmp_path, "launch.processes_per_node=2", "parallel.pipeline=2")
    with pytest.raises(ConfigError, match=r"at least 2 micro batches.*1 micro batches.*there are 2, 3 or more"):
        shard(config, "r-1", progress=calls.lines.append)


def test_a_storage_root_that_cannot_be_written_is_named(tmp_path, calls):
    (tmp_path / "store").write_text("a file, not a folder")
    with pytest.raises(ConfigError, match=r"run\.storage_root.*cannot be written"):
        shard(digits_config(tmp_path), "r-1", progress=calls.lines.append)
    assert json.loads(calls.lines[-1].removeprefix("error "))["exit_code"] == 10


def test_nothing_is_left_of_the_probe(tmp_path, calls):
    shard(digits_config(tmp_path), "r-1", progress=calls.lines.append)
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["runs", "shards"]


def test_an_mlflow_that_does_not_answer_stops_the_run_at_once(tmp_path, calls, monkeypatch):
    def refuse(uri):
        raise TrackingError("no answer")

    monkeypatch.setattr(tracking, "check", refuse)
    with pytest.raises(TrackingError):
        shard(digits_config(tmp_path), "r-1", progress=calls.lines.append)
    assert not (tmp_path / "store" / "shards").exists()


def test_training_starts_the_mlflow_run_and_hands_it_to_the_job(tmp_path, calls, monkeypatch):
    paths, _, shards = sharded_run(tmp_path)
    train_with(monkeypatch, calls, lambda p, c: completion_of(p, c, shards.dataset_digest))
    outcome = train(paths.uri, calls.lines.append)
    assert calls.trained == ["m-1"] and mlflow_run.read_mlflow_run_id(paths) == "m-1"
    run_id, lineage = calls.started[0]
    assert (run_id, lineage.digest, lineage.uri) == ("r-1", shards.dataset_digest, shards.manifest_uri)
    assert outcome.metrics["loss"] == 0.5 and outcome.metrics["num_parameters"] == 12345.0
    assert outcome.summary["export_digest"] == "e" * 64


def refuse_mlflow(monkeypatch):
    def refuse(*arguments):
        raise TrackingError("no answer", where="http://mlflow")

    monkeypatch.setattr(tracking, "start_run", refuse)


def test_a_training_that_has_an_mlflow_run_goes_on_with_it_while_mlflow_is_down(tmp_path, calls, monkeypatch):
    """The id is part of what the job is: a launcher that is started again must ask for the very same."""
    paths, _, shards = sharded_run(tmp_path)
    train_with(monkeypatch, calls, lambda p, c: completion_of(p, c, shards.dataset_digest))
    storage.publish_json(mlflow_run.tracked_uri(paths), mlflow_run.Tracked(mlflow_run_id="m-7").to_dict())
    refuse_mlflow(monkeypatch)
    train(paths.uri, calls.lines.append)
    assert calls.trained == ["m-7"] and mlflow_run.read_mlflow_run_id(paths) == "m-7"
    (warning,) = [line for line in calls.lines if line.startswith("warning: ")]
    assert "MLflow run m-7" in warning and "http://mlflow: no answer" in warning


def test_a_training_that_has_no_mlflow_run_yet_does_not_start_while_mlflow_is_down(tmp_path, calls, monkeypatch):
    paths, _, shards = sharded_run(tmp_path)
    train_with(monkeypatch, calls, lambda p, c: completion_of(p, c, shards.dataset_digest))
    refuse_mlflow(monkeypatch)
    with pytest.raises(TrackingError, match="no answer"):
        train(paths.uri, calls.lines.append)
    assert calls.trained == []


def test_a_run_that_is_complete_is_not_trained_again(tmp_path, calls, monkeypatch):
    paths, _ = finished_run(tmp_path)
    train_with(monkeypatch, calls, lambda p, c: pytest.fail("trained again"))
    outcome = train(paths.uri, calls.lines.append)
    assert outcome.summary["result"].startswith("was already trained")


@pytest.mark.parametrize(
    ("before", "kind", "after"),
    [
        ("FAILED", OtherJobError, [("m-1", "FAILED")]),
        ("KILLED", OtherJobError, [("m-1", "KILLED")]),
        ("RUNNING", OtherJobError, []),
        ("FAILED", FencedError, []),
    ],
)
def test_a_launch_that_is_refused_leaves_mlflow_as_it_was(tmp_path, calls, monkeypatch, before, kind, after):
    """The job that holds the run may have lost its launcher; one that another launcher follows is at work."""
    paths, _, _ = sharded_run(tmp_path)
    storage.publish_json(mlflow_run.tracked_uri(paths), mlflow_run.Tracked(mlflow_run_id="m-1").to_dict())
    monkeypatch.setattr(tracking, "read_status", lambda uri, mlflow_run_id: before)

    def refuse(paths, config):
        raise kind("a job with another specification holds this run")

    train_with(monkeypatch, calls, refuse)
    with pytest.raises(FencedError):
        train(paths.uri, calls.lines.append)
    assert calls.trained == ["m-1"] and calls.finished == after


def test_a_run_whose_export_is_gone_is_trained_again(tmp_path, calls, monkeypatch):
    paths, _ = finished_run(tmp_path)
    shards = read_dataset(paths)[0]
    storage.remove(f"{paths.export('c' * 64)}/manifest.json")
    train_with(monkeypatch, calls, lambda p, c: completion_of(p, c, shards.dataset_digest))
    train(paths.uri, calls.lines.append)
    assert calls.trained == ["m-1"]


def test_a_completion_of_another_training_is_refused(tmp_path, calls):
    paths, config, shards = sharded_run(tmp_path)
    other = completion_of(paths, config, shards.dataset_digest, training_digest="0" * 64)
    storage.publish_json(paths.complete, other.to_dict())
    with pytest.raises(CheckpointError, match="another training"):
        train(paths.uri, calls.lines.append)


def test_a_training_that_fails_closes_its_mlflow_run(tmp_path, calls, monkeypatch):
    def fail(paths, config):
        raise LaunchError("no luck")

    paths, _, _ = sharded_run(tmp_path)
    train_with(monkeypatch, calls, fail)
    with pytest.raises(LaunchError):
        train(paths.uri, calls.lines.append)
    assert calls.finished == [("m-1", "FAILED")]
    assert read_error(paths.error).stage == "train"


def test_a_run_without_shards_says_which_stage_comes_first(tmp_path, calls):
    paths, _, _ = sharded_run(tmp_path)
    storage.remove(paths.shards)
    with pytest.raises(DataError, match=r"shards\.json is missing"):
        train(paths.uri, calls.lines.append)


@pytest.fixture
def scored(tmp_path, calls, monkeypatch):
    """Evaluates the finished run beside a champion; returns the targets of the job."""
    paths, config = finished_run(tmp_path)
    completion = documents.read(documents.Completion, paths.complete)
    storage.publish_json(mlflow_run.tracked_uri(paths), mlflow_run.Tracked(mlflow_run_id="m-1").to_dict())

    def run_evaluation(paths, config, digest, own, others):
        targets = [own, *others()]
        calls.scored.append((digest, targets))
        return [evaluation_of(config, completion) for _ in targets]

    def score(champion):
        monkeypatch.setattr(registry, "champion", lambda config: champion)
        monkeypatch.setattr(launch, "run_evaluation", run_evaluation)
        outcome = evaluate(paths.uri, calls.lines.append)
        return outcome, calls.scored[-1][1]

    return score, config, paths


def champion_of(tmp_path, export=True, root="store", model=None, task=None, **changes):
    config, folder = digits_config(tmp_path), f"{tmp_path}/{root}/runs/c"
    description = {
        "schema_version": 1,
        "model": config.model.model_dump(mode="json") | (model or {}),
        "task": config.task.model_dump(mode="json") | (task or {}),
        "model_arguments": {},
    }
    digest = publish_described_export(f"{folder}/export", description) if export else "f" * 64
    fields = {"version": 1, "run_uri": folder, "checkpoint_digest": "d" * 64, "export_digest": digest}
    return Champion(**{**fields, "export_uri": f"{folder}/export", **changes})


def test_the_champion_is_scored_beside_the_challenger_and_into_its_own_run(tmp_path, scored, calls):
    score, _, paths = scored
    champion = champion_of(tmp_path)
    outcome, targets = score(champion)
    assert [target.export_digest for target in targets] == ["e" * 64, champion.export_digest]
    assert [target.required for target in targets] == [True, False]
    assert not storage.exists(paths.unmeasured)
    assert targets[0].output_uri.startswith(paths.uri) and targets[1].output_uri.startswith(champion.run_uri)
    assert calls.evaluated == [("m-1", {"accuracy": 0.9, "cross_entropy": 0.4})]
    assert outcome.metrics == {"accuracy": 0.9, "cross_entropy": 0.4}
    assert outcome.confusion.labels == ["a", "b"]


def test_a_first_model_is_scored_alone(scored):
    assert len(scored[0](None)[1]) == 1


def test_the_champion_is_not_scored_against_itself(tmp_path, scored):
    assert len(scored[0](champion_of(tmp_path, checkpoint_digest="c" * 64))[1]) == 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"task": {"image_size": 16}}, "another task"),
        ({"export": False}, "no export here"),
        ({"export_digest": "f" * 64}, "not the expected one"),
        ({"model": {"kind": "os:system"}}, "os:system.*registry.trusted_kinds"),
        ({"task": {"kind": "builtins:eval"}}, "builtins:eval"),
        ({"root": "elsewhere"}, "elsewhere.*registry.trusted_roots"),
        ({"run_uri": "http://169.254.169.254/runs/c"}, "169.254.169.254.*registry.trusted_roots"),
        ({"export_uri": "simplecache::http://169.254.169.254/x"}, "chain"),
        ({"checkpoint_digest": "../../../../x"}, "may not leave its folder"),
        ({"checkpoint_digest": "a\0b"}, "control characters"),
    ],
)
def test_a_champion_that_cannot_be_scored_is_left_out_with_the_reason(tmp_path, scored, calls, options, reason):
    """The step is green all the same, and the gate finds the reason as data."""
    score, _, paths = scored
    champion = champion_of(tmp_path, **options)
    assert len(score(champion)[1]) == 1
    assert any(re.search(reason, line) and "version 1" in line for line in calls.lines)
    found = documents.read(documents.Unmeasured, paths.unmeasured)
    assert re.search(reason, found.reason)
    assert (found.evaluation_digest, found.export_digest) == (calls.scored[-1][0], champion.export_digest)


@pytest.mark.parametrize(
    ("options", "override"),
    [
        ({"model": {"kind": "own:Model"}}, "registry.trusted_kinds=[own:Model]"),
        ({"root": "elsewhere"}, "registry.trusted_roots=[{root}/elsewhere]"),
    ],
)
def test_what_the_configuration_lists_is_scored(tmp_path, scored, calls, options, override):
    score, config, paths = scored
    assert len(score(champion_of(tmp_path, **options))[1]) == 1
    listed = parse(config.to_yaml(), [override.format(root=tmp_path)])
    storage.publish(paths.config, listed.to_yaml())
    assert len(score(champion_of(tmp_path, **options))[1]) == 2
    assert not storage.exists(paths.unmeasured)


@pytest.mark.parametrize("stage", [evaluate, register])
def test_a_completion_that_names_a_foreign_place_is_refused(tmp_path, calls, monkeypatch, stage):
    paths, _ = finished_run(tmp_path)
    completion = documents.read(documents.Completion, paths.complete)
    foreign = completion.model_copy(update={"export_uri": "http://169.254.169.254/export"})
    storage.publish_json(paths.complete, foreign.to_dict())
    monkeypatch.setattr(tracking, "read_status", lambda uri, run: "RUNNING")
    monkeypatch.setattr(registry, "champion", lambda config: pytest.fail("went on"))
    monkeypatch.setattr(registry, "register", lambda *arguments: pytest.fail("went on"))
    with pytest.raises(ConfigError, match=r"169\.254\.169\.254.*registry\.trusted_roots"):
        stage(paths.uri, calls.lines.append)


def test_what_the_job_found_out_about_the_champion_is_said(tmp_path, scored, calls, monkeypatch):
    score, _, paths = scored
    champion = champion_of(tmp_path)
    score(champion)
    run_evaluation = launch.run_evaluation

    def given_up(paths, config, digest, own, others):
        found = documents.Unmeasured(
            evaluation_digest=digest, export_digest=champion.export_digest, reason="a file is damaged"
        )
        evaluations = run_evaluation(paths, config, digest, own, others)
        storage.publish_json(paths.unmeasured, found.to_dict())
        return evaluations[:1]

    monkeypatch.setattr(launch, "run_evaluation", given_up)
    evaluate(paths.uri, calls.lines.append)
    assert "the champion, version 1, is not scored: a file is damaged" in calls.lines


def test_a_run_that_is_not_trained_is_not_evaluated(tmp_path, calls):
    paths, _, _ = sharded_run(tmp_path)
    with pytest.raises(LaunchError, match=r"COMPLETE\.json is missing"):
        evaluate(paths.uri, calls.lines.append)


@pytest.fixture
def registering(monkeypatch):
    gated = []

    def gate_and_promote(config, paths, registered, completion, evaluation, metrics, trained_on, lacks_reference):
        gated.append(config)
        return registration_of(paths, config)

    monkeypatch.setattr(registry, "register", lambda *arguments: "registered")
    monkeypatch.setattr(registry, "gate_and_promote", gate_and_promote)
    return gated


def test_registering_writes_the_report_and_ends_the_mlflow_run(tmp_path, calls, registering):
    paths, config = finished_run(tmp_path)
    outcome = register(paths.uri, calls.lines.append)
    assert storage.read_text(paths.report) == outcome.html
    assert calls.texts == [("m-1", "report.html")] and calls.finished == [("m-1", "FINISHED")]
    assert outcome.metrics["improvement"] == 0.02 and outcome.metrics["promoted"] == 1.0
    assert registering == [config]


def test_the_gate_can_be_asked_again_with_other_settings_of_its_own(tmp_path, calls, registering):
    paths, _ = finished_run(tmp_path)
    gate(paths.uri, ("registry.min_effect=0.5",), calls.lines.append)
    assert registering[0].registry.min_effect == 0.5
    assert read_config(paths).registry.min_effect == 0.0


@pytest.mark.parametrize("override", ["train.steps=1", "registry.model_name=other", "run.storage_root=/elsewhere"])
def test_the_gate_takes_no_other_settings(tmp_path, calls, registering, override):
    paths, _ = finished_run(tmp_path)
    with pytest.raises(ConfigError, match="only the gate's settings"):
        gate(paths.uri, (override,), calls.lines.append)
    assert not registering


def test_a_run_that_is_not_registered_cannot_be_gated(tmp_path, calls, registering):
    paths, _ = finished_run(tmp_path)
    storage.remove(paths.registration)
    with pytest.raises(TrackingError, match=r"registration\.json is missing"):
        gate(paths.uri, (), calls.lines.append)


def finish_of(tmp_path, state, calls, job_id="8f11"):
    text = digits_config(tmp_path).to_yaml()
    return finish(text, "", "", job_id, state, calls.lines.append)


@pytest.mark.parametrize("state", ["COMPLETE", "SUCCEEDED"])
def test_the_exit_handler_of_a_run_that_succeeded_says_so(tmp_path, calls, state):
    outcome = finish_of(tmp_path, state, calls)
    assert outcome.summary["result"] == "the run succeeded"
    assert "nothing to clean up" in outcome.html and f"{outcome.run_uri}/report.html" in outcome.html
    assert "nothing to clean up" in outcome.markdown and not calls.finished


def test_the_exit_handler_explains_a_failure_in_the_runs_folder(tmp_path, calls):
    run = shard_from_pipeline(digits_config(tmp_path).to_yaml(), {}, "", "8f11", calls.lines.append)
    paths = RunPaths(run.run_uri)
    storage.publish_json(mlflow_run.tracked_uri(paths), mlflow_run.Tracked(mlflow_run_id="m-1").to_dict())
    storage.publish_json(paths.error, summarize_failure("train", DataError("a shard is damaged")).to_dict())
    outcome = finish_of(tmp_path, "FAILED", calls)
    assert outcome.run_uri == run.run_uri
    assert "a shard is damaged" in outcome.markdown and "a shard is damaged" in outcome.summary["result"]
    assert storage.read_text(f"{run.run_uri}/failure.html") == outcome.html
    assert calls.finished == [("m-1", "FAILED")]


def test_a_step_that_was_killed_without_a_word_still_fails_the_mlflow_run(tmp_path, calls):
    run = shard_from_pipeline(digits_config(tmp_path).to_yaml(), {}, "", "8f11", calls.lines.append)
    storage.publish_json(
        mlflow_run.tracked_uri(RunPaths(run.run_uri)), mlflow_run.Tracked(mlflow_run_id="m-1").to_dict()
    )
    assert "RUNNING" in finish_of(tmp_path, "RUNNING", calls).summary["result"]
    assert calls.finished == [("m-1", "FAILED")]


def test_the_exit_handler_survives_a_configuration_that_nobody_could_read(tmp_path, calls):
    outcome = finish("train: {stepz: 1}", "", "", "8f11", "FAILED", calls.lines.append)
    assert "stepz" in outcome.summary["result"] and "stepz" in outcome.markdown


def test_the_exit_handler_of_a_run_that_was_never_opened_creates_nothing(tmp_path, calls):
    finish_of(tmp_path, "FAILED", calls, job_id="99")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("error", [OtherJobError, OtherTrainingError])
def test_a_run_that_is_refused_when_its_job_is_started_has_its_configuration_of_before(
    tmp_path, calls, monkeypatch, error
):
    """Its job had not committed anything yet when the run was opened."""
    config = digits_config(tmp_path)
    paths = RunPaths(shard(config, "r-1", progress=calls.lines.append).run_uri)
    before = storage.read_text(paths.config)
    changed = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"learning_rate": 0.5})})
    for _ in range(2):
        shard(changed, "r-1", must_exist=True, progress=calls.lines.append)
        assert read_config(paths).optimizer.learning_rate == 0.5

    def refused(paths, config):
        raise error("refused")

    train_with(monkeypatch, calls, refused)
    with pytest.raises(error):
        train(paths.uri, calls.lines.append)
    assert storage.read_text(paths.config) == before
    assert "the run has its configuration of before again" in calls.lines
    with pytest.raises(error):
        train(paths.uri, calls.lines.append)
    assert storage.read_text(paths.config) == before, "there is nothing to put back"


def test_any_other_failure_leaves_the_configuration_that_it_was_opened_with(tmp_path, calls, monkeypatch):
    config = digits_config(tmp_path)
    paths = RunPaths(shard(config, "r-1", progress=calls.lines.append).run_uri)
    changed = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"learning_rate": 0.5})})
    shard(changed, "r-1", must_exist=True, progress=calls.lines.append)

    def failed(paths, config):
        raise LaunchError("failed")

    train_with(monkeypatch, calls, failed)
    with pytest.raises(LaunchError):
        train(paths.uri, calls.lines.append)
    assert read_config(paths).optimizer.learning_rate == 0.5
