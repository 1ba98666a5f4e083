"""Which record is which, and on which side of the split: by content or a column, whatever moves around it."""

import json
import os
import random
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from helpers.models.toy_task import ToyTask
from helpers.splits import open_split
from helpers.toy_data import shard_toy, toy_config

from kftrain.core import storage
from kftrain.errors import ConfigError, DataError
from kftrain.sharding.shard_dataset import shard_dataset
from kftrain.sharding.sources import resolve_source

SMALL_PARTS = {"part_size_bytes": 1 << 16}
PADDING = "x" * 900
"""So that a file of a few hundred lines has several parts."""


def write_lines(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(numbers) -> list[dict]:
    return [{"text": f"document {number}", "padding": PADDING} for number in numbers]


def texts(result, split: str) -> Counter:
    """How often each text is in a split."""
    dataset = open_split(result.manifest_uri, split)
    arrays, groups = dataset.read_range(0, dataset.num_samples)
    return Counter(
        arrays["data"][groups == group].tobytes().rstrip(b"\0").decode() for group in range(dataset.num_groups)
    )


def keys(result, split: str) -> list[str]:
    return open_split(result.manifest_uri, split).group_keys()


# -- content ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved"])
def test_a_row_at_the_top_moves_no_held_out_row_into_training(tmp_path, kind):
    def write(numbers):
        rows, path = rows_of(numbers), tmp_path / ("saved" if kind == "saved" else f"a.{kind}")
        if kind == "jsonl":
            return write_lines(path, rows)
        if kind == "parquet":
            arrow = pytest.importorskip("pyarrow.parquet")
            import pyarrow

            arrow.write_table(pyarrow.Table.from_pylist(rows), path)
            return path
        pytest.importorskip("datasets").Dataset.from_list(rows).save_to_disk(path)
        return path

    before = shard_toy(write(range(300)), tmp_path / "root", **SMALL_PARTS)
    after = shard_toy(write([1000, *range(300)]), tmp_path / "root", **SMALL_PARTS)
    for split in ("train", "validation"):
        assert texts(before, split) - texts(after, split) == Counter()
        assert (texts(after, split) - texts(before, split)).keys() <= {"document 1000"}
        assert set(keys(before, split)) <= set(keys(after, split))
    assert after.manifest.parent == before.dataset_digest


def test_equal_records_stay_on_one_side_and_are_told_apart_by_their_number(tmp_path):
    numbers = [number for number in range(60) for _ in range(3)]
    random.Random(0).shuffle(numbers)
    result = shard_toy(write_lines(tmp_path / "a.jsonl", rows_of(numbers)), tmp_path / "root", **SMALL_PARTS)
    train, validation = texts(result, "train"), texts(result, "validation")
    assert train.keys().isdisjoint(validation) and set((train + validation).values()) == {3}
    assert "content in both splits" not in result.manifest.findings
    found = keys(result, "validation")
    assert len(set(found)) == len(found) and {key.partition("#")[2] for key in found} == {"", "2", "3"}


def test_keys_do_not_depend_on_where_parts_end_or_on_who_encodes_them(tmp_path):
    numbers = [number % 50 for number in range(400)]
    source = write_lines(tmp_path / "a.jsonl", rows_of(numbers))
    whole = shard_toy(source, tmp_path / "whole")
    parts = shard_toy(source, tmp_path / "parts", **SMALL_PARTS)
    assert len({shard.folder for shard in parts.manifest.splits["train"].shards}) > 3
    for split in ("train", "validation"):
        assert keys(whole, split) == keys(parts, split) and len(set(keys(parts, split))) == len(keys(parts, split))


def test_what_a_record_is_depends_on_its_fields_and_not_on_how_a_line_is_written(tmp_path):
    rows = [{"text": f"document {number}", "tags": ["a", {"b": number}]} for number in range(40)]
    first = shard_toy(write_lines(tmp_path / "one" / "a.jsonl", rows), tmp_path / "root", validation_fraction=0.4)
    swapped = [{"tags": row["tags"], "text": row["text"]} for row in reversed(rows)]
    second = shard_toy(write_lines(tmp_path / "two" / "a.jsonl", swapped), tmp_path / "root", validation_fraction=0.4)
    assert set(keys(first, "validation")) == set(keys(second, "validation"))


def test_an_error_and_a_finding_name_the_line(tmp_path):
    class Refusing(ToyTask):
        def encode(self, records, split):
            for record in records:
                if record.fields["text"] == b"bad":
                    raise DataError("it is bad", where=record.key)
                yield from super().encode([record], split)

    rows = rows_of([1, 2, 3, 3, *range(10, 60)])
    source = write_lines(tmp_path / "a.jsonl", rows)
    lines = []
    shard_dataset(toy_config(source, tmp_path / "root", validation_fraction=0.4), ToyTask(), lines.append)
    assert "found 1 x content again in its split: a.jsonl:4 = a.jsonl:3" in lines
    write_lines(source, [*rows, {"text": "bad"}])
    with pytest.raises(DataError) as caught:
        shard_dataset(toy_config(source, tmp_path / "root", validation_fraction=0.4), Refusing(), lines.append)
    assert caught.value.line == "a.jsonl:55: it is bad"


def test_a_dataset_of_before_goes_on_with_numbers(tmp_path, monkeypatch):
    """As the release before wrote it: by the digest of its source, which is fixed, and by the keys of what is added."""
    monkeypatch.chdir(tmp_path)
    source = write_lines(Path("a.jsonl"), rows_of(range(300)))
    os.utime(source, ns=(10**18, 10**18))
    config = toy_config("a.jsonl", "root", **SMALL_PARTS)
    with monkeypatch.context() as patch:
        patch.setattr(resolve_source, "with_content_keys", lambda data, kind: data)
        before = shard_dataset(config, ToyTask(), lambda line: None)
    (pointer,) = Path("root/shards/by-source").iterdir()
    assert pointer.stem == SOURCE_DIGEST_OF_BEFORE and before.dataset_digest == DATASET_DIGEST_OF_BEFORE
    storage.publish_json(str(pointer), {k: v for k, v in storage.read_json(str(pointer)).items() if k != "state"})
    assert shard_dataset(config, ToyTask(), lambda line: None).reused
    write_lines(source, rows_of(range(310)))
    appended = shard_dataset(config, ToyTask(), lambda line: None)
    assert appended.manifest.parent == before.dataset_digest
    assert set(keys(before, "validation")) <= set(keys(appended, "validation"))
    assert all(key.startswith("a.jsonl:") and key[8:].isdecimal() for key in keys(appended, "validation"))
    by_content = shard_toy("a.jsonl", "root", key="*", **SMALL_PARTS)
    assert not any(key[8:].isdecimal() for key in keys(by_content, "validation"))
    assert shard_dataset(config, ToyTask(), lambda line: None).dataset_digest == appended.dataset_digest


SOURCE_DIGEST_OF_BEFORE = "8f39108fdf13e485a05e22f072cec2965c06ad75355fdec1c49312a54a949264"
DATASET_DIGEST_OF_BEFORE = "785b8ede900f0efcc8e6ac1420acafa636a098252f2754e4ffd3665759c7c287"


# -- columns ---------------------------------------------------------------------------------------------------------


def test_a_column_is_the_key_whatever_else_changes(tmp_path):
    def rows(word, numbers):
        return [{"id": number, "text": f"{word} {number}"} for number in numbers]

    first = shard_toy(write_lines(tmp_path / "a.jsonl", rows("old", range(100))), tmp_path / "root", key="id")
    write_lines(tmp_path / "a.jsonl", rows("new", reversed(range(-5, 100))))
    second = shard_toy(tmp_path / "a.jsonl", tmp_path / "root", key="id")
    for split in ("train", "validation"):
        assert set(keys(first, split)) <= set(keys(second, split))
    assert sorted(map(int, keys(first, "train") + keys(first, "validation"))) == list(range(100))
    write_lines(tmp_path / "a.jsonl", rows("twice", [1, *range(100)]))
    with pytest.raises(DataError, match="a key comes twice"):
        shard_toy(tmp_path / "a.jsonl", tmp_path / "root", key="id")


@pytest.mark.parametrize("setting", ["key", "group", "stratify"])
@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "x"}, r"\(got None\); it has: text$"),
        ({"text": "x", "id": None}, r"\(got None\)"),
        ({"text": "x", "id": ""}, r"\(got ''\)"),
        ({"text": "x", "id": float("nan")}, r"\(got nan\)"),
        ({"text": "x", "id": ["a"]}, r"\(got \['a'\]\)"),
    ],
)
def test_a_record_without_a_value_in_the_column_is_refused_by_its_line(tmp_path, setting, row, said):
    write_lines(tmp_path / "a.jsonl", [{"text": "a", "id": 1}, {"text": "b", "id": 2}, row])
    with pytest.raises(DataError) as caught:
        shard_toy(tmp_path / "a.jsonl", tmp_path / "root", **{setting: "id"})
    start = rf"a\.jsonl:3: data\.{setting}: the column 'id' holds neither text nor a number "
    assert re.search(start + said, caught.value.line), caught.value.line
    assert "\n" not in caught.value.line


