import pytest
from helpers.documents import completion_of, digits_config, evaluation_of, publish_export

from kftrain.core import storage
from kftrain.errors import ConfigError, EvaluationError, LaunchError
from kftrain.run.completion import (
    build_metrics_uri,
    read_completion,
    read_evaluations,
)
from kftrain.run.config import keep_job_config, read_job_config
from kftrain.run.documents import EvaluationRequest, EvaluationTarget, Unmeasured
from kftrain.run.export import is_export
from kftrain.run.job_tasks import EVALUATION, TRAINING
from kftrain.run.paths import RunPaths


@pytest.fixture
def run(tmp_path):
    """A run with a configuration and a pointer to shards: nothing is done yet."""
    resolved = digits_config(tmp_path)
    paths = RunPaths.of(resolved.run.storage_root, "r")
    storage.publish(paths.config, resolved.to_yaml())
    storage.publish_json(paths.shards, {"schema_version": 1, "manifest_uri": "m", "dataset_digest": "d"})
    return paths, resolved


def test_a_training_is_complete_with_the_completion_of_this_very_training(run):
    paths, resolved = run
    assert not TRAINING.is_complete(paths, resolved)
    completion = completion_of(paths, resolved, "d")
    publish_export(completion.export_uri)
    storage.publish_json(paths.complete, completion.to_dict())
    assert TRAINING.is_complete(paths, resolved)
    assert read_completion(paths, resolved) == completion


def test_a_training_whose_export_is_gone_is_not_complete(run):
    paths, resolved = run
    completion = completion_of(paths, resolved, "d")
    storage.publish_json(paths.complete, completion.to_dict())
    storage.publish(f"{completion.export_uri}/config.json", "{}")  # half of it may be left
    assert not TRAINING.is_complete(paths, resolved)
    with pytest.raises(LaunchError, match=f"{paths.complete}: the export of this run is gone"):
        read_completion(paths, resolved)


@pytest.mark.parametrize("changes", [{"step": 19}, {"training_digest": "another"}])
def test_a_completion_of_something_else_completes_nothing(run, changes):
    paths, resolved = run
    completion = completion_of(paths, resolved, "d", **changes)
    publish_export(completion.export_uri)
    storage.publish_json(paths.complete, completion.to_dict())
    assert not TRAINING.is_complete(paths, resolved)


def test_a_damaged_completion_completes_nothing(run):
    paths, resolved = run
    storage.publish(paths.complete, '{"schema_version": 1, "run_id"')
    assert not TRAINING.is_complete(paths, resolved)


@pytest.fixture
def request_of(run):
    """Asks for two evaluations; returns the request and what one of them would be."""
    paths, resolved = run
    completion = completion_of(paths, resolved, "d")
    evaluation = evaluation_of(resolved, completion)
    targets = [
        EvaluationTarget(
            export_uri=completion.export_uri,
            export_digest=completion.export_digest,
            checkpoint_digest=completion.checkpoint_digest,
            output_uri=f"{paths.uri}/evaluation/{name}",
        )
        for name in ("challenger", "champion")
    ]
    request = EvaluationRequest(evaluation_digest=evaluation.evaluation_digest, targets=targets)
    storage.publish_json(paths.evaluation_request, request.to_dict())
    return request, evaluation


def test_an_evaluation_is_complete_when_all_its_targets_have_metrics(run, request_of):
    paths, resolved = run
    request, evaluation = request_of
    for target in request.targets:
        assert not EVALUATION.is_complete(paths, resolved)
        storage.publish_json(build_metrics_uri(target), evaluation.to_dict())
    assert EVALUATION.is_complete(paths, resolved)
    assert read_evaluations(paths, request) == [evaluation, evaluation]


def test_an_evaluation_is_complete_without_a_champion_that_cannot_be_loaded(run, request_of):
    paths, resolved = run
    request, evaluation = request_of
    champion = request.targets[1].model_copy(update={"required": False, "export_digest": "f" * 64})
    request = request.model_copy(update={"targets": [request.targets[0], champion]})
    storage.publish_json(paths.evaluation_request, request.to_dict())
    storage.publish_json(build_metrics_uri(request.targets[0]), evaluation.to_dict())
    given_up = Unmeasured(evaluation_digest=request.evaluation_digest, export_digest="f" * 64, reason="damaged")
    others = [{"evaluation_digest": "another"}, {"export_digest": "another"}, {"export_digest": "e" * 64}]
    for changes in others:
        assert not EVALUATION.is_complete(paths, resolved)
        storage.publish_json(paths.unmeasured, given_up.model_copy(update=changes).to_dict())
    assert not EVALUATION.is_complete(paths, resolved)
    storage.publish_json(paths.unmeasured, given_up.to_dict())
    assert EVALUATION.is_complete(paths, resolved)
    assert read_evaluations(paths, request) == [evaluation]


@pytest.mark.parametrize("changes", [{"evaluation_digest": "another"}, {"export_digest": "another"}])
def test_metrics_of_something_else_complete_nothing(run, request_of, changes):
    paths, resolved = run
    request, evaluation = request_of
    for target in request.targets:
        storage.publish_json(build_metrics_uri(target), evaluation.model_copy(update=changes).to_dict())
    assert not EVALUATION.is_complete(paths, resolved)
    with pytest.raises(EvaluationError, match="of another evaluation"):
        read_evaluations(paths, request)


def test_an_evaluation_that_nobody_asked_for_is_not_complete(run):
    assert not EVALUATION.is_complete(*run)


def test_a_worker_takes_the_configuration_that_its_job_was_started_for_and_no_other(run):
    paths, resolved = run
    assert read_job_config(paths, resolved.digest()) == resolved
    with pytest.raises(ConfigError, match=r"config\.yaml is not the one this job was started for"):
        read_job_config(paths, "another")
    storage.remove(paths.config)
    with pytest.raises(ConfigError, match=r"it has no config\.yaml"):
        read_job_config(paths, resolved.digest())


def test_a_worker_that_is_started_again_takes_what_its_job_was_started_for_whoever_opened_the_run_since(run, tmp_path):
    paths, resolved = run
    keep_job_config(paths, resolved)
    other = digits_config(tmp_path, "launch.timeout_seconds=77")
    storage.publish(paths.config, other.to_yaml())
    assert read_job_config(paths, resolved.digest()) == resolved
    assert read_job_config(paths, other.digest()) == other


@pytest.fixture
def export_uri(tmp_path):
    return publish_export(f"{tmp_path}/export")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", None),
        ("model.safetensors", "half"),
        ("manifest.json", None),
        ("manifest.json", '{"files": '),
        ("manifest.json", '{"files": {"model.safetensors": 7}}'),
        ("manifest.json", '{"files": {}}'),
        ("manifest.json", "[]"),
    ],
)
def test_an_export_is_there_with_every_file_of_its_manifest(export_uri, name, content):
    assert is_export(export_uri)
    storage.remove(f"{export_uri}/{name}")
    if content is not None:
        storage.publish(f"{export_uri}/{name}", content)
    assert not is_export(export_uri)
