import pytest
from helpers.documents import publish_commit, publish_export

from kftrain import config
from kftrain.core import storage
from kftrain.errors import ConfigError, LaunchError, Preempted, RetryableError, StorageError
from kftrain.launch import jobs, spec
from kftrain.launch.base import build_launcher
from kftrain.run import attempts
from kftrain.run.config import read_job_config
from kftrain.run.documents import Completion
from kftrain.run.job_tasks import TRAINING
from kftrain.run.paths import RunPaths


class ScriptedLauncher:
    """Plays one outcome per attempt: an error to leave behind, or the start step of an attempt that succeeds."""

    def __init__(self, paths, script, interrupted=False):
        self.paths = paths
        self.script = list(script)
        self.interrupted = interrupted
        self.attempts = 0

    def prepare(self, job):
        self.prepared = job.task

    def close(self):
        self.closed = True

    def run(self, job):
        self.attempts += 1
        start_step, error = self.script.pop(0)
        if start_step:  # the attempt before has committed it
            publish_commit(self.paths, start_step)
        attempts.claim_run(self.paths, start_step, job.workers.num_processes)
        if error is None:
            return 0
        storage.publish_json(self.paths.error, error.to_dict())
        return error.exit_code


@pytest.fixture
def paths(tmp_path):
    paths = RunPaths.of(str(tmp_path), "r")
    storage.publish_json(paths.shards, {"schema_version": 1, "manifest_uri": "m", "dataset_digest": "d"})
    return paths


RESOLVED = config.parse("train: {steps: 10}\nlaunch: {max_restarts_without_progress: 2}")


def complete(paths, **changes):
    document = Completion(
        run_id="r",
        step=10,
        samples_consumed=320,
        attempt=1,
        world_size=2,
        checkpoint_uri="c",
        checkpoint_digest="cd",
        export_uri=f"{paths.uri}/export/e",
        export_digest="ed",
        dataset_digest="d",
        training_digest=RESOLVED.training_digest("d"),
        num_parameters=1,
        metrics={},
        seconds=1.0,
    )
    publish_export(document.export_uri)
    storage.publish_json(paths.complete, {**document.to_dict(), **changes})


def run(paths, monkeypatch, script, interrupted=False):
    launcher = ScriptedLauncher(paths, script, interrupted)
    monkeypatch.setattr(jobs, "build_launcher", lambda resolved: launcher)
    return launcher, lambda: jobs.run_training(paths, RESOLVED)


def test_exit_code_0_without_the_completion_file_is_no_success(paths, monkeypatch):
    _, training = run(paths, monkeypatch, [(0, None)])
    with pytest.raises(LaunchError, match=r"COMPLETE\.json is missing"):
        training()


@pytest.mark.parametrize("changes", [{"step": 9}, {"training_digest": "other"}])
def test_a_completion_of_something_else_is_no_success(paths, monkeypatch, changes):
    complete(paths, **changes)
    _, training = run(paths, monkeypatch, [(0, None)])
    with pytest.raises(LaunchError, match="of another training"):
        training()


def test_a_completion_whose_export_is_gone_is_no_success(paths, monkeypatch):
    complete(paths)
    storage.remove(f"{paths.uri}/export")
    _, training = run(paths, monkeypatch, [(0, None)])
    with pytest.raises(LaunchError, match="the export of this run is gone"):
        training()


def test_a_job_keeps_the_configuration_that_it_was_started_for(paths, monkeypatch):
    """Its workers may start again after somebody has opened the run with other launch settings."""
    complete(paths)

    class Opened(ScriptedLauncher):
        def run(self, job):
            storage.publish(paths.config, config.parse("launch: {nodes: 4}").to_yaml())
            assert read_job_config(paths, job.config_digest) == RESOLVED
            return super().run(job)

    launcher = Opened(paths, [(0, None)])
    monkeypatch.setattr(jobs, "build_launcher", lambda resolved: launcher)
    jobs.run_training(paths, RESOLVED)
    assert launcher.attempts == 1


