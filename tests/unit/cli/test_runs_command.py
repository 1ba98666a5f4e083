"""`kftrain runs` and `kftrain status` of runs on this machine: what their files show."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers.documents import digits_config, finished_run, opened_run, publish_commit

from kftrain.cli.jobs import runs_command, status_command
from kftrain.core import storage
from kftrain.errors import DataError, Preempted
from kftrain.registry.journal import Journal, make_next_entry
from kftrain.run import attempts
from kftrain.run.error import summarize_failure


def listed(root, *options):
    found = CliRunner().invoke(runs_command, [f"{root}/store", *options], standalone_mode=False)
    assert found.exception is None, found.output
    return found.output


def one(root):
    (found,) = json.loads(listed(root, "--json"))
    return found


@pytest.fixture
def run(tmp_path):
    """A run that is open and nothing else; returns its paths."""
    return opened_run(digits_config(tmp_path), "a-1").paths


def test_a_storage_root_without_runs_has_none(tmp_path):
    assert listed(tmp_path).startswith("no runs in ")
    assert json.loads(listed(tmp_path, "--json")) == []


def test_a_registered_run_shows_its_metric_and_whether_it_is_champion(tmp_path):
    paths, config = finished_run(tmp_path)
    before = {path: path.read_bytes() for path in Path(paths.uri).rglob("*") if path.is_file()}
    found = one(tmp_path)
    assert (found["state"], found["step"], found["num_steps"], found["version"]) == ("registered", 20, 20, 3)
    assert (found["metric"], found["value"], found["is_champion"]) == ("accuracy", 0.9, False)
    journal = Journal.of(paths.storage_root, config.model_name)
    journal.append(make_next_entry([], "promote", 3, "better"))
    assert one(tmp_path)["is_champion"]
    assert "tiny 3, champion" in listed(tmp_path)
    journal.append(make_next_entry(journal.entries(), "promote", 4, "better still"))
    assert not one(tmp_path)["is_champion"]
    assert {path: path.read_bytes() for path in Path(paths.uri).rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("error", "state"), [(DataError("a shard is damaged"), "failed"), (Preempted("stop"), "stopped")]
)
def test_a_run_that_failed_says_why(tmp_path, run, error, state):
    publish_commit(run, 10)
    storage.publish_json(run.error, summarize_failure("train", error).to_dict())
    found = one(tmp_path)
    assert (found["state"], found["step"], found["reason"]) == (state, 10, error.line)
    assert f"\n  {error.line}" in listed(tmp_path)


def test_a_run_is_running_while_its_process_lives_and_unfinished_after_that(tmp_path, run):
    assert one(tmp_path)["state"] == "unfinished"
    script = "import sys; from kftrain.run import attempts; from kftrain.run.paths import RunPaths;"
    script += "attempts.claim_run(RunPaths(sys.argv[1]), 0, 1); print(flush=True); sys.stdin.read()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", script, run.uri], stdin=pipe, stdout=pipe) as process:
        assert process.stdout.readline()
        assert one(tmp_path)["state"] == "running"
        process.communicate()
    assert one(tmp_path)["state"] == "unfinished"


def test_a_process_of_another_machine_is_not_looked_for_here(tmp_path, run, monkeypatch):
    monkeypatch.setattr(attempts.socket, "gethostname", lambda: "elsewhere")
    attempts.claim_run(run, 0, 1)
    monkeypatch.undo()
    assert one(tmp_path)["state"] == "unfinished"


def test_runs_are_in_the_order_of_their_starts_and_those_of_a_schedule_are_filtered(tmp_path):
    nightly = ("schedule.name=nightly", "schedule.cron=0 0 2 * * *")
    for name, second, settings in (("b-1", 60, nightly), ("a-2", 120, ()), ("a-1", 180, nightly), ("c-9", None, ())):
        paths = opened_run(digits_config(tmp_path, *settings), name).paths
        if second is not None:  # resumed a day later, by another pipeline run and by hand
            for late in (86400, 0):
                opener = {"job_id": f"job-{late}", "time": second + late}
                storage.publish_json(f"{paths.uri}/pipelines/job-{late}.json", opener)
            attempts.claim_run(paths, 0, 1)
    by_hand = opened_run(digits_config(tmp_path), "a-0").paths
    attempts.claim_run(by_hand, 0, 1)
    found = json.loads(listed(tmp_path, "--json"))
    assert [run["run_id"] for run in found] == ["c-9", "b-1", "a-2", "a-1", "a-0"]
    assert [run["started"] for run in found][:2] == ["", "1970-01-01T00:01:00Z"]
    assert "b-1  1970-01-01T00:01:00Z  " in listed(tmp_path)
    assert [run["run_id"] for run in json.loads(listed(tmp_path, "--json", "--schedule", "nightly"))] == ["b-1", "a-1"]
    assert listed(tmp_path, "--schedule", "weekly").startswith("no runs in ")


def test_a_damaged_run_does_not_hide_the_others(tmp_path, run):
    finished_run(tmp_path)
    storage.publish(run.config, "train: {stepz: 1}")
    states = {found["run_id"]: found["state"] for found in json.loads(listed(tmp_path, "--json"))}
    assert states == {"a-1": "unreadable", "r-1": "registered"}


def test_status_of_a_run_of_this_machine_asks_no_cluster(tmp_path, run):
    for name in (run.uri, os.path.relpath(run.uri)):
        found = CliRunner().invoke(status_command, [name, "--json"], standalone_mode=False)
        assert found.exception is None and json.loads(found.output)[0]["state"] == "unfinished"
