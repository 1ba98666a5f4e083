"""Runs over windows of time: what is seen again beside the new, and one window after another."""

import itertools
import re
from collections import Counter
from datetime import datetime, timedelta, timezone

import numpy as np
import pytest
from helpers.documents import publish_commit
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain import config, tracking
from kftrain.data.dataset import ShardedDataset
from kftrain.data.shards.manifest import read_manifest
from kftrain.data.time_window import TimeWindow
from kftrain.data.training_split import open_training_split
from kftrain.errors import ConfigError, DataError, EmptyWindowError
from kftrain.run.config import read_config
from kftrain.run.paths import RunPaths
from kftrain.sharding.parts.store import PartStore
from kftrain.stages import windows
from kftrain.stages.shard import shard

UTC = timezone.utc
DAY = timedelta(days=1)
DAY_0 = datetime(2026, 11, 1, tzinfo=UTC)

TEXT = """
run: {{name: nightly, storage_root: {root}/store}}
tracking: {{uri: "sqlite:///{root}/mlflow.db"}}
task: {{kind: language_modeling, sequence_length: 16, tokenizer: bytes}}
model: {{kind: transformer, dim: 16, num_layers: 1, num_heads: 2, num_kv_heads: 2}}
train: {{global_batch_size: 4}}
data: {{source: {root}/raw, window: {{by: path}}, shard_size_bytes: 65536, validation_fraction: 0.3}}
"""


@pytest.fixture(autouse=True)
def no_tracking(monkeypatch):
    monkeypatch.setattr(tracking, "check", lambda uri: None)


def nightly(root, day, *overrides):
    """The configuration of a run whose window is one day."""
    own = config.parse(TEXT.format(root=root), overrides)
    return windows.with_window(own, TimeWindow(DAY_0 + day * DAY, DAY_0 + (day + 1) * DAY))


def write_day(root, day):
    folder = root / "raw" / f"date={(DAY_0 + day * DAY).date()}"
    folder.mkdir(parents=True)
    for number in range(12):
        (folder / f"{number}.txt").write_text(f"day {day} document {number} " * 20)


def opened(root, run_id, day, *overrides, lines=None):
    outcome = shard(nightly(root, day, *overrides), run_id, progress=([] if lines is None else lines).append)
    return read_config(RunPaths(outcome.run_uri)), outcome.summary["manifest_uri"]


def days_of(manifest_uri, split):
    """Of each component, the days that its texts name; tokens are bytes."""
    manifest = read_manifest(manifest_uri)
    found = {}
    for component, each in zip(manifest.components, manifest.split_by_component(), strict=True):
        dataset = ShardedDataset(manifest_uri, each, split)
        arrays, _ = dataset.read_range(0, dataset.num_samples)
        (values,) = arrays.values()
        text = values.astype(np.uint8).tobytes() if split == "train" else b"".join(map(bytes, values))
        found[component.name] = {int(day) for day in re.findall(rb"day (\d)", text)}
    return found


def test_new_and_old_data_are_mixed_by_weight_and_nothing_old_is_encoded_again(tmp_path, monkeypatch):
    encoded = []
    encode = PartStore.encode
    monkeypatch.setattr(PartStore, "encode", lambda *arguments: encoded.append(1) or encode(*arguments))
    for day in range(6):
        write_day(tmp_path, day)
        opened(tmp_path, f"alone-{day}", day)
    encoded.clear()
    resolved, uri = opened(tmp_path, "r-1", 5, "data.replay={windows: 3, weight: 0.5}")
    assert not encoded
    assert days_of(uri, "train") == {"new": {5}, "replay": {2, 3, 4}} == days_of(uri, "validation")
    samples, order = open_training_split(uri, read_manifest(uri), resolved)
    components = np.concatenate([order.phases.split(np.arange(start, start + 300))[0] for start in (0, 3000)])
    assert Counter(components.tolist()) == {0: 400, 1: 200}, "two new ones for each one from before"
    assert samples.num_samples > 0
    identity = resolved.training_identity("d")
    assert identity["data.mixture"] == ["new", "replay"] and identity["data.mixture_weights"] == [[0, 1.0, 0.5]]


def test_the_first_window_has_nothing_to_see_again_and_says_so(tmp_path):
    lines = []
    write_day(tmp_path, 3)
    kept, uri = opened(tmp_path, "r-1", 3, "data.replay.windows=2", lines=lines)
    assert "nothing lies before the window: all samples are new" in lines
    assert kept.data.replay.is_empty and not kept.data.components and not read_manifest(uri).components
    alone, _ = opened(tmp_path, "r-2", 3)
    assert kept.training_digest("d") == alone.training_digest("d")
    write_day(tmp_path, 2)
    publish_commit(RunPaths.of(f"{tmp_path}/store", "r-1"))
    assert opened(tmp_path, "r-1", 3, "data.replay.windows=2")[0] == kept, "what comes late changes no run that began"
    late, uri = opened(tmp_path, "r-3", 3, "data.replay.windows=2")
    assert not late.data.replay.is_empty and days_of(uri, "train") == {"new": {3}, "replay": {2}}


