"""Scheduled runs: what each night does, by the documents that it leaves; training itself is not done here."""

import functools
import os
import shutil
from datetime import datetime, timedelta, timezone

import pytest
from helpers.documents import digits_config
from helpers.fakes.webhook import Webhook
from helpers.launching import wait_until

from kftrain import config, launch, tracking
from kftrain.core import storage
from kftrain.errors import DataError, FailureClass, LaunchError
from kftrain.run import heartbeat
from kftrain.run.config import read_config
from kftrain.run.error import summarize_failure
from kftrain.run.paths import RunPaths
from kftrain.schedule.settings import format_instant
from kftrain.schedule.state import History
from kftrain.sharding.parts.store import PartStore
from kftrain.stages import failure, firing
from kftrain.stages.evaluate import evaluate
from kftrain.stages.finish import finish
from kftrain.stages.firing import ALERT_URL_ENV, send_alert
from kftrain.stages.register import register
from kftrain.stages.runs import read_run_overview as read_run
from kftrain.stages.shard import shard_from_pipeline
from kftrain.stages.train import train

DAY = timedelta(days=1)
FIRST = datetime(2026, 11, 1, 2, 0, 20, tzinfo=timezone.utc)


@pytest.fixture
def webhook(monkeypatch):
    with Webhook() as started:
        monkeypatch.setenv(ALERT_URL_ENV, started.url)
        yield started


class Nights:
    """Nights of one schedule: each is the first step and the exit handler of a pipeline run."""

    def __init__(self, root, *overrides):
        self.root = root
        self.lines = []
        self.now = FIRST
        """What heartbeats say of the time."""
        scheduled = ["schedule.name=nightly", "schedule.cron='0 0 2 * * *'", "schedule.alert_over_http=true"]
        self.config = digits_config(root, *scheduled, *overrides)
        self.history = History.of(self.config.run.storage_root, "nightly")

    def paths(self, job):
        return RunPaths.of(self.config.run.storage_root, f"tiny-{job}")

    def begin(self, day, job, *overrides, **arguments):
        chosen = arguments.pop("chosen", digits_config(self.root, *overrides) if overrides else self.config)
        created = format_instant(FIRST + day * DAY)
        created = arguments.pop("created", created)
        self.now = FIRST + day * DAY
        resume = arguments.pop("resume", "")
        return shard_from_pipeline(chosen.to_yaml(), {}, resume, job, self.lines.append, created=created)

    def end(self, job, error=None):
        if error is not None:
            storage.publish_json(self.paths(job).error, summarize_failure("train", error).to_dict())
        state = "COMPLETE" if error is None else "FAILED"
        return finish(self.config.to_yaml(), "", "", job, state, self.lines.append)

    def night(self, day, job, error=None):
        changed = ["train.steps=21"] if error else []  # else it may have nothing to do, and cannot fail
        outcome = self.begin(day, job, chosen=config.parse(self.config.to_yaml(), changed))
        self.end(job, error)
        return outcome

    def results(self):
        return [found.result for found in self.history.iterate_ends()][::-1]


@pytest.fixture
def nights(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "check", lambda uri: None)
    found = Nights(tmp_path)
    beating = functools.partial(heartbeat.Heartbeat, interval_seconds=0.02, clock=lambda: found.now.timestamp())
    monkeypatch.setattr(failure, "Heartbeat", beating)
    return found


BROKEN = LaunchError("the job has failed", where="job")


def test_a_night_takes_its_instant_and_the_next_one_has_nothing_to_do(nights):
    first = nights.night(0, "a")
    assert first.summary["result"].startswith("shards written") and first.next_step == "train"
    assert nights.history.list_keys() == ["20261101T020000Z"]
    skipped = nights.begin(1, "b")
    assert skipped.summary["why"] == "unchanged" and skipped.next_step == "finish"
    assert "nothing has changed since tiny-a" in skipped.summary["result"]
    for stage in (train, evaluate, register):
        assert stage(skipped.run_uri, nights.lines.append).summary == skipped.summary
    assert nights.end("b").summary == skipped.summary
    assert nights.results() == ["trained", "skipped"]
    assert not storage.exists(nights.paths("b").error)
    assert read_run(nights.paths("b")).state == "skipped"


