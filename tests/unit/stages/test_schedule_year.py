"""Four hundred days of a schedule: whatever fails, is skipped or late, every record is trained on exactly once.

The decisions, the listing of the source and the documents are those of real runs; training is a coin, and the files
are a list in memory, each with one record.
"""

import os
import random
from collections import Counter
from datetime import datetime, timedelta, timezone

import pytest

from kftrain import config as configuration
from kftrain.core import storage
from kftrain.errors import EmptyWindowError, LaunchError
from kftrain.run.error import summarize_failure
from kftrain.run.paths import RunPaths
from kftrain.schedule import cron
from kftrain.schedule.settings import format_instant
from kftrain.schedule.state import History
from kftrain.sharding.sources import file_source, resolve_source
from kftrain.sharding.sources.listing import ListedFile, SourceFile
from kftrain.stages import firing, resolve, windows
from kftrain.stages.resolve import OpenedRun

UTC = timezone.utc
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
FIRST, LAST = datetime(2026, 1, 1, tzinfo=UTC), datetime(2027, 2, 5, tzinfo=UTC)
BERLIN = cron.load_zone("Europe/Berlin")

CONFIG = """
run: {{name: year, storage_root: "{root}"}}
data: {{source: "/year/raw", window: {{by: {by}}}}}
schedule: {{name: nightly, cron: "{cron}", time_zone: Europe/Berlin{more}}}
"""


class Files:
    """One file for each half day: when it is of, and when it is there, for one in twenty days later."""

    def __init__(self, generator):
        self.all = []
        moment = FIRST - 10 * DAY
        while moment < LAST:
            delay = generator.uniform(1, 20) * DAY if generator.random() < 0.05 else timedelta()
            self.all.append((moment, moment + 12 * HOUR + delay))
            moment += 12 * HOUR

    def name(self, moment):
        return f"{moment:date=%Y-%m-%d/hour=%H}/a.txt"

    def listed(self, now):
        found = [(self.name(moment), moment + 12 * HOUR) for moment, arrival in self.all if arrival <= now]
        return [ListedFile(SourceFile(name, name, 1, "v"), modified) for name, modified in found]


class Year:
    """The runs of a schedule, each to its end or to where it is lost."""

    def __init__(self, root, text, by, more):
        self.root = str(root)
        self.generator = random.Random(0)
        self.config = configuration.parse(CONFIG.format(root=root, by=by, cron=text, more=more))
        self.files = Files(self.generator)
        self.history = History.of(self.root, "nightly")
        self.now = FIRST
        self.lines = []
        self.trained = Counter()
        self.living = None
        """A run that takes longer than until the next one is due: its job, configuration and files."""

    def paths(self, job):
        return RunPaths.of(self.root, f"year-{job}")

    def fire(self, instant, chance):
        """The run of an instant. `chance`: what becomes of it, from 0 to 1."""
        self.now = instant + timedelta(seconds=20)
        job = f"{instant:%Y%m%d%H}"
        if self.living:
            storage.publish_json(self.paths(self.living[0]).launcher, {"sequence": 1, "time": self.now.timestamp()})
        begun = firing.begin(self.config, self.paths(job), job, format_instant(self.now), False, self.lines.append)
        if begun.skipped is None:
            resolve.keep_run(OpenedRun(begun.config, self.paths(job)), job)
            begun = self.sharded(job, begun)
        if begun.skipped is not None:
            firing.leave_skipped(self.paths(job), begun, begun.skipped, job, self.lines.append)
            self.end(job, begun.config, [])
        elif chance < 0.2:
            self.end(job, begun.config, self.read, LaunchError("the job has failed"))
        elif chance < 0.25:
            self.living = job, begun.config, self.read
            return
        elif chance < 0.3:  # registered, and lost before it was said
            storage.publish_json(self.paths(job).registration, {})
            self.trained.update(self.read)
        else:
            self.end(job, begun.config, self.read)
        if self.living and chance > 0.5:
            self.living = self.end(*self.living)

    def sharded(self, job, begun):
        data = begun.config.data
        try:
            listing = resolve_source.open_kind(resolve_source.TEXT.name, data).listing()
        except EmptyWindowError as error:
            return firing.Begun(begun.config, begun.key, firing.skip_empty_window(begun, error, self.lines.append))
        self.read = [each["name"] for each in listing]
        files = windows.find_new_files(data.window, {data.source: listing}, self.lines.append)
        storage.publish_json(self.paths(job).window_files, files.to_dict())
        assert firing.skip_unchanged(begun, begun.config, self.paths(job), "same", job, self.lines.append) is None
        return begun

    def end(self, job, config, read, error=None):
        firing.end_firing(config, self.paths(job), job, error and summarize_failure("train", error), self.lines.append)
        if error is None:
            self.trained.update(read)


START = datetime(2025, 12, 25, tzinfo=UTC)
SETTLED = ", settle_hours: 7, max_window_hours: 200, window_start: '2025-12-25T00:00:00Z'"


@pytest.mark.parametrize(
    ("text", "by", "more"),
    [
        ("0 0 2 * * *", "modified", ""),
        ("0 30 2 * * 1-5", "path", ""),
        ("0 0 2 1 * *", "modified", ""),
        ("0 0 2 * * *", "path", SETTLED),
    ],
)
def test_every_record_of_four_hundred_days_is_trained_on_exactly_once(tmp_path, monkeypatch, text, by, more):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    year = Year(tmp_path, text, by, more)
    monkeypatch.setattr(file_source, "list_with_times", lambda *arguments: year.files.listed(year.now))
    for instant in cron.list_instants(cron.parse_cron(text), BERLIN, FIRST, LAST):
        if (instant.month, instant.day) in ((5, 1), (5, 2)):
            year.history.add_event("paused", "by hand", instant.timestamp())
        elif year.history.read_pause():
            year.history.add_event("resumed", "by hand", instant.timestamp())
        if year.generator.random() < 0.95:  # or it is never started
            year.fire(instant, year.generator.random())
    if year.living:
        year.end(*year.living)
    for number in range(1, 11):  # what is left, and late
        year.fire(instant + number * 32 * DAY, 1.0)
    assert year.trained == Counter(
        year.files.name(moment) for moment, _ in year.files.all if not more or moment >= START
    )
    results = Counter(found.result for found in year.history.iterate_ends())
    assert results["failed"] and results["trained"] and (results["skipped"] or len(text) == 11), results
    assert any("came late" in line for line in year.lines)
    assert not more or any("max_window_hours leaves" in line for line in year.lines)
