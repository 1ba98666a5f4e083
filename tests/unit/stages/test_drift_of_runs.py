"""What the shard step says of the data against the dataset before; nothing fails where it cannot be told."""

import json
import sys
from datetime import datetime, timedelta, timezone
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

from kftrain import config, reports, tracking
from kftrain.core import storage
from kftrain.data.schema import Field
from kftrain.data.shards.manifest import read_manifest
from kftrain.data.time_window import TimeWindow
from kftrain.errors import ConfigError, StorageError
from kftrain.run import documents
from kftrain.run.drift import Drift, DriftedDistribution, DriftShift, ProfiledDataset
from kftrain.run.paths import RunPaths
from kftrain.sharding import dataset_drift, profile
from kftrain.sharding import drift as drift_measures
from kftrain.stages import windows
from kftrain.stages.shard import shard

DAY, DAY_0 = timedelta(days=1), datetime(2026, 11, 1, tzinfo=timezone.utc)

TEXTS = """
run: {{name: nightly, storage_root: {root}/store}}
tracking: {{uri: "sqlite:///{root}/mlflow.db"}}
task: {{kind: language_modeling, sequence_length: 16, tokenizer: bytes}}
model: {{kind: transformer, dim: 16, num_layers: 1, num_heads: 2, num_kv_heads: 2}}
train: {{global_batch_size: 4}}
data: {{source: {root}/raw, window: {{by: path}}, shard_size_bytes: 65536, validation_fraction: 0.3}}
"""

IMAGES = TEXTS.replace(
    "{{kind: language_modeling, sequence_length: 16, tokenizer: bytes}}",
    "{{kind: image_classification, image_size: 8, num_channels: 1, num_classes: 2, storage: {storage}}}\n"
    "registry: {{metric: accuracy}}",
).replace(
    "{{kind: transformer, dim: 16, num_layers: 1, num_heads: 2, num_kv_heads: 2}}",
    "{{kind: vision_transformer, dim: 16, num_layers: 1, num_heads: 2}}",
)


@pytest.fixture(autouse=True)
def no_tracking(monkeypatch):
    monkeypatch.setattr(tracking, "check", lambda uri: None)


def day_of(root, day):
    folder = root / "raw" / f"date={(DAY_0 + day * DAY).date()}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_texts(root, day, words):
    draw = np.random.default_rng(day)
    for number in range(60):
        (day_of(root, day) / f"{number}.txt").write_text(" ".join(draw.choice(words, 150)))


