"""`schedule.yaml`: what it comes to, and what is wrong with it in one line."""

import pytest

from kftrain.errors import ConfigError
from kftrain.schedule import spec

GOOD = """
name: nightly
cron: "0 0 2 * * *"
time_zone: Europe/Berlin
configs: [base.yaml, cluster.yaml]
knobs: {train.steps: 200, data.source: "s3://bucket/raw"}
pause_after_failures: 5
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "base.yaml").write_text("run: {name: lm, seed: 3}\ntrain: {steps: 7}\n")
    (tmp_path / "cluster.yaml").write_text('run: {storage_root: "s3://bucket/root"}\n')
    return tmp_path


def test_a_schedule_becomes_the_configuration_of_its_runs(folder):
    (folder / "schedule.yaml").write_text(GOOD)
    found = spec.read_schedule(folder / "schedule.yaml")
    config = found.config
    assert (config.run.name, config.run.seed, config.run.storage_root) == ("lm", 3, "s3://bucket/root")
    assert (config.train.steps, config.data.source) == (200, "s3://bucket/raw")
    assert (config.schedule.name, config.schedule.cron) == ("nightly", "0 0 2 * * *")
    assert (config.schedule.time_zone, config.schedule.pause_after_failures) == ("Europe/Berlin", 5)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (GOOD.replace("0 0 2 * * *", "0 2 * * *"), r"f\.yaml: cron: .*six fields.*write '0 0 2 \* \* \*'"),
        (GOOD.replace("Europe/Berlin", "Europe/Berlim"), "f.yaml: time_zone: no such time zone"),
        (GOOD.replace("time_zone", "timezone"), "f.yaml: timezone: unknown key.*did you mean 'time_zone'"),
        (GOOD.replace("name: nightly", ""), "f.yaml: name: this key is missing"),
        (GOOD.replace("nightly", "Nightly!"), "f.yaml: name: .*Nightly!"),
        (GOOD.replace("5", "-1"), "f.yaml: pause_after_failures: .*-1"),
        (GOOD.replace("train.steps", "train.stepz"), "train.stepz: unknown key"),
        ("- nightly", "a schedule is a mapping"),
        ("name: [", "not valid YAML"),
        (GOOD.replace("base.yaml", "none.yaml"), "none.yaml: cannot read"),
        (GOOD.replace("knobs: {", "knobs: {schedule.name: x, "), "schedule"),
    ],
)
def test_what_is_wrong_is_one_line(folder, text, line):
    with pytest.raises(ConfigError, match=line) as caught:
        spec.parse_schedule(text, "f.yaml", folder)
    assert "\n" not in caught.value.line


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the schedule.*check --file"):
        spec.read_schedule(tmp_path / "none.yaml")


def test_a_configuration_may_not_bring_a_schedule_of_its_own(folder):
    (folder / "base.yaml").write_text('schedule: {name: other, cron: "0 0 3 * * *"}\n')
    with pytest.raises(ConfigError, match="written by kftrain schedule"):
        spec.parse_schedule(GOOD, "f.yaml", folder)


WINDOWED = GOOD.replace("s3://bucket/raw", "s3://b/raw").replace("data.source", "data.window.by: path, data.source")
FIXED = ', data.window.start: "2026-01-01T00:00:00Z", data.window.end: "2026-02-01T00:00:00Z"'
REMOVE = ".*remove it, or remove window$"
INSTEAD = r".*remove it, or set window: since_last_trained without window_hours and data\.window\.start"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (GOOD + "window: since_last_trained", "f.yaml: window: .*does not say what the time"),
        (GOOD + "window_hours: 24", "f.yaml: window_hours: .*does not say what the time"),
        (WINDOWED + "window: since_last_trained\nwindow_hours: 24", f"window_hours: .*not of a window{REMOVE}"),
        (
            WINDOWED.replace("path", f"path{FIXED}") + "window: since_last_trained",
            rf"data\.window\.start: .*not{REMOVE}",
        ),
        (WINDOWED + "window_hours: 24\nmax_window_hours: 48", f"f.yaml: max_window_hours: .*only of{INSTEAD}"),
        (WINDOWED.replace("path", f"path{FIXED}") + "settle_hours: 48", f"f.yaml: settle_hours: .*only of{INSTEAD}"),
        (WINDOWED + "window_start: yesterday", "f.yaml: window_start: .*yesterday"),
        (WINDOWED + "window_start: 0001-01-01T00:00:00+14:00", "f.yaml: window_start: not a moment in UTC"),
        (WINDOWED + "window_start: 9999-12-31T23:00:00-05:00", "f.yaml: window_start: not a moment in UTC"),
        (WINDOWED + "window: sliding", "f.yaml: window"),
        (WINDOWED + "window_hours: 9999999999", "f.yaml: window_hours"),
    ],
)
def test_windows_that_contradict_each_other_are_refused_in_a_line(folder, text, line):
    with pytest.raises(ConfigError, match=line) as caught:
        spec.parse_schedule(text, "f.yaml", folder)
    assert "\n" not in caught.value.line


def test_windows_that_schedules_may_have(folder):
    since = "window: since_last_trained\nwindow_start: 2026-01-01T00:00:00Z\nmax_window_hours: 48\nsettle_hours: 3"
    for more in ("", since, since.partition("\n")[2], "window_hours: 24\nsettle_hours: 3"):
        assert spec.parse_schedule(WINDOWED + more, "f.yaml", folder).config.data.window.is_set
    fixed = spec.parse_schedule(WINDOWED.replace("path", f"path{FIXED}"), "f.yaml", folder)
    assert fixed.config.data.window.start == "2026-01-01T00:00:00Z"
