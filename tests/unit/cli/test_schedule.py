"""`kftrain schedule` through kfp's real client, against a scripted API server; the storage root is in memory."""

import json
import os
import signal

import fsspec
import pytest
from helpers.fakes.kfp_server import RUN_ID, run

from kftrain import cli
from kftrain.core import storage
from kftrain.core.records import NumberedRecords
from kftrain.kubeflow.client import Pipelines
from kftrain.pipelines.compile import version_name
from kftrain.process import signals
from kftrain.run.paths import RunPaths
from kftrain.schedule import apply
from kftrain.schedule.state import FiringEnd, History
from kftrain.stages import firing, resolve

ROOT = "memory://schedules/root"
CONFIG = f"""
run: {{name: lm, storage_root: "{ROOT}"}}
tracking: {{uri: "http://mlflow:5000"}}
launch: {{backend: pytorchjob, nodes: 2}}
"""
FILE = """
name: nightly
cron: "0 0 2 * * *"
time_zone: Europe/Berlin
configs: [c.yaml]
knobs: {train.steps: 100}
"""

pytestmark = pytest.mark.usefixtures("nobody_logged_in")


@pytest.fixture(autouse=True)
def _memory(monkeypatch):
    monkeypatch.setattr(apply, "SETTLE_SECONDS", 0.0)
    yield
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def file(tmp_path):
    (tmp_path / "c.yaml").write_text(CONFIG)
    path = tmp_path / "schedule.yaml"
    path.write_text(FILE)
    return path


@pytest.fixture
def call(server, file, capfd):
    """Runs `kftrain schedule VERB` against the server; gives exit code, stdout and stderr."""

    def run_command(verb, *arguments, files=("-f",)):
        named = [str(file) if each == "-f" else each for each in files]
        given = [part for each in named for part in ("-f", each)]
        with pytest.raises(SystemExit) as caught:
            cli.main(["schedule", verb, *given, "--host", server.url, *arguments])
        out, err = capfd.readouterr()
        return caught.value.code, out, err

    return run_command


def modes(server):
    return [(each["trigger"]["cron_schedule"]["cron"], each["mode"]) for each in server.recurring]


HISTORY = History.of(ROOT, "nightly")


def test_what_is_not_there_is_created_disabled_and_then_enabled_and_nothing_happens_twice(call, server):
    code, out, _ = call("apply")
    assert (code, out) == (0, "nightly is as the file says\n")
    (created,) = server.recurring
    assert created["mode"] == "ENABLE" and server.asked("POST", "recurringruns")[0].body["mode"] == "DISABLE"
    assert created["pipeline_version_reference"] == {"pipeline_id": "p-0"}
    assert created["trigger"]["cron_schedule"]["cron"] == "0 0 0,1 * * *"
    sent = created["runtime_config"]["parameters"]["config"]
    assert "steps: 100" in sent and "name: nightly" in sent and "time_zone: Europe/Berlin" in sent
    assert server.versions[0]["name"] == version_name()
    before = len([request for request in server.requests if request.method != "GET"])
    assert call("apply")[:2] == (0, "nightly is as the file says\n")
    assert len([request for request in server.requests if request.method != "GET"]) == before
    assert call("diff")[:2] == (0, "nightly is as the file says\n")


def test_a_change_is_shown_field_by_field_and_then_made(call, server, file):
    assert call("diff")[:2] == (1, f"schedule: (none) -> nightly\npipeline version: (none) -> {version_name()}\n")
    assert server.pipelines == server.recurring == []
    call("apply")
    file.write_text(FILE.replace("100", "200").replace("0 0 2", "0 30 2"))
    code, out, _ = call("diff")
    assert code == 1
    assert "config.train.steps: 100 -> 200\n" in out and "cron: 0 0 0,1 * * * -> 0 30 0,1 * * *\n" in out
    live = server.fire("r-1")
    code, out, err = call("apply")
    assert code == 0 and "to be deleted by the next apply, when its runs have ended: r-1" in out
    assert "nightly-1" in err
    assert modes(server) == [("0 0 0,1 * * *", "DISABLE"), ("0 30 0,1 * * *", "ENABLE")]
    live["state"] = "SUCCEEDED"
    call("apply")
    assert modes(server) == [("0 30 0,1 * * *", "ENABLE")] and not server.killed


