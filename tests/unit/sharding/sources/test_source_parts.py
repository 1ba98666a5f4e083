"""Parts of sources: together they are the source, and a change stays in the part that it belongs to."""

import hashlib
import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain.data.schema import SourcePart
from kftrain.data.settings import DataConfig
from kftrain.sharding.sources.listing import SourceFile
from kftrain.sharding.sources.pieces import group_pieces, make_whole_piece
from kftrain.sharding.sources.resolve_source import resolve

TARGET_BYTES = 1 << 16


def file(name: str, size_bytes: int, version: str = "1") -> SourceFile:
    return SourceFile(name, f"/data/{name}", size_bytes, version)


def parts_of(files: list[SourceFile]) -> list[tuple[str, ...]]:
    """Each part as the names of its files and their versions."""
    parts = group_pieces(map(make_whole_piece, sorted(files, key=lambda each: each.name)), TARGET_BYTES)
    return [tuple(f"{p['file']['name']} {p['file']['version']}" for p in part.pieces) for part in parts]


FILES = st.lists(
    st.tuples(st.text("abcdefgh", min_size=1, max_size=6), st.integers(0, 200_000)),
    min_size=1,
    max_size=80,
    unique_by=lambda each: each[0],
)


@settings(max_examples=200, deadline=None)
@given(FILES, st.data())
def test_a_file_that_is_added_changes_one_part_and_leaves_the_others(listed, data):
    files = [file(*each) for each in listed]
    added = data.draw(st.sampled_from(files))
    before, after = parts_of([each for each in files if each != added]), parts_of(files)
    assert len(set(before) - set(after)) <= 1
    assert 1 <= len(set(after) - set(before)) <= 2
    assert [name for part in after for name in part] == sorted(name for part in after for name in part)


@settings(max_examples=100, deadline=None)
@given(FILES, st.data())
def test_a_file_that_changes_changes_its_part_and_one_that_goes_at_most_two(listed, data):
    files = [file(*each) for each in listed]
    number = data.draw(st.integers(0, len(files) - 1))
    touched = [*files[:number], file(*listed[number], version="2"), *files[number + 1 :]]
    before = parts_of(files)
    assert len(set(before) - set(parts_of(touched))) == 1 == len(set(parts_of(touched)) - set(before))
    assert len(set(before) - set(parts_of([*files[:number], *files[number + 1 :]]))) <= 2


def test_parts_have_about_the_size_that_is_asked_for():
    drawn = random.Random(3)
    files = [file(f"{number:06d}", drawn.randint(1, 20_000)) for number in range(20_000)]
    sizes = [
        sum(piece["file"]["size_bytes"] for piece in part.pieces)
        for part in group_pieces(map(make_whole_piece, files), 1_000_000)
    ]
    assert 300_000 < np.mean(sizes) < 1_200_000 and max(sizes) < 12_000_000
    assert (
        len(group_pieces([make_whole_piece(file("large", 2_000_000)), make_whole_piece(file("small", 1))], 1_000_000))
        == 2
    )


def read_in_parts(source, target_bytes: int = TARGET_BYTES) -> list[list]:
    """The records of each part; parts travel as JSON."""
    parts = [
        SourcePart(tuple(json.loads(json.dumps(part.pieces))), part.context) for part in source.parts(target_bytes)
    ]
    return [list(source.read(part)) for part in parts]


def open_source(uri: Path):
    return resolve(DataConfig(source=str(uri)))


@pytest.mark.parametrize("ending", ["\n", ""])
def test_ranges_of_lines_are_the_lines_of_the_file(tmp_path, ending):
    drawn = random.Random(1)
    lines = [json.dumps({"text": "x" * drawn.choice([0, 10, 5000])}) for _ in range(300)]
    lines[17] = lines[200] = ""
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + ending)
    (tmp_path / "b.jsonl").write_text('{"text": "small"}')
    parts = read_in_parts(open_source(tmp_path))
    assert len(parts) >= 8
    found = [(record.key, record.fields["text"].decode()) for part in parts for record in part]
    expected = [(f"a.jsonl:{n}", json.loads(line)["text"]) for n, line in enumerate(lines, start=1) if line]
    assert found == [*expected, ("b.jsonl:1", "small")]
    whole_file = list(open_source(tmp_path).records())
    assert [record.key for record in whole_file] == [key for key, _ in found]


