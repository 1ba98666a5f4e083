import datetime
import io
import sys
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.fakes.object_store import BUCKET, ObjectStore
from helpers.source_checks import Sharded, reading_memory, records, resolve, texts
from PIL import Image

from kftrain.core.remote import RemotePath
from kftrain.data.schema import Record
from kftrain.errors import ConfigError, DataError
from kftrain.sharding.sources import parquet, tables
from kftrain.sharding.sources.resolve_source import choose_split
from kftrain.tasks.image_classification import ImageClassification
from kftrain.tasks.language_modeling import LanguageModeling

RNG = np.random.default_rng(0)


def png(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def write(path: Path, columns: dict, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, **options)
    return path


# -- text ------------------------------------------------------------------------------------------------------------


def test_each_row_is_a_record_with_all_its_columns(tmp_path: Path) -> None:
    day = datetime.date(2024, 2, 29)
    rows = [{"body": "eins", "n": 1, "tags": ["a", "b"], "day": day}, {"body": "zwei é", "n": None, "tags": []}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert records(tmp_path / "a.parquet", text_field="body") == [
        Record("a.parquet:1", {"body": "eins", "n": 1, "tags": ["a", "b"], "day": day, "text": b"eins"}),
        Record("a.parquet:2", {"body": "zwei é", "n": None, "tags": [], "day": None, "text": "zwei é".encode()}),
    ]


def test_a_folder_is_read_file_by_file_in_the_order_of_names_and_numbers_start_anew(tmp_path: Path) -> None:
    for name in ("b.parquet", "a/c.PARQUET", "a/a.parquet"):
        write(tmp_path / name, {"text": [f"{name} {row}" for row in range(3)]}, row_group_size=2)
    (tmp_path / "notes.csv").write_text("left out")
    found = records(tmp_path)
    names = ("a/a.parquet", "a/c.PARQUET", "b.parquet")
    assert texts(found) == {f"{name}:{row + 1}": f"{name} {row}".encode() for name in names for row in range(3)}
    assert found == records(tmp_path)
    assert [line["name"] for line in resolve(tmp_path).listing()] == list(names)
    assert resolve(tmp_path).listing() == resolve(tmp_path).listing()


def test_rows_keep_their_order_and_numbers_across_batches_and_row_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "MAX_BATCH_ROWS", 7)
    expected = [f"row {row}" for row in range(100)]
    write(tmp_path / "a.parquet", {"text": expected}, row_group_size=30)
    assert texts(records(tmp_path)) == {f"a.parquet:{n}": text.encode() for n, text in enumerate(expected, start=1)}


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]
)
def test_any_kind_of_string_column_is_text(tmp_path: Path, kind: pa.DataType) -> None:
    write(tmp_path / "a.parquet", {"text": pa.array(["eins", "zwei", "eins"]).cast(kind)})
    assert [record.fields["text"] for record in records(tmp_path)] == [b"eins", b"zwei", b"eins"]