def test_drift_is_found(call, server):
    code, out, _ = call("list")
    assert code == 1 and out.startswith("nightly  missing  -\n  differs: schedule: (none) -> nightly\n")
    call("apply")
    assert call("list")[:2] == (0, "nightly  enabled  0 0 0,1 * * *\n")
    server.recurring[0]["mode"] = "DISABLE"
    code, out, _ = call("list")
    assert code == 1 and out.startswith("nightly  disabled") and "  differs: enabled: False -> True\n" in out
    server.recurring[0]["mode"] = "ENABLE"
    server.recurring.append({**server.recurring[0], "recurring_run_id": "r-9", "fired": []})
    assert "differs: recurring runs of this name: 2 -> 1" in call("list")[1]
    assert "differs: 2 recurring runs of this name" in call("list", files=())[1]
    del server.recurring[1]
    server.versions.append({**server.versions[0], "name": "v", "display_name": "somebody-else-s"})
    assert f"pipeline version: somebody-else-s -> {version_name()}" in call("list")[1]
    (found,) = json.loads(call("list", "--json")[1])
    assert (found["name"], found["state"], len(found["drift"])) == ("nightly", "enabled", 1)


def test_the_list_says_which_run_was_the_last_and_when(call, server):
    call("apply")
    ended = FiringEnd(
        result="trained", line="version 3 is champion", job_id="j", run_uri=f"{ROOT}/runs/lm-7", time=1795314600.0
    )
    HISTORY.write_end("20261122T020000Z", ended)
    storage.publish_json(f"{HISTORY.uri}/firings/20261122T020000Z.json", {})
    assert "  trained: version 3 is champion (lm-7, 2026-11-22T02:30:00Z)\n" in call("list")[1]


def test_a_pause_holds_until_it_is_resumed(call, server):
    call("apply")
    assert call("pause", "--reason", "the disk is full")[:2] == (0, "nightly is paused\n")
    assert modes(server) == [("0 0 0,1 * * *", "DISABLE")]
    assert HISTORY.read_pause().line == "the disk is full"
    assert call("pause")[1] == "nightly was paused already\n"
    assert "and paused: the disk is full" in call("apply")[1]
    assert modes(server) == [("0 0 0,1 * * *", "DISABLE")]
    code, out, _ = call("list")
    assert code == 0 and "paused: the disk is full" in out
    assert call("resume")[:2] == (0, "nightly goes on\n")
    assert modes(server) == [("0 0 0,1 * * *", "ENABLE")] and HISTORY.read_pause() is None
    assert call("resume")[1] == "nightly was not paused\n"


def test_a_run_by_hand_says_so(call, server):
    server.script = [run("SUCCEEDED")]
    code, out, _ = call("run-now", "--wait")
    assert code == 0 and out == f"{RUN_ID}\n{server.url}/#/runs/details/{RUN_ID}\n"
    sent = server.runs[0]["runtime_config"]["parameters"]["config"]
    assert "trigger: manual" in sent and "name: nightly" in sent
    assert server.runs[0]["display_name"].startswith("nightly-manual-2")


@pytest.mark.parametrize(("why", "code"), [("overlap", 13), ("unchanged", 0)])
def test_a_run_by_hand_that_had_nothing_to_do_says_so(call, server, why, code):
    server.script = [run("SUCCEEDED")]
    paths = RunPaths.of(ROOT, resolve.make_run_id("", RUN_ID, "lm"))
    storage.publish_json(paths.skipped, firing.Skipped(why=why, line="because of it").to_dict())
    ended, _, err = call("run-now", "--wait")
    assert ended == code and "nothing to do: because of it" in err and "succeeded" not in err