def test_a_line_longer_than_a_part_stays_whole(tmp_path):
    texts = ["y" * 200_000, "z", "w" * 3_000_000, "v"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    found = [record.fields["text"].decode() for part in read_in_parts(open_source(tmp_path)) for record in part]
    assert found == texts


def test_row_groups_of_a_large_parquet_file_are_parts_of_their_own(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [hashlib.sha256(b"%d" % n).hexdigest() * 20 for n in range(500)]
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet", row_group_size=50, compression="none")
    parts = read_in_parts(open_source(tmp_path))
    assert len(parts) >= 5
    found = [(record.key, record.fields["text"].decode()) for part in parts for record in part]
    assert found == [(f"a.parquet:{n}", text) for n, text in enumerate(texts, start=1)]


@pytest.mark.parametrize("split", [False, True])
def test_rows_of_a_saved_dataset_are_read_in_ranges(tmp_path, split):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": [f"row {n} " * 100 for n in range(400)]})
    held_out = datasets.Dataset.from_dict({"text": ["held out"] * 3})
    (datasets.DatasetDict(train=rows, test=held_out) if split else rows).save_to_disk(str(tmp_path / "saved"))
    source = open_source(tmp_path / "saved")
    parts = read_in_parts(source)
    assert len(parts) >= 4
    name = "train:" if split else ""
    expected = [(f"{name}{n}", "train" if split else "") for n in range(400)]
    expected += [(f"test:{n}", "validation") for n in range(3)] if split else []
    assert [(record.key, record.split) for part in parts for record in part] == expected
    assert [record.key for record in source.records()] == [key for key, _ in expected]


def test_a_new_class_changes_all_images_since_it_may_change_their_numbers(tmp_path):
    image = pytest.importorskip("PIL.Image").new("RGB", (4, 4))
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(40):
            image.save(tmp_path / name / f"{number}.png")
    before = open_source(tmp_path).parts(TARGET_BYTES)
    (tmp_path / "ant").mkdir()
    image.save(tmp_path / "ant" / "0.png")
    assert len(before) > 1 and not [part for part in open_source(tmp_path).parts(TARGET_BYTES) if part in before]
    labels = {record.key: record.fields["label"] for part in read_in_parts(open_source(tmp_path)) for record in part}
    assert (labels["ant/0.png"], labels["cat/3.png"], labels["dog/3.png"]) == (0, 1, 2)


USER = """
class InParts:
    reads = []

    def parts(self):
        return [{"day": day, "version": 1} for day in ("mon", "tue", "wed")]

    def read(self, part):
        self.reads.append(part["day"])
        return [(f"{part['day']}-{n}", {"text": b"x"}) for n in range(3)]


class Counted:
    passes = 0

    def __iter__(self):
        type(self).passes += 1
        return iter([(f"{n}", {"text": b"text %d" % n}) for n in range(30)])


class Listed(Counted):
    def listing(self):
        return [{"version": 1}]
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_parts.py").write_text(USER)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_users_object_may_have_parts_of_its_own(own):
    source = open_source(Path("own_parts:InParts"))
    assert [[record.key for record in part] for part in read_in_parts(source)][1] == ["tue-0", "tue-1", "tue-2"]
    assert [line["day"] for line in source.listing()] == ["mon", "tue", "wed"]
    assert len(list(source.records())) == 9


@pytest.mark.parametrize(("name", "passes"), [("Listed", 1), ("Counted", 2)])
def test_a_source_is_read_once_and_once_more_where_nothing_else_tells_what_it_holds(own, tmp_path, name, passes):
    import importlib

    from helpers.toy_data import shard_toy

    module = importlib.import_module("own_parts")
    kind = getattr(module, name)
    before = kind.passes
    shard_toy(f"own_parts:{name}", tmp_path / "root")
    assert kind.passes - before == passes