def write_images(root, day, brightness, num_of_first):
    draw = np.random.default_rng(day)
    for number in range(120):
        folder = day_of(root, day) / ("ant" if number < num_of_first else "bee")
        folder.mkdir(exist_ok=True)
        pixels = np.clip(draw.normal(brightness, 30, (8, 8)), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")


def run_of(root, day, *overrides, text=TEXTS, **names):
    """The outcome of the shard step of one day, what it has said, and its drift."""
    own = config.parse(text.format(root=root, **names), overrides)
    lines = []
    window = TimeWindow(DAY_0 + day * DAY, DAY_0 + (day + 1) * DAY)
    placed = windows.with_window(own, window) if own.data.window.is_set else own
    outcome = shard(placed, f"r-{day}", progress=lines.append)
    paths = RunPaths(outcome.run_uri)
    found = documents.read(Drift, paths.drift) if storage.exists(paths.drift) else None
    return outcome, lines, found


def said_of(line):
    return line.startswith(("drift", "no drift", "warning"))


ENGLISH = ["the", "shard", "step", "loss", "epoch", "mesh", "rank"]
GERMAN = ["über", "größe", "schön", "zwölf", "jäger", "quiz"]


def test_other_texts_are_a_drift_of_tokens_and_more_of_the_same_is_none(tmp_path):
    for day, words in enumerate((ENGLISH, ENGLISH, GERMAN)):
        write_texts(tmp_path, day, words)
    _, lines, found = run_of(tmp_path, 0)
    assert found is None and not [line for line in lines if said_of(line)], "there is nothing before"
    outcome, lines, found = run_of(tmp_path, 1)
    assert found.drifted == [] and "no drift against the dataset before" in lines
    assert "No drift against the dataset before" in outcome.html and "No drift" in outcome.markdown
    outcome, lines, found = run_of(tmp_path, 2)
    tokens = next(each for each in found.distributions if each.name == "tokens")
    assert tokens.level == "large" and found.line in lines and "large in tokens" in found.line
    assert outcome.metrics["drift_largest_psi"] == tokens.psi and outcome.metrics["drifted_distributions"] >= 1
    assert "Largest changes in tokens" in outcome.html and "Largest changes in tokens" in outcome.markdown
    assert storage.read_json(RunPaths(outcome.run_uri).drift)["now"]["num_records"] == found.now.num_records > 0


def test_the_shares_of_tokens_are_those_of_the_texts(tmp_path):
    """All of a small dataset is counted: by bytes of the texts that are trained on."""
    for day, words in enumerate((ENGLISH, GERMAN)):
        write_texts(tmp_path, day, words)
        outcome = run_of(tmp_path, day)[0]
    manifest_uri = outcome.summary["manifest_uri"]
    counted = profile.read_profile(manifest_uri).distributions["tokens"].counts
    manifest = read_manifest(manifest_uri)
    assert sum(counted.values()) == manifest.splits["train"].num_samples
    held_out = manifest.splits["validation"].num_blocks
    texts = [path.read_bytes() for path in day_of(tmp_path, 1).iterdir()]
    assert 0.9 < counted["113"] / (sum(text.count(b"q") for text in texts) * (60 - held_out) / 60) < 1.1


@pytest.mark.parametrize("stored", ["pixels", "files"])
def test_brighter_images_and_another_balance_of_classes_are_a_drift(tmp_path, stored):
    for day, (brightness, num_of_first) in enumerate([(90, 60), (90, 60), (150, 100)]):
        write_images(tmp_path, day, brightness, num_of_first)
    run_of(tmp_path, 0, text=IMAGES, storage=stored)
    assert run_of(tmp_path, 1, text=IMAGES, storage=stored)[2].drifted == []
    _, _, found = run_of(tmp_path, 2, text=IMAGES, storage=stored)
    levels = {each.name: each.level for each in found.distributions}
    assert levels["pixels of image"] == "large" and levels["label"] in ("some", "large")
    pixels = next(each for each in found.distributions if each.name == "pixels of image")
    files = [path for path in day_of(tmp_path, 2).rglob("*.png")]
    assert pixels.now[0] == pytest.approx(np.mean([np.asarray(Image.open(file)) for file in files]), abs=2)
    assert pixels.before[0] == pytest.approx(90, abs=3) and pixels.now[1] == pytest.approx(30, abs=2)


def test_images_that_cannot_be_decoded_are_not_counted(tmp_path):
    """`data.max_bad_samples` may leave them out of training."""
    for day in range(2):
        write_images(tmp_path, day, 90, 60)
        for name in ("ant/3.png", "ant/30.png"):
            file = day_of(tmp_path, day) / name
            file.write_bytes(file.read_bytes()[:-40])
        _, lines, found = run_of(tmp_path, day, "data.max_bad_samples=2", text=IMAGES, storage="files")
    assert "pixels of image" in [each.name for each in found.distributions]
    assert not [line for line in lines if line.startswith("warning")]


def test_thresholds_are_settings_and_none_compares_nothing(tmp_path):
    for day, words in enumerate((ENGLISH, GERMAN)):
        write_texts(tmp_path, day, words)
    run_of(tmp_path, 0)
    assert run_of(tmp_path, 1, "data.drift={some: 90, large: 99}")[2].drifted == []
    assert not [line for line in run_of(tmp_path, 0, "data.drift.against=none")[1] if said_of(line)]
    with pytest.raises(ConfigError, match="large is at least as much as some"):
        config.parse("data: {drift: {some: 0.3, large: 0.2}}")


def test_the_new_is_compared_with_what_is_seen_again_and_with_a_run_that_is_named(tmp_path):
    for day, words in enumerate((ENGLISH, GERMAN, ENGLISH)):
        write_texts(tmp_path, day, words)
    runs = [run_of(tmp_path, day)[0].run_uri for day in range(2)]
    found = run_of(tmp_path, 2, "data.replay.windows=1")[2]
    assert "large in tokens" in found.line
    found = run_of(tmp_path, 2, f"data.drift.against={runs[0]}")[2]
    assert (
        found.drifted == [] and found.before.manifest_uri == storage.read_json(f"{runs[0]}/shards.json")["manifest_uri"]
    )


def test_what_cannot_be_compared_is_a_warning_line(tmp_path, monkeypatch):
    for day in range(3):
        write_texts(tmp_path, day, ENGLISH)
        _, lines, found = run_of(tmp_path, day, "data.drift.against=/elsewhere/runs/r")
        assert found is None
        assert [line for line in lines if line.startswith("warning: how far the data has drifted is not known")]

    def away(*arguments):
        raise StorageError("the storage is away")

    monkeypatch.setattr(dataset_drift, "write_profile", away)
    lines = run_of(tmp_path, 1)[1]
    assert "warning: how far the data has drifted is not known: the storage is away" in lines


def test_a_damaged_profile_is_written_anew_and_one_of_deleted_shards_still_counts(tmp_path):
    write_texts(tmp_path, 0, ENGLISH)
    outcome, _, _ = run_of(tmp_path, 0)
    folder = storage.local_path(outcome.summary["manifest_uri"]).parent
    whole = (folder / profile.PROFILE_NAME).read_text()
    (folder / profile.PROFILE_NAME).write_text("{")
    write_texts(tmp_path, 1, ENGLISH)
    assert run_of(tmp_path, 1)[2] is not None
    assert json.loads((folder / profile.PROFILE_NAME).read_text()) == json.loads(whole)


def test_names_of_values_are_escaped(tmp_path):
    hostile = "<script>|`x`"
    size = ProfiledDataset(manifest_uri="u", num_records=1, content_bytes=0, num_samples=2)
    shift = DriftShift(bin=hostile, before=0.1, now=0.9)
    one = {"name": hostile, "psi": 3.0, "js_distance": 0.9, "chance_psi": 0.0, "num_bins": 2, "level": "large"}
    found = Drift(
        before=size, now=size, some=0.1, large=0.25, distributions=[DriftedDistribution(**one, shifts=[shift])]
    )
    assert "<script>" not in reports.render_section(reports.describe_shards({}, None, found), "r")
    assert "<script>" not in reports.render_markdown(reports.describe_shards({}, None, found)).replace("\\<script", "")


FLOATS = """
run: {{name: nightly, storage_root: {root}/store}}
tracking: {{uri: "sqlite:///{root}/mlflow.db"}}
task: {{kind: "helpers.models.regression:Regression"}}
registry: {{metric: mse, goal: minimize}}
model: {{kind: "torch.nn:Linear"}}
train: {{global_batch_size: 4}}
data: {{source: "rows_of_day:records", validation_fraction: 0.3, drift: {{against: {against}}}}}
"""


def run_of_floats(root, name, rows, against, task="Regression"):
    """The drift of the shard step over rows `x` and `y`."""
    source = ModuleType("rows_of_day")
    source.records = lambda: [(f"row-{number}", {**row, "id": number}) for number, row in enumerate(rows)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "rows_of_day", source)
        own = config.parse(
            FLOATS.format(root=root, against=against),
            [f"run.name={name}", f"task.kind=helpers.models.regression:{task}"],
        )
        outcome = shard(own, name, progress=lambda line: None)
    paths = RunPaths(outcome.run_uri)
    return outcome, documents.read(Drift, paths.drift) if storage.exists(paths.drift) else None


def float_rows(seed, column=0, shift=0.0, count=800):
    draw = np.random.default_rng(seed)
    rows = draw.normal(5.0, 2.0, (count, 6)).astype(np.float32)
    rows[:, column] += shift
    return [{"x": row, "y": np.float32(draw.normal())} for row in rows]


def test_a_column_of_numbers_that_has_changed_is_named(tmp_path):
    first, found = run_of_floats(tmp_path, "first", float_rows(1), "none")
    assert found is None
    _, found = run_of_floats(tmp_path, "same", float_rows(2), first.run_uri)
    assert found.drifted == [] and len(found.distributions) >= 7
    outcome, found = run_of_floats(tmp_path, "other", float_rows(3, column=4, shift=3.0), first.run_uri)
    assert [each.name for each in found.drifted] == ["values of x[4]"] and found.drifted[0].level == "large"
    assert found.drifted[0].now == pytest.approx((8.0, 2.0), abs=0.3)
    assert "values of x[4]" in outcome.html


@pytest.mark.parametrize("share", [0.6, 1.0])
def test_a_column_that_is_no_number_any_more_is_a_drift(tmp_path, share):
    first, _ = run_of_floats(tmp_path, "first", float_rows(1), "none", "Holes")
    rows = float_rows(2)
    for row in rows[: int(share * len(rows))]:
        row["x"][3] = np.nan
    outcome, found = run_of_floats(tmp_path, "holes", rows, first.run_uri, "Holes")
    assert [(each.name, each.level) for each in found.drifted] == [("values of x[3]", "large")]
    assert found.drifted[0].shifts[0].bin == "not finite" and "not finite" in outcome.html


@pytest.mark.parametrize("dtype", ["int8", "int64", "uint64", "bool"])
@pytest.mark.parametrize("value", [-999, 2**60, 1])
def test_whole_numbers_of_any_size_are_compared(dtype, value):
    """Of 64 stretches 7 hold another value in each tenth row; the rest is zeros, as before."""
    before = [np.zeros((100, 3), dtype) for _ in range(64)]
    now = [rows.copy() for rows in before]
    for rows in now[::10]:
        rows[::10] = np.array(value).astype(dtype)
    field = Field("features", dtype, (3,))
    one, other = (
        profile._count_values(field, [profile._read_values(field, rows) for rows in each])["values of features"]
        for each in (before, now)
    )
    drifted = drift_measures.measure_change(one, other)
    other_value = str(int(np.array(value).astype(dtype)))
    assert one.counts == {"0": 19200}
    if other_value != "0":
        assert other.counts == {"0": 19200 - 210, other_value: 210}
        assert [shift.bin for shift in drifted.shifts if shift.now > shift.before] == ["others"]


MIXED = TEXTS.replace(
    "source: {root}/raw, window: {{by: path}}",
    "mixture: [{{name: english, source: {root}/english}}, {{name: german, source: {root}/german}}]",
)


def test_each_component_of_a_mixture_is_compared_with_its_own_past(tmp_path):
    def write(name, number, words):
        (tmp_path / name).mkdir(exist_ok=True)
        draw = np.random.default_rng(number)
        for each in range(60):
            (tmp_path / name / f"{number}-{each}.txt").write_text(" ".join(draw.choice(words, 150)))

    write("english", 0, ENGLISH)
    write("german", 0, GERMAN)
    assert run_of(tmp_path, 0, text=MIXED)[2] is None
    write("german", 1, ENGLISH)
    _, lines, found = run_of(tmp_path, 1, text=MIXED)
    assert {each.name.partition(":")[0] for each in found.drifted} == {"german"} and found.line in lines
    assert "german: tokens" in [each.name for each in found.drifted]
    first = f"{tmp_path}/store/runs/r-0"
    write("english", 1, GERMAN)
    found = run_of(tmp_path, 2, f"data.drift.against={first}", text=MIXED)[2]
    assert {each.name.partition(":")[0] for each in found.drifted} == {"english", "german"}
    assert found.now.num_records > found.before.num_records


def test_one_source_is_not_compared_with_a_mixture(tmp_path):
    for name, words in (("english", ENGLISH), ("german", GERMAN)):
        (tmp_path / name).mkdir()
        for each in range(40):
            (tmp_path / name / f"{each}.txt").write_text(" ".join(words * 20))
    mixed = run_of(tmp_path, 0, text=MIXED)[0].run_uri
    write_texts(tmp_path, 1, ENGLISH)
    _, lines, found = run_of(tmp_path, 1, f"data.drift.against={mixed}")
    assert found is None and any("data.drift.against: a mixture" in line for line in lines)