@pytest.mark.parametrize(
    ("columns", "what"),
    [
        ({"body": ["x"], "n": [1]}, r"neither a column 'text' .* 'image' and 'label' \(got 'body: string, n: int64'\)"),
        ({"text": [1]}, r"the column 'text' is no text \(got 'int64'\)"),
        ({"image": ["x"], "label": [1]}, "neither a column 'text'"),
        ({"image": [b"x"]}, "neither a column 'text'"),
    ],
)
def test_a_file_without_text_or_labelled_images_is_refused_by_name(tmp_path: Path, columns: dict, what: str) -> None:
    write(tmp_path / "a.parquet", columns)
    with pytest.raises(DataError, match=rf"a\.parquet: {what}.*data\.text_field"):
        records(tmp_path)


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_arrays([pa.array(["x"])] * 2, ["text", "text"]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: two columns have the same name"):
        records(tmp_path)


def test_a_row_without_text_is_refused_by_its_number(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", {"text": ["x"] * 41 + [None] + ["x"]}, row_group_size=10)
    with pytest.raises(DataError, match=r"a\.parquet:42: no text in field 'text' \(got None\)"):
        records(tmp_path)


@pytest.mark.parametrize(
    ("column", "what"),
    [
        (pa.array([b"x"] * 30 + [b"\xff"] + [b"x"] * 9).view(pa.string()), "codec can't decode"),
        (pa.array([0] * 30 + [2**62] + [0] * 9, pa.timestamp("us")), "a value cannot be read"),
    ],
)
def test_a_value_that_python_cannot_hold_is_refused_by_file_and_row(
    tmp_path: Path, column: pa.Array, what: str
) -> None:
    write(tmp_path / "a.parquet", {"text": ["x"] * 40, "other": column})
    with pytest.raises(DataError, match=rf"a\.parquet:31: .*{what}"):
        records(tmp_path)


def test_a_truncated_file_is_refused_by_name_wherever_it_ends(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"text": ["some text"] * 100})
    whole = path.read_bytes()
    for length in (0, 3, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"a\.parquet: cannot be read as Parquet: .*write it again"):
            records(tmp_path)


def test_damage_within_a_row_group_is_refused_with_the_row_up_to_which_it_was_read(tmp_path: Path) -> None:
    content = [RNG.bytes(50).hex() for _ in range(3000)]
    plain = {"row_group_size": 1000, "use_dictionary": False, "compression": "none"}
    path = write(tmp_path / "a.parquet", {"text": content}, write_page_checksum=True, **plain)
    damaged = bytearray(path.read_bytes())
    damaged[damaged.index(content[2500].encode())] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(DataError, match=r"a\.parquet:1025: cannot be read as Parquet: .*checksum"):
        records(tmp_path)


def test_pyarrow_that_is_missing_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.parquet", {"text": ["x"]})
    source = resolve(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"needs pyarrow .*pip install 'kftrain\[sources\]'"):
        list(source.records())


# -- images ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["struct", "binary", "large_binary"])
def test_an_image_column_is_decoded_where_there_is_no_text(tmp_path: Path, form: str) -> None:
    images = [RNG.integers(0, 256, (4 + n, 5, 3), dtype=np.uint8) for n in range(3)]
    column = (
        pa.array([{"bytes": png(image), "path": "x.png"} for image in images])
        if form == "struct"
        else pa.array([png(image) for image in images], getattr(pa, form)())
    )
    write(tmp_path / "a.parquet", {"image": column, "label": [2, 0, 1], "source": ["a", "b", "c"]})
    found = records(tmp_path)
    assert all(np.array_equal(record.fields["image"], image) for record, image in zip(found, images, strict=True))
    assert [(record.key, record.fields["label"], record.fields["source"]) for record in found] == [
        ("a.parquet:1", 2, "a"),
        ("a.parquet:2", 0, "b"),
        ("a.parquet:3", 1, "c"),
    ]


@pytest.mark.parametrize(
    ("image", "what"),
    [
        ({"bytes": None, "path": "elsewhere.png"}, "the row holds no image .*elsewhere.png.*embed"),
        (None, "the row holds no image"),
        ({"bytes": b"no image", "path": ""}, "the image cannot be decoded"),
    ],
)
def test_a_row_without_a_good_image_is_refused_by_its_number(tmp_path: Path, image: object, what: str) -> None:
    good = {"bytes": png(np.zeros((2, 2, 3), np.uint8)), "path": ""}
    write(tmp_path / "a.parquet", {"image": pa.array([good, image]), "label": [0, 1]})
    with pytest.raises(DataError, match=rf"a\.parquet:2: {what}"):
        records(tmp_path)


# -- sharding, stores, memory ----------------------------------------------------------------------------------------


def test_sharding_for_language_modeling_holds_the_texts(tmp_path: Path) -> None:
    written = {f"document {n}": f"document {n}".encode() for n in range(1, 61)}
    write(tmp_path / "in/a.parquet", {"text": [text.decode() for text in written.values()]}, row_group_size=7)
    sharded = Sharded(tmp_path / "in", tmp_path / "root", LanguageModeling(sequence_length=32), key="text")
    held_out = {key: text for key, text in written.items() if choose_split(Record(key, {}), 0.2) == "validation"}
    assert sharded.documents() == held_out and sharded.reused


def test_sharding_for_image_classification_holds_the_images(tmp_path: Path) -> None:
    images = [RNG.integers(0, 256, (8, 8, 3), dtype=np.uint8) for _ in range(30)]
    write(tmp_path / "in/a.parquet", {"image": [png(image) for image in images], "label": [n % 3 for n in range(30)]})
    sharded = Sharded(
        tmp_path / "in", tmp_path / "root", ImageClassification(image_size=8, num_channels=3, num_classes=3)
    )
    found = [*sharded.images("train").values(), *sharded.images("validation").values()]
    assert len(found) == 30
    assert {pixels.tobytes(): label for pixels, label in found} == {
        image.tobytes(): number % 3 for number, image in enumerate(images)
    }


def test_a_folder_in_memory_is_read_like_a_local_one(tmp_path: Path) -> None:
    write(tmp_path / "sub/a.parquet", {"text": ["eins", "zwei"]})
    store = fsspec.filesystem("memory")
    store.pipe_file("/tables/sub/a.parquet", (tmp_path / "sub/a.parquet").read_bytes())
    assert records("memory://tables") == records(tmp_path)
    assert records("memory://tables/sub/a.parquet") == records(tmp_path / "sub/a.parquet")
    store.rm("/tables", recursive=True)


@pytest.mark.slow
def test_a_folder_in_an_object_store_is_read_in_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns lie apart: what is fetched is the file once, not a window of read-ahead for every piece."""
    content = [[RNG.bytes(2000).hex() for _ in range(1000)] for _ in range(3)]
    path = write(tmp_path / "a.parquet", dict(zip(("text", "b", "c"), content, strict=True)), use_dictionary=False)
    running = ObjectStore()
    running.start()
    for name, value in running.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(parquet, "READ_BYTES", 3 << 20)
    try:
        fsspec.filesystem("s3", skip_instance_cache=True).put_file(str(path), f"{BUCKET}/tables/a.parquet")
        fetched, fetch = [], RemotePath.read_range

        def counting(self: RemotePath, start: int, stop: int, least: int | None = None) -> bytes:
            fetched.append(stop - start)
            return fetch(self, start, stop, least)

        monkeypatch.setattr(RemotePath, "read_range", counting)
        assert records(f"s3://{BUCKET}/tables") == records(tmp_path)
        assert len(fetched) > 6 and sum(fetched) < 1.1 * path.stat().st_size
    finally:
        running.stop()


@pytest.mark.slow
@pytest.mark.parametrize("rows_per_group", [2000, 200_000])
def test_memory_does_not_grow_with_the_file_not_even_with_its_row_groups(tmp_path: Path, rows_per_group: int) -> None:
    num_rows, row_bytes = 200_000, 500
    path = tmp_path / "a.parquet"
    with pq.ParquetWriter(path, pa.schema([("text", pa.string())]), use_dictionary=False) as writer:
        noise = RNG.bytes(num_rows * row_bytes // 2).hex()
        starts = range(0, len(noise), row_bytes)
        writer.write_table(pa.table({"text": [noise[n : n + row_bytes] for n in starts]}), rows_per_group)
    assert pq.read_metadata(path).num_row_groups == num_rows // rows_per_group
    count, growth = reading_memory(path, "pyarrow.parquet")
    assert count == num_rows and growth < 60e6
    assert reading_memory(path, "pyarrow.parquet", keep=True)[1] > num_rows * row_bytes