def test_a_permanent_error_ends_the_job_at_once(paths, monkeypatch):
    launcher, training = run(paths, monkeypatch, [(0, ConfigError("wrong", where="model.dim", value=3))])
    with pytest.raises(ConfigError, match=r"model\.dim: wrong \(got 3\)"):
        training()
    assert launcher.attempts == 1


def test_a_retryable_error_leads_to_another_attempt(paths, monkeypatch):
    complete(paths)
    launcher, training = run(paths, monkeypatch, [(0, RetryableError("lost")), (4, None)])
    assert training().step == 10
    assert launcher.attempts == 2
    assert not storage.exists(paths.error)


def test_attempts_without_progress_are_limited(paths, monkeypatch):
    launcher, training = run(paths, monkeypatch, [(0, RetryableError("lost"))] * 9)
    with pytest.raises(LaunchError, match="failed 3 times without a new checkpoint, at last: lost"):
        training()
    assert launcher.attempts == 3


@pytest.mark.parametrize(
    "error",
    [
        storage.make_full_error(OSError(28, "No space left on device", "/disk/x")),
        StorageError("storage cannot be reached for 600 s: TimeoutError"),
    ],
)
def test_attempts_without_progress_for_storage_that_is_full_or_away_may_be_made_later(error, paths, monkeypatch):
    launcher, training = run(paths, monkeypatch, [(0, RetryableError("lost")), (0, error), (0, error)])
    with pytest.raises(StorageError, match=r"3 times without a new checkpoint, .*(no space|reached)") as caught:
        training()
    assert (launcher.attempts, caught.value.exit_code) == (3, 138)


def test_attempts_that_could_not_even_leave_their_error_lacked_storage(paths, monkeypatch):
    _, training = run(paths, monkeypatch, [(0, RetryableError("lost"))] * 3)
    monkeypatch.setattr(jobs, "read_error", lambda uri: None)
    with pytest.raises(StorageError, match=r"at last: .*left no error") as caught:
        training()
    assert caught.value.exit_code == 138


def test_progress_renews_the_budget(paths, monkeypatch):
    complete(paths)
    lost = RetryableError("lost")
    script = [(0, lost), (0, lost), (4, lost), (4, lost), (8, lost), (8, lost), (9, None)]
    launcher, training = run(paths, monkeypatch, script)
    assert training().step == 10
    assert launcher.attempts == len(script)


def test_a_job_that_was_told_to_stop_is_not_started_again(paths, monkeypatch):
    launcher, training = run(paths, monkeypatch, [(0, Preempted("stopped"))], interrupted=True)
    with pytest.raises(Preempted):
        training()
    assert launcher.attempts == 1


def test_a_worker_that_dies_without_a_word_is_named_by_its_code(paths, monkeypatch):
    class Silent(ScriptedLauncher):
        def run(self, job):
            return 1

    monkeypatch.setattr(jobs, "build_launcher", lambda resolved: Silent(paths, []))
    with pytest.raises(LaunchError, match="exit code 1 and left no error"):
        jobs.run_training(paths, RESOLVED)


def test_a_worker_that_was_stopped_before_it_could_say_so_was_preempted(paths, monkeypatch):
    class Stopped(ScriptedLauncher):
        def run(self, job):
            return 143

    monkeypatch.setattr(jobs, "build_launcher", lambda resolved: Stopped(paths, [], interrupted=True))
    with pytest.raises(Preempted, match="stopped before it had started"):
        jobs.run_training(paths, RESOLVED)


def test_the_local_backend_refuses_several_nodes():
    with pytest.raises(LaunchError, match="one node"):
        build_launcher(config.parse("launch: {nodes: 2}"))


def test_a_job_is_plain_data(paths, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    job = spec.make_job(TRAINING, paths, RESOLVED, "mlflow-run")
    expected = f"worker --task train --run-uri {paths.uri} --digest {RESOLVED.digest()} --processes 2 --nodes 1"
    assert list(job.workers.arguments) == expected.split()
    assert job.workers.num_processes == 2
    assert job.environment == {spec.MLFLOW_RUN_ID_ENV: "mlflow-run"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert spec.count_processes_per_node(RESOLVED) == 3
    assert spec.count_processes_per_node(config.parse("launch: {processes_per_node: 5}")) == 5