def test_other_settings_or_a_schedule_that_wants_it_train_again(nights, tmp_path):
    nights.night(0, "a")
    scheduled = ["schedule.name=nightly", "schedule.cron='0 0 2 * * *'"]
    assert "why" not in nights.begin(1, "b", *scheduled, "train.steps=21").summary
    nights.end("b")
    assert "why" not in nights.begin(2, "c", *scheduled, "train.steps=21", "schedule.skip_unchanged=false").summary
    nights.end("c")
    assert nights.results() == ["trained"] * 3


def test_an_instant_is_run_once_whoever_fires_how_often(nights):
    nights.begin(0, "a")
    late = format_instant(FIRST + timedelta(hours=21))
    again = nights.begin(0, "b", created=late)
    assert again.summary["why"] == "done" and "the work of tiny-a" in again.summary["result"]
    nights.end("b")
    assert nights.results() == []
    assert "why" not in nights.begin(0, "a").summary  # a pod that runs again, of the same pipeline run
    nights.end("a")
    assert nights.results() == ["trained"]


def test_a_backlog_is_one_run(nights):
    """A scheduler that fires for every instant that it has missed creates all these runs at once."""
    found = [nights.begin(0, job, created=format_instant(FIRST + 5 * DAY)).summary.get("why") for job in "abcd"]
    assert found == [None, "done", "done", "done"]
    assert nights.history.list_keys() == ["20261106T020000Z"]


def test_a_run_whose_predecessor_lives_ends_green(nights, monkeypatch):
    nights.begin(0, "a")
    storage.publish_json(nights.paths("a").launcher, {"sequence": 1, "time": (FIRST + DAY).timestamp() - 60})
    second = nights.begin(1, "b")
    assert second.summary["why"] == "overlap" and "tiny-a, is still at work" in second.summary["result"]
    nights.end("b")
    nights.end("a")
    assert nights.results() == ["trained", "skipped"]
    assert nights.begin(2, "c").summary["why"] == "unchanged"


def beat(nights, job, day):
    """A sign of life of a run, some time before the firing of a day."""
    storage.publish_json(nights.paths(job).launcher, {"sequence": day, "time": (FIRST + day * DAY).timestamp() - 60})


def test_a_backfill_and_a_run_of_the_schedule_do_not_wait_for_each_other(nights):
    again = ["schedule.name=nightly", "schedule.cron='0 0 2 * * *'", "schedule.skip_unchanged=false"]
    earlier = [*again, "schedule.trigger=backfill", "schedule.instant='2026-10-01T02:00:00Z'"]
    assert "why" not in nights.begin(0, "a", *earlier).summary
    beat(nights, "a", 1)
    assert "why" not in nights.begin(1, "b", *again).summary
    beat(nights, "b", 2)
    assert "why" not in nights.begin(2, "c", *earlier).summary
    assert nights.begin(2, "d", *again).summary["why"] == "overlap"


def test_a_run_that_has_nothing_to_do_is_not_at_work_and_its_first_step_may_be_repeated(nights):
    nights.begin(0, "a")
    beat(nights, "a", 1)
    skipped = nights.begin(1, "b").summary
    assert skipped["why"] == "overlap" and nights.results() == ["skipped"]
    nights.end("a")
    assert nights.begin(1, "b").summary == skipped, "a pod that runs again, when it could train by now"
    for day, job in ((2, "c"), (3, "d")):
        beat(nights, "b", day)
        beat(nights, "c", day)
        assert nights.begin(day, job).summary["why"] == "unchanged"
    nights.end("b")
    assert nights.results() == ["trained", "skipped", "skipped", "skipped"]


def test_what_was_due_before_the_schedule_was_resumed_is_not_run(nights):
    nights.begin(0, "a")
    nights.history.add_event("paused", "by hand", (FIRST + 2 * DAY).timestamp())
    nights.history.add_event("resumed", "by hand", (FIRST + 4.5 * DAY).timestamp())
    late = nights.begin(4, "b", created=format_instant(FIRST + 4.5 * DAY)).summary
    assert late["why"] == "paused" and "2026-11-05T02:00:00Z, before the schedule nightly was resumed" in late["result"]
    nights.end("b")
    assert nights.results() == [] and nights.history.list_keys() == ["20261101T020000Z"]
    assert "why" not in nights.begin(0, "a").summary, "a pod that runs again, of a run that was begun before the pause"
    assert "why" not in nights.begin(5, "c").summary