def test_a_window_without_new_data_is_empty_whatever_there_was_before(tmp_path):
    write_day(tmp_path, 2)
    with pytest.raises(EmptyWindowError):
        opened(tmp_path, "r-1", 3, "data.replay.windows=2")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("{replay: {windows: 2}}", "a replay is of the time before a window"),
        ("{window: {by: path}, replay: {windows: 2}, mixture: [{name: a, source: x}]}", "a replay is of the time"),
        ("{window: {by: path}, replay: {windows: 2, weight: 0}}", "data.replay.weight"),
        ("{window: {by: path}, replay: {windows: -1}}", "data.replay.windows"),
        ("{window: {by: path}, replay: {windows: 2}, length_group_batches: 3}", "exclude each other"),
        ("{window: {by: path}, replay: {windows: 2, weight: 0.3333333333}}", "too many digits"),
    ],
)
def test_a_wrong_replay_is_refused_in_a_line_that_says_why(data, said):
    with pytest.raises(ConfigError) as caught:
        config.parse(f"data: {data}")
    assert said in caught.value.line


def test_phases_name_the_new_and_the_old():
    text = "data: {window: {by: path}, replay: {windows: 2}, mixture_phases: [{first_step: 9, weights: WEIGHTS}]}"
    weights = config.parse(text.replace("WEIGHTS", "{new: 1, replay: 0}")).data.mixture_weights()
    assert weights == [(1.0, 1.0), (1.0, 0.0)]
    with pytest.raises(ConfigError, match="names not the components"):
        config.parse(text.replace("WEIGHTS", "{old: 1, new: 0}"))


MOMENTS = st.datetimes(datetime(2000, 1, 1), datetime(2030, 1, 1), timezones=st.just(UTC))


@settings(max_examples=200, deadline=None)
@given(MOMENTS, st.timedeltas(timedelta(0), timedelta(days=60)), st.timedeltas(timedelta(hours=1), timedelta(days=9)))
def test_consecutive_windows_cover_the_time_once_and_reach_not_beyond_it(start, span, length):
    found = windows.consecutive_windows(start, start + span, length)
    borders = [start + number * length for number in range(len(found) + 1)]
    assert [(window.start, window.end) for window in found] == list(itertools.pairwise(borders))
    assert borders[-1] <= start + span < borders[-1] + length


def test_windows_of_no_length_and_too_many_of_them_are_refused():
    for length in (timedelta(0), -DAY, timedelta(seconds=1)):
        with pytest.raises(ConfigError, match="length"):
            windows.consecutive_windows(DAY_0, DAY_0 + 1000 * DAY, length)


def test_a_backfill_runs_one_window_after_another_and_never_promotes(tmp_path):
    for day in (0, 1, 3):
        write_day(tmp_path, day)
    seen, lines = [], []

    def run(own):
        seen.append((own.data.window.start[8:10], own.registry.promotion))
        return shard(own, f"r-{len(seen)}", progress=lines.append).run_uri

    own = config.parse(TEXT.format(root=tmp_path), ["registry.promotion=auto"])
    found = windows.backfill(own, windows.consecutive_windows(DAY_0, DAY_0 + 4 * DAY, DAY)[::-1], run, lines.append)
    assert seen == [("01", "never"), ("02", "never"), ("03", "never"), ("04", "never")]
    assert [result.result is not None for result in found] == [True, True, False, True]
    assert "window 1 of 4: 2026-11-01T00:00:00Z to 2026-11-02T00:00:00Z" in lines
    assert any(line.startswith("passed over: ") for line in lines)
    assert read_config(RunPaths(found[3].result)).registry.promotion == "never"


def test_a_window_that_fails_ends_a_backfill(tmp_path):
    seen = []

    def run(own):
        seen.append(own)
        raise DataError("damaged")

    with pytest.raises(DataError, match="damaged"):
        windows.backfill(nightly(tmp_path, 0), windows.consecutive_windows(DAY_0, DAY_0 + 3 * DAY, DAY), run, [].append)
    assert len(seen) == 1
    with pytest.raises(ConfigError, match=r"data\.window\.by"):
        windows.backfill(config.parse(""), windows.consecutive_windows(DAY_0, DAY_0 + DAY, DAY), run, [].append)