def test_records_of_a_group_are_on_one_side_and_one_unit_of_the_bootstrap(tmp_path):
    rows = [{"text": f"visit {number}", "patient": f"p{number % 25}"} for number in range(200)]
    result = shard_toy(write_lines(tmp_path / "a.jsonl", rows), tmp_path / "root", group="patient")
    patients = [{f"p{int(text.split()[1]) % 25}" for text in texts(result, split)} for split in ("train", "validation")]
    assert patients[0].isdisjoint(patients[1]) and patients[1] and len(patients[0] | patients[1]) == 25
    dataset = open_split(result.manifest_uri, "validation")
    arrays, _ = dataset.read_range(0, dataset.num_samples)
    assert len(set(arrays["cluster"].tolist())) == len(patients[1])


def stratified_rows(counts, seed=0):
    labels = [label for label, count in counts.items() for _ in range(count)]
    random.Random(seed).shuffle(labels)
    return [{"text": f"{label} {number}", "label": label} for number, label in enumerate(labels)]


def test_each_stratum_is_split_as_scikit_learn_splits_it(tmp_path):
    selection = pytest.importorskip("sklearn.model_selection")
    rows = stratified_rows({"a": 500, "b": 100, "c": 41, "d": 8, "e": 2, "f": 1})
    found = {}
    for fraction in (0.1, 0.25):
        source = write_lines(tmp_path / f"{fraction}.jsonl", rows)
        result = shard_toy(source, tmp_path / "root", stratify="label", validation_fraction=fraction, **SMALL_PARTS)
        found[fraction] = Counter(text.split()[0] for text in texts(result, "validation").elements())
        common = [row["label"] for row in rows if row["label"] not in "ef"]
        _, expected = selection.train_test_split(common, test_size=fraction, stratify=common, random_state=0)
        for label, count in Counter(expected).items():
            assert abs(found[fraction][label] - count) <= 1, (label, fraction)
    assert found[0.1] == {"a": 50, "b": 10, "c": 4, "d": 1, "e": 1}
    assert found[0.25] == {"a": 125, "b": 25, "c": 10, "d": 2, "e": 1}


