"""What a rendered CronJob runs: all stages in one process, again where a pod is lost; training is not done here."""

import pytest
from helpers.documents import digits_config

from kftrain.errors import ConfigError, LaunchError, Preempted
from kftrain.run.paths import RunPaths
from kftrain.schedule.state import History
from kftrain.stages import fire as fire_stage
from kftrain.stages.firing import find_skipped_outcome
from kftrain.stages.outcome import Outcome


@pytest.fixture
def stages(monkeypatch):
    """What the stages after the first one do, by name: None, or what they raise once."""
    monkeypatch.setattr("kftrain.tracking.check", lambda uri: None)
    does = {"train": [], "evaluate": [], "register": []}
    called = []

    def stage(name):
        def run(run_uri, progress):
            called.append((name, run_uri))
            if does[name]:
                raise does[name].pop(0)
            return find_skipped_outcome(RunPaths(run_uri), progress) or Outcome(run_uri, {"result": name})

        return run

    for name in does:
        monkeypatch.setattr(fire_stage, name, stage(name))
    return does, called


@pytest.fixture
def config(tmp_path):
    return digits_config(tmp_path, "schedule.name=nightly", "schedule.cron='0 0 2 * * *'")


def history(config):
    return History.of(config.run.storage_root, "nightly")


JOB = "kftrain-nightly-29366040"  # 2025-11-01T02:00:00Z in minutes
NEXT = "kftrain-nightly-29367480"


def results(config):
    return [found.result for found in history(config).iterate_ends()][::-1]


def test_the_instant_is_that_of_the_cronjob(config, stages):
    _, called = stages
    assert fire_stage.fire(config, JOB, print).summary["result"] == "the run succeeded"
    assert history(config).list_keys() == ["20251101T020000Z"]
    assert [name for name, _ in called] == ["train", "evaluate", "register"]
    assert len({uri for _, uri in called}) == 1
    assert fire_stage.fire(config, NEXT, print).summary["why"] == "unchanged"
    assert results(config) == ["trained", "skipped"]


def test_a_cronjob_that_is_resumed_runs_nothing_that_was_due_before(config, stages):
    history(config).add_event("paused", "by hand", 29366000 * 60)
    history(config).add_event("resumed", "by hand", 29366060 * 60)
    assert fire_stage.fire(config, JOB, print).summary["why"] == "paused"
    assert results(config) == []
    assert fire_stage.fire(config, NEXT, print).summary["result"] == "the run succeeded"


def test_a_pod_that_is_told_to_stop_leaves_the_run_to_the_next_one(config, stages):
    does, called = stages
    does["train"] = [Preempted("stopped by a signal")]
    with pytest.raises(Preempted):
        fire_stage.fire(config, JOB, print)
    assert results(config) == []
    fire_stage.fire(config, JOB, print)
    assert results(config) == ["trained"] and len({uri for _, uri in called}) == 1


def test_a_failure_is_counted_and_raised(config, stages):
    does, _ = stages
    does["evaluate"] = [LaunchError("no")]
    with pytest.raises(LaunchError, match="no"):
        fire_stage.fire(config, JOB, print)
    assert results(config) == ["failed"]


def test_a_job_that_somebody_has_made_is_a_run_by_hand(config, stages):
    fire_stage.fire(config, "by-hand", print)
    (key,) = history(config).list_keys()
    assert "-manual-" in key


def test_without_a_schedule_it_is_refused(tmp_path, stages):
    with pytest.raises(ConfigError, match="belongs to no schedule"):
        fire_stage.fire(digits_config(tmp_path), JOB, print)