def test_a_predecessor_that_has_given_no_sign_for_long_is_dead(nights):
    nights.begin(0, "a")
    assert "why" not in nights.begin(1, "b").summary


@pytest.mark.parametrize(("is_over", "why"), [(True, None), (False, "overlap"), (None, None)])
def test_the_workflow_of_the_predecessor_is_asked_first(nights, monkeypatch, is_over, why):
    monkeypatch.setattr(launch, "find_pipeline_place", lambda: ("flow-1", "cluster/ns"))
    nights.begin(0, "a")
    asked = []
    monkeypatch.setattr(launch, "is_pipeline_over", lambda *place: asked.append(place) or is_over)
    assert nights.begin(1, "b").summary.get("why") == why
    assert asked == [("flow-1", "cluster/ns")]


def test_failures_in_a_row_pause_the_schedule_and_alert(nights, webhook):
    nights.night(0, "a")
    for day in (1, 2, 3):
        nights.night(day, f"f{day}", BROKEN)
    assert nights.results() == ["trained", "failed", "failed", "failed"]
    assert [text.split(":")[0] for text in webhook.texts] == ["nightly has failed"] * 2 + [
        "nightly is paused after 3 failures in a row, the last"
    ]
    assert all("job: the job has failed" in text for text in webhook.texts)
    assert webhook.texts[0].endswith(nights.paths("f1").uri)
    skipped = nights.begin(4, "g")
    assert skipped.summary["why"] == "paused"
    nights.end("g")
    assert len(nights.results()) == 4
    assert nights.history.add_event("resumed", "by hand")
    nights.night((datetime.now(timezone.utc) - FIRST).days + 2, "h", BROKEN)  # due after that, by this machine's clock
    assert nights.history.count_failures_in_a_row() == 1 and nights.history.read_pause() is None


def test_a_success_a_skipped_run_and_a_canceled_one_are_no_failures(nights, webhook):
    nights.night(0, "a")
    nights.night(1, "b", BROKEN)
    nights.night(2, "c")  # unchanged
    assert nights.history.count_failures_in_a_row() == 1
    nights.night(3, "d", LaunchError("stopped").of_class(FailureClass.TERMINATED))
    assert nights.results() == ["trained", "failed", "skipped", "canceled"]
    assert len(webhook.texts) == 1


def test_a_run_that_fails_before_its_folder_is_there_counts(nights, webhook, monkeypatch):
    monkeypatch.setattr(History, "read_unended", lambda *arguments: (_ for _ in ()).throw(DataError("damaged")))
    with pytest.raises(DataError):
        nights.begin(0, "a")
    monkeypatch.undo()
    monkeypatch.setenv(ALERT_URL_ENV, webhook.url)
    finish(nights.config.to_yaml(), "", "", "a", "FAILED", nights.lines.append)
    assert nights.results() == ["failed"]


def test_the_link_is_that_of_the_kubeflow_run(tmp_path, monkeypatch, webhook):
    monkeypatch.setattr(tracking, "check", lambda uri: None)
    nights = Nights(tmp_path, "tracking.kubeflow_url=http://kfp.example")
    nights.night(0, "a", BROKEN)
    assert webhook.texts[0].endswith("http://kfp.example/#/runs/details/a")


def test_a_run_that_somebody_goes_on_with_is_a_firing_of_its_own(nights):
    nights.night(0, "a", BROKEN)
    assert "why" not in nights.begin(0, "b", resume="tiny-a").summary
    assert nights.history.list_keys()[0].startswith("20261101T020020Z-manual-b")


NO_URLS = ["ftp://host/T0KEN", "no url T0KEN", "http://[T0KEN", "http://127.0.0.1:1/T0KEN"]
NO_URLS += ["http://127.0.0.1:x/T0KEN", "http://host/T0 KEN"]


@pytest.mark.parametrize(("url", "over_http"), [("http://127.0.0.1:9/T0KEN", False), *((url, True) for url in NO_URLS)])
def test_an_alert_that_cannot_be_sent_is_a_warning_without_the_url(monkeypatch, url, over_http):
    lines = []
    monkeypatch.setenv(ALERT_URL_ENV, url)
    assert not send_alert("it failed", "link", over_http, lines.append)
    assert lines[0].startswith("warning: no alert was sent") and "KEN" not in lines[0].replace("KFTRAIN_ALERT_URL", "")