def test_a_stratified_split_moves_no_record_when_data_is_added_anywhere(tmp_path):
    counts = {"a": 300, "b": 40, "c": 5}
    rows, more = stratified_rows(counts), stratified_rows({"a": 300, "b": 40, "c": 50, "d": 60}, 1)
    options = {"stratify": "label", "validation_fraction": 0.2, "part_size_bytes": 1 << 16}
    before = shard_toy(write_lines(tmp_path / "a.jsonl", rows), tmp_path / "root", **options)
    after = shard_toy(write_lines(tmp_path / "a.jsonl", [*more, *rows]), tmp_path / "root", **options)
    assert after.manifest.parent == before.dataset_digest
    for split in ("train", "validation"):
        assert texts(before, split) - texts(after, split) == Counter()
    again = shard_toy(tmp_path / "a.jsonl", tmp_path / "root", **options)
    assert again.reused and again.dataset_digest == after.dataset_digest
    share = np.mean([text.startswith("d") for text in texts(after, "validation")])
    assert 0 < share < 0.3, "a stratum that is new is split by the fraction"


STRATIFIED = {"stratify": "label", "part_size_bytes": 1 << 16, "validation_fraction": 0.1}


def small_and_grown(folder):
    """A source of strata so small that their thresholds are above the fraction, sharded; a function that adds to it."""
    rows, more = (stratified_rows(dict.fromkeys("abcdefghijkl", count), count) for count in (5, 170))
    for row in (*rows, *more):
        row["label"] = row["label"].replace("l", "\ud800")
    source = write_lines(folder / "a.jsonl", rows)
    first = shard_toy(source, folder / "root", **STRATIFIED)
    return first, lambda: write_lines(source, [*rows, *more])


