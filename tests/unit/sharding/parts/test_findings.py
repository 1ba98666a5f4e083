"""Copies, empty and oversized records are found and named; what must be refused is refused."""

from pathlib import Path

import numpy as np
import pytest
from helpers.models.toy_task import ToyTask
from helpers.splits import open_split
from helpers.toy_data import shard_toy, toy_config
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain.data.schema import Record
from kftrain.errors import DataError
from kftrain.sharding.parts.content import SHORT_BYTES, hash_bytes, hash_content, select_content
from kftrain.sharding.shard_dataset import shard_dataset

FIRST_TEN = 10


def write(folder: Path, texts: dict[str, str]) -> Path:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def splits_of(result) -> dict[str, str]:

    return {
        key: split for split in ("train", "validation") for key in open_split(result.manifest_uri, split).group_keys()
    }


@pytest.mark.parametrize("part_size_bytes", [1 << 16, 1 << 30])
def test_what_is_found_is_what_a_comparison_of_all_with_all_finds(tmp_path, part_size_bytes):
    drawn = np.random.default_rng(5)
    texts = {f"{n:03d}.txt": f"text {drawn.integers(0, 90)} " * 40 for n in range(150)}
    texts |= {f"long-{n}.txt": f"{drawn.integers(0, 3)}" * 9000 for n in range(8)}
    lines: list[str] = []
    config = toy_config(write(tmp_path / "texts", texts), tmp_path / "root", part_size_bytes=part_size_bytes)
    result = shard_dataset(config, ToyTask(), lines.append)
    split = splits_of(result)
    keys = sorted(texts)
    first = {name: {} for name in ("train", "validation")}
    for key in reversed(keys):
        first[split[key]][texts[key]] = key
    both = [key for key in keys if split[key] == "validation" and texts[key] in first["train"]]
    again = [
        key for name in ("train", "validation") for key in keys if split[key] == name and first[name][texts[key]] != key
    ]
    found = result.manifest.findings
    assert both and found["content in both splits"] == {
        "count": len(both),
        "first": [f"{key} = {first['train'][texts[key]]}" for key in both[:FIRST_TEN]],
    }
    assert len(again) > FIRST_TEN and found["content again in its split"] == {
        "count": len(again),
        "first": [f"{key} = {first[split[key]][texts[key]]}" for key in again[:FIRST_TEN]],
    }
    assert set(found) == {"content in both splits", "content again in its split"}
    assert any(line.startswith(f"found {len(both):,} x content in both splits: ") for line in lines)


def test_empty_and_oversized_records_are_counted_and_the_first_ten_are_named(tmp_path):
    texts = {f"{n:03d}.txt": f"text {n}" for n in range(40)} | {f"e{n:02d}.txt": "" for n in range(13)}
    texts["huge.txt"] = "x" * ((1 << 16) + 1)
    texts["just.txt"] = "y" * (1 << 16)
    found = shard_toy(write(tmp_path / "texts", texts), tmp_path / "root").manifest.findings
    assert found == {
        "empty": {"count": 13, "first": [f"e{n:02d}.txt" for n in range(10)]},
        "larger than a shard": {"count": 1, "first": ["huge.txt"]},
    }


def test_nothing_is_found_in_data_that_is_sound(tmp_path):
    texts = {f"{n:03d}.txt": f"text {n}" for n in range(40)}
    assert shard_toy(write(tmp_path / "texts", texts), tmp_path / "root").manifest.findings == {}


OWN = """
from kftrain.data.schema import Record

class Both:
    def parts(self):
        return [{"n": 0}, {"n": 1}]

    def read(self, part):
        split = ("train", "validation")[part["n"]]
        return [Record(f"key {n}", {"text": b"%d %d" % (n, part["n"])}, split) for n in range(12)]

class Twice(Both):
    def read(self, part):
        held_out = [Record(f"held out {part['n']}", {"text": b"x"}, "validation")]
        return held_out + [Record(f"key {n}", {"text": b"%d %d" % (n, part["n"])}, "train") for n in range(12)]

class Unlike(Both):
    def read(self, part):
        return [Record(f"{part['n']} {n}", {"text": b"x", "lazy": (n for n in ())}, "validation") for n in range(2)]
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_findings.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_key_in_both_splits_is_found(tmp_path, own):
    found = shard_toy("own_findings:Both", tmp_path / "root").manifest.findings
    assert found == {"key in both splits": {"count": 12, "first": [f"key {n}" for n in range(10)]}}


def test_a_key_twice_in_one_split_is_refused_wherever_its_records_are(tmp_path, own):
    with pytest.raises(DataError, match=r"a key comes twice in one split \(got 'key 0'\)"):
        shard_toy("own_findings:Twice", tmp_path / "root")


def test_a_record_that_cannot_wait_for_its_split_is_named(tmp_path, own):
    with pytest.raises(DataError, match=r"0 0: the record cannot be kept until its split is encoded"):
        shard_toy("own_findings:Unlike", tmp_path / "root")


@settings(max_examples=300, deadline=None)
@given(st.integers(SHORT_BYTES - 2, 80_000), st.data())
def test_contents_that_differ_in_one_bit_or_in_length_have_other_hashes(size, data):
    content = bytearray(np.random.default_rng(size).bytes(size))
    hashed = hash_bytes(bytes(content))
    assert hash_bytes(bytes(content)) == hashed != hash_bytes(bytes(content[:-1]))
    place = data.draw(st.integers(0, size - 1))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    assert hash_bytes(bytes(content)) != hashed


def test_hashes_of_numbers_that_differ_in_few_bits_only_are_all_different():
    rows = np.zeros((20_000, 700), np.float64)
    rows[np.arange(20_000), np.arange(20_000) % 700] = 1 + np.arange(20_000) // 700
    assert len({hash_bytes(row.tobytes()) for row in rows}) == 20_000
    columns = rows.astype(">f8")
    assert len({hash_bytes(row.tobytes()) for row in columns}) == 20_000


def test_content_is_what_the_task_names_and_objects_are_compared_with_nothing():
    record = Record("k", {"text": "ä", "id": 3})
    assert select_content(record, ("text",)) == {"text": "ä"} and select_content(record, ("other",)) == record.fields
    assert hash_content({"text": ""}) == (0, 0) and hash_content({"x": object()}) == (0, 8)
    grey, colour = (hash_content({"image": np.zeros(shape, np.uint8)})[0] for shape in ((4, 4), (2, 8)))
    assert grey != colour
    assert hash_content({"a": b"x", "b": b"y"})[0] != hash_content({"a": b"y", "b": b"x"})[0]