@pytest.mark.parametrize("answer", [302, 404, 500])
def test_a_webhook_that_refuses_is_a_warning_and_nobody_is_followed(webhook, answer):
    lines, webhook.answer = [], answer
    assert not send_alert("it failed", "link", True, lines.append)
    assert lines == [f"warning: no alert was sent: the webhook answered {answer}"]
    assert webhook.texts == ["it failed link"]


def test_without_a_url_nothing_is_sent_and_nothing_said(monkeypatch):
    monkeypatch.delenv(ALERT_URL_ENV, raising=False)
    lines = []
    assert not send_alert("it failed", "link", False, lines.append)
    assert not lines


class FakeCluster:
    """Knows which Workflows are over."""

    identity = "cluster"
    namespace = "ns"
    sees_workflows = True

    def __init__(self, **phases):
        self.phases = phases

    def read_workflow(self, name):
        return {"status": {"phase": self.phases[name]}} if name in self.phases else None


def test_gc_counts_what_ended_without_a_word(nights, webhook, monkeypatch):
    for number, workflow in enumerate(["gone", "failed", "running"]):
        monkeypatch.setattr(launch, "find_pipeline_place", lambda workflow=workflow: (workflow, "cluster/ns"))
        nights.begin(number, f"j{number}")
    monkeypatch.setattr(launch, "find_pipeline_place", lambda: ("gone", "elsewhere/ns"))
    nights.begin(3, "j3")
    root, cluster = nights.config.run.storage_root, FakeCluster(failed="Failed", running="Running")
    now = FIRST + 4 * DAY
    lost = [("nightly", nights.paths("j1").uri), ("nightly", nights.paths("j0").uri)]
    assert firing.close_lost(cluster, root, now, True, nights.lines.append) == lost
    assert nights.results() == []
    assert firing.close_lost(cluster, root, now, False, nights.lines.append) == lost
    assert nights.results() == ["canceled", "failed"], "what somebody has deleted has not failed"
    (text,) = webhook.texts
    assert nights.paths("j1").uri in text and nights.history.count_failures_in_a_row() == 1
    assert firing.close_lost(cluster, root, now, False, nights.lines.append) == []


@pytest.mark.parametrize("ending", ["failed", "deleted"])
def test_a_run_of_an_earlier_window_alerts_nobody_and_pauses_nothing(nights, webhook, monkeypatch, ending):
    monkeypatch.setattr(launch, "find_pipeline_place", lambda: ("gone", "cluster/ns"))
    earlier = ["schedule.trigger=backfill", "schedule.instant='2026-10-01T02:00:00Z'"]
    own = ["schedule.name=nightly", "schedule.cron='0 0 2 * * *'", "schedule.pause_after_failures=1"]
    nights.begin(0, "a", *own, *earlier, "schedule.alert_over_http=true")
    if ending == "failed":
        nights.end("a", BROKEN)
    else:
        firing.close_lost(FakeCluster(), nights.config.run.storage_root, FIRST + DAY, False, nights.lines.append)
    (key,) = nights.history.list_keys("outcomes")
    assert nights.history.read_end(key).result == {"failed": "failed", "deleted": "canceled"}[ending]
    assert not webhook.texts and nights.history.read_pause() is None


def test_gc_leaves_a_run_without_a_workflow_until_it_is_silent(nights):
    nights.begin(0, "a")
    root = nights.config.run.storage_root
    assert firing.close_lost(FakeCluster(), root, FIRST + timedelta(minutes=29), False, nights.lines.append) == []
    assert len(firing.close_lost(FakeCluster(), root, FIRST + timedelta(minutes=31), False, nights.lines.append)) == 1