@pytest.mark.parametrize(("data", "width"), [({"shard_size_bytes": 1 << 17}, None), ({}, 16)])
def test_strata_keep_their_thresholds_under_other_shards_and_other_tasks(tmp_path, data, width):
    first, grow = small_and_grown(tmp_path)
    config = toy_config(grow(), tmp_path / "root", **{**STRATIFIED, **data})
    after = shard_dataset(config, ToyTask(width=width) if width else ToyTask(), lambda line: None)
    assert len(texts(first, "validation")) == 12
    assert texts(first, "validation") <= texts(after, "validation")


def test_strata_of_a_pointer_of_before_go_on(tmp_path):
    first, grow = small_and_grown(tmp_path)
    (strata,), (latest,) = ((tmp_path / "root/shards" / name).glob("*.json") for name in ("strata", "latest"))
    latest.write_text(json.dumps({**json.loads(latest.read_text()), **json.loads(strata.read_text())}))
    strata.unlink()
    after = shard_toy(grow(), tmp_path / "root", **STRATIFIED)
    assert texts(first, "validation") <= texts(after, "validation")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"strata": {}}', '{"strata": {"a": "x"}}', None])
def test_damaged_thresholds_of_strata_are_refused(tmp_path, content):
    _, grow = small_and_grown(tmp_path)
    (strata,) = (tmp_path / "root/shards/strata").glob("*.json")
    if content is None:
        strata.unlink()
    else:
        strata.write_text(content)
    with pytest.raises(DataError, match=r"thresholds of data\.stratify") as caught:
        shard_toy(grow(), tmp_path / "root", **STRATIFIED)
    assert "\n" not in caught.value.line


def test_strata_of_one_record_each_are_refused_by_that_name(tmp_path):
    rows = [{"text": f"document {number}", "id": number} for number in range(60)]
    with pytest.raises(DataError, match=r"every stratum has one record.*\(got 'id'\); name a column") as caught:
        shard_toy(write_lines(tmp_path / "a.jsonl", rows), tmp_path / "root", stratify="id")
    assert "raise data.validation_fraction" not in caught.value.line


def test_settings_that_cannot_hold_together_are_refused(tmp_path):
    source = write_lines(tmp_path / "a.jsonl", rows_of(range(9)))
    for data in ({"group": "a", "stratify": "b"}, {"group": "a", "shards": "adopt"}):
        with pytest.raises((ValueError, ConfigError), match=r"group|adopt"):
            toy_config(source, tmp_path / "root", **data)

    class Clustered(ToyTask):
        def cluster(self, record):
            return record.key[:3]

    config = toy_config(source, tmp_path / "root", group="text")
    with pytest.raises(ConfigError, match=r"data\.group.*the task names clusters"):
        shard_dataset(config, Clustered(), lambda line: None)