def test_a_backfill_runs_one_window_after_another_and_promotes_nothing(call, server):
    span = ("--from", "2026-10-24T00:00:00Z", "--to", "2026-10-27T00:00:00Z")
    instants = ["2026-10-24T00:00:00Z", "2026-10-25T00:00:00Z", "2026-10-26T01:00:00Z"]
    assert call("backfill", *span, "--dry-run")[1].split() == instants
    assert not server.runs
    server.script = [run("RUNNING"), run("SUCCEEDED")]
    assert call("backfill", *span)[0] == 0
    sent = [each["runtime_config"]["parameters"]["config"] for each in server.runs]
    assert [f"instant: '{instant}'" in text for instant, text in zip(instants, sent, strict=True)] == [True] * 3
    assert all("promotion: never" in text and "trigger: backfill" in text for text in sent)


def test_a_backfill_ends_where_a_window_fails(call, server):
    server.script = [run("FAILED")]
    code, _, err = call("backfill", "--from", "2026-10-01T00:00:00Z", "--to", "2026-10-09T00:00:00Z")
    assert code == 13 and "the run failed" in err and len(server.runs) == 1


def test_a_schedule_goes_once_no_run_of_it_lives(call, server):
    call("apply")
    live = server.fire("r-1")
    assert call("delete")[1] == "r-1 is disabled; delete it again when its runs have ended\n"
    live["state"] = "FAILED"
    assert call("delete")[1] == "nightly is gone\n"
    assert not server.recurring and not server.killed


@pytest.fixture(params=signals.STOP)
def number(request):
    """A signal that is not ignored, as a hangup is below `nohup`."""
    before = signal.signal(request.param, signal.SIG_DFL)
    yield request.param
    signal.signal(request.param, before)


def test_whoever_is_told_to_stop_gives_back_the_turn(call, monkeypatch, number):
    call("apply")
    monkeypatch.setattr(Pipelines, "list_live_runs", lambda *_: os.kill(os.getpid(), number))
    with signals.handle_signals(signals.STOP, lambda *_: pytest.fail("the process would be killed")):
        assert call("delete")[0] == 128 + number
    turns = f"{ROOT}/schedules/nightly/turns"
    assert NumberedRecords(turns, storage.read_json).read_last()["given_back"]


def test_kubeflows_page_says_what_manages_a_recurring_run_and_what_has_changed(call, server, file, monkeypatch):
    monkeypatch.setenv("KFTRAIN_GIT_COMMIT", "0123abcd")
    call("apply")
    managed = f"managed by kftrain schedule: {file}, commit 0123abcd; "
    assert server.recurring[0]["description"] == f"{managed}schedule: (none) -> nightly"
    monkeypatch.setenv("KFTRAIN_GIT_COMMIT", "4567")
    assert call("apply")[1] == "nightly is as the file says\n" and len(server.recurring) == 1
    file.write_text(FILE.replace("100", "200").replace("0 0 2", "0 0 4"))
    call("apply")
    (now,) = server.recurring
    assert now["description"].startswith(managed.replace("0123abcd", "4567"))
    assert "config.train.steps: 100 -> 200" in now["description"] and "cron: 0 0 0,1 * * *" in now["description"]


@pytest.mark.parametrize(
    ("change", "code", "line"),
    [
        (("0 0 2", "0 2"), 10, "write '0 0 2 * * *'"),
        (("train.steps", "train.stepz"), 10, "unknown key"),
        (("knobs: {", 'knobs: {run.storage_root: "/tmp/x", '), 13, "run.storage_root"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_asked(call, server, file, change, code, line):
    file.write_text(FILE.replace(*change))
    found = call("apply")
    assert found[0] == code and line in found[2] and not server.requests


@pytest.mark.parametrize("moment", ["2026-10-24", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z"])
def test_a_moment_without_a_zone_or_at_the_end_of_the_calendar_is_refused(call, moment):
    code, _, err = call("backfill", "--from", moment, "--to", "2026-10-27T00:00:00Z")
    assert code == 10 and "--from: not a moment in UTC" in err