def test_sharding_for_an_hour_is_a_sign_of_life(nights, monkeypatch):
    """Where no Workflow says so: of a CronJob, and where Workflows may not be read."""
    lost, encode = [], PartStore.encode

    def slow(self, *arguments):
        nights.now = FIRST + timedelta(hours=1)
        wait_until(lambda: heartbeat.read_last_beat(nights.paths("a")) == nights.now.timestamp())
        lost.append(firing.close_lost(FakeCluster(), nights.config.run.storage_root, nights.now, False, print))
        return encode(self, *arguments)

    monkeypatch.setattr(PartStore, "encode", slow)
    nights.begin(0, "a")
    assert lost and not any(lost)
    late = nights.now + timedelta(minutes=31)
    assert len(firing.close_lost(FakeCluster(), nights.config.run.storage_root, late, False, print)) == 1


def test_sharding_again_for_an_hour_is_a_sign_of_life_of_a_run_that_somebody_goes_on_with(nights, monkeypatch):
    nights.night(0, "a", BROKEN)
    shutil.rmtree(os.path.join(nights.config.run.storage_root, "shards"))
    lost, encode = [], PartStore.encode

    def slow(self, *arguments):
        nights.now = FIRST + timedelta(hours=1)
        wait_until(lambda: heartbeat.read_last_beat(nights.paths("a")) == nights.now.timestamp())
        lost.append(firing.close_lost(FakeCluster(), nights.config.run.storage_root, nights.now, False, print))
        return encode(self, *arguments)

    monkeypatch.setattr(PartStore, "encode", slow)
    nights.begin(0, "b", resume="tiny-a")
    assert lost and not any(lost)


LANGUAGE = """
run: {{name: tiny, storage_root: "{root}/store"}}
tracking: {{uri: "sqlite:///{root}/mlflow.db"}}
data: {{source: "{root}/raw", window: {{by: modified}}, validation_fraction: 0.5}}
task: {{kind: language_modeling, sequence_length: 16, tokenizer: bytes}}
model: {{kind: transformer, dim: 16, num_layers: 1, num_heads: 2}}
train: {{steps: 2, global_batch_size: 2}}
schedule: {{name: nightly, cron: "0 0 2 * * *"{more}}}
"""


def write_texts(folder, name, written):
    folder.mkdir(exist_ok=True)
    for number in range(20):
        file = folder / f"{name}{number}.txt"
        file.write_text(f"text {name} number {number}\n" * 20)
        os.utime(file, (written.timestamp(),) * 2)


def test_the_window_ends_when_the_run_was_due_and_an_empty_one_is_nothing_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "check", lambda uri: None)
    write_texts(tmp_path / "raw", "a", FIRST - timedelta(hours=1))
    nights = Nights(tmp_path)
    nights.config = config.parse(LANGUAGE.format(root=tmp_path, more=", window_hours: 24"))
    assert nights.night(0, "a").summary["result"].startswith("shards written")
    window = read_config(nights.paths("a")).data.window
    assert (window.start, window.end) == ("2026-10-31T02:00:00Z", "2026-11-01T02:00:00Z")
    assert nights.night(1, "b").summary["why"] == "empty"
    assert nights.results() == ["trained", "skipped"]


def test_nights_since_the_last_training_read_each_file_once_and_late_ones_with_the_next(tmp_path, monkeypatch, webhook):
    monkeypatch.setattr(tracking, "check", lambda uri: None)
    nights = Nights(tmp_path)
    nights.config = config.parse(LANGUAGE.format(root=tmp_path, more=""))

    def files(job):
        (names,) = storage.read_json(nights.paths(job).window_files)["files"].values()
        return {name.rstrip("0123456789.tx") for name in names}

    raw = tmp_path / "raw"
    write_texts(raw, "a", FIRST - 30 * DAY)
    nights.night(0, "a")
    write_texts(raw, "b", FIRST + DAY / 2)
    nights.night(1, "b", BROKEN)
    write_texts(raw, "la", FIRST - 9 * DAY)
    nights.night(2, "c")
    assert "20 files came late, and are from before 2026-11-01T02:00:00Z" in nights.lines
    assert nights.night(3, "d").summary["why"] == "empty"
    write_texts(raw, "e", FIRST + 4 * DAY - timedelta(hours=5))
    nights.night(4, "e")
    assert nights.results() == ["trained", "failed", "trained", "skipped", "trained"]
    assert {job: files(job) for job in "abce"} == {"a": {"a"}, "b": {"b"}, "c": {"b", "la"}, "e": {"e"}}
    assert "the next window begins at 2026-11-05T02:00:00Z" in nights.lines
