import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import fsspec
import numpy as np
import pytest
from helpers.source_checks import records, resolve
from helpers.toy_data import text_folder

from kftrain.data.schema import Record
from kftrain.errors import ConfigError, DataError, UserCodeError
from kftrain.sharding.sources import resolve_source
from kftrain.sharding.sources.listing import list_files
from kftrain.sharding.sources.text import StdlibSource


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes a module of a user's and gives its name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(code: str) -> str:
        name = f"user_source_{len(list(tmp_path.glob('user_source_*')))}_{os.getpid()}"
        (tmp_path / f"{name}.py").write_text(code)
        sys.modules.pop(name, None)
        return name

    return write


# -- stdlib ----------------------------------------------------------------------------------------------------------


def test_the_standard_library_is_its_modules_without_tests_and_installed_packages() -> None:
    found = {record.key: record.fields["text"] for record in records("stdlib")}
    assert found["json/decoder"] == Path(json.decoder.__file__).read_bytes()
    assert list(found) == sorted(found)
    assert not [key for key in found if "site-packages" in key or "tests/" in key or "_sysconfigdata" in key]
    assert len(found) > 300


def test_stdlib_leaves_out_test_folders_at_any_depth(tmp_path: Path) -> None:
    for name in ("a.py", "b/c.py", "b/test/d.py", "b/idle_test/e.py", "tests/f.py", "_sysconfigdata_x.py", "g.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("pass")
    assert [record.key for record in StdlibSource(str(tmp_path)).records()] == ["a", "b/c"]


# -- folders of text -------------------------------------------------------------------------------------------------


def test_a_folder_gives_its_text_files_by_path_and_leaves_out_hidden_and_other_files(tmp_path: Path) -> None:
    for name in ("b.md", "sub/a.TXT", "sub/x.bin", ".git/c.txt", "sub/.d.txt", "plain"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    assert records(tmp_path) == [Record("b.md", {"text": b"b.md"}), Record("sub/a.TXT", {"text": b"sub/a.TXT"})]


def test_a_listing_changes_with_content_length_and_time(tmp_path: Path) -> None:
    text_folder(tmp_path, 3)
    before = resolve(tmp_path).listing()
    assert resolve(tmp_path).listing() == before
    os.utime(tmp_path / "doc-000.txt", ns=(1, 1))
    assert resolve(tmp_path).listing() != before


def test_text_that_is_not_utf8_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=r"latin\.txt: not UTF-8 text: .* at byte 3"):
        records(tmp_path)


def test_a_folder_or_a_file_of_no_known_kind_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    for name in ("table.csv", "shard.tar.gz"):
        (tmp_path / name).write_bytes(b"x")
        for path in (tmp_path, tmp_path / name):
            with pytest.raises(DataError, match=r"no files of a known kind; known: text files, \.jsonl, \.parquet, .*"):
                resolve(path)


def test_text_that_is_gone_when_it_is_listed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    source = resolve(tmp_path)
    (tmp_path / "a.txt").unlink()
    with pytest.raises(DataError, match="the source has no text files"):
        source.listing()


def test_a_missing_path_is_a_data_error_and_a_misspelled_name_a_config_error_with_the_nearest() -> None:
    for name in ("nowhere/at/all", "gone.parquet", "gone.tar", "gone.jsonl"):
        with pytest.raises(DataError, match=rf"no such file or folder .*{name}"):
            resolve(name)
    with pytest.raises(ConfigError, match="did you mean 'stdlib'"):
        resolve("stdlb")
    with pytest.raises(ConfigError, match="known: stdlib, digits, clicks, module:attr, or a path to text files"):
        resolve("zzzz")


def test_links_to_folders_are_followed_and_those_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "data" / "here").mkdir(parents=True)
    (tmp_path / "elsewhere" / "deeper").mkdir(parents=True)
    (tmp_path / "elsewhere" / "deeper" / "a.txt").write_text("a")
    for name in ("one", "two"):  # the same folder twice is no circle
        (tmp_path / "data" / name).symlink_to(tmp_path / "elsewhere")
    names = [file.name for file in list_files(str(tmp_path / "data"), lambda name: True)]
    assert names == ["one/deeper/a.txt", "two/deeper/a.txt"]
    (tmp_path / "data" / "here" / "round").symlink_to(tmp_path / "data")
    with pytest.raises(DataError, match=r"here/round: the link leads to a folder that it lies in"):
        list_files(str(tmp_path / "data"), lambda name: True)


def test_a_dangling_link_is_refused_by_name(tmp_path: Path) -> None:
    for name in ("nothing", "gone.txt"):
        (tmp_path / "gone.txt").unlink(missing_ok=True)
        (tmp_path / "gone.txt").symlink_to(tmp_path / name)
        with pytest.raises(DataError, match=r"gone\.txt: the link leads nowhere"):
            resolve(tmp_path)


def test_a_path_that_the_system_refuses_is_a_data_error() -> None:
    with pytest.raises(DataError, match=r"cannot be read: .*too long"):
        resolve("/tmp/" + "a" * 300)


def test_an_unreadable_file_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret.txt").write_text("x")
    source = resolve(tmp_path)
    monkeypatch.setattr(
        "kftrain.core.storage.read_bytes", lambda uri: (_ for _ in ()).throw(PermissionError(13, "denied", uri))
    )
    with pytest.raises(DataError, match=r"secret\.txt: cannot be read: .*denied"):
        list(source.records())


def test_a_folder_in_an_object_store_is_read_like_a_local_one(tmp_path: Path) -> None:
    store = fsspec.filesystem("memory")
    for name in ("b.txt", "sub/a.txt", "sub/x.bin", ".h/c.txt"):
        store.pipe_file(f"/texts/{name}", name.encode())
    assert [r.key for r in records("memory://texts")] == ["b.txt", "sub/a.txt"]
    assert [line["size_bytes"] for line in resolve("memory://texts").listing()] == [5, 9]
    store.rm("/texts", recursive=True)


# -- JSON lines ------------------------------------------------------------------------------------------------------


def test_json_lines_give_one_record_per_line_with_all_its_fields(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "eins"}\n\n{"body": "zwei \\u00e9", "label": 3}')
    assert records(tmp_path / "a.jsonl", text_field="body") == [
        Record("a.jsonl:1", {"body": "eins", "text": b"eins"}),
        Record("a.jsonl:3", {"body": "zwei é", "label": 3, "text": "zwei é".encode()}),
    ]


def test_a_folder_of_json_lines_is_read_file_by_file(tmp_path: Path) -> None:
    for name in ("b.jsonl", "c/a.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "x"}\n{"text": "y"}\n')
    (tmp_path / "notes.csv").write_text("left out")
    assert [r.key for r in records(tmp_path)] == ["b.jsonl:1", "b.jsonl:2", "c/a.jsonl:1", "c/a.jsonl:2"]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("3", "no text in field 'text' .*int"),
        ('{"txt": "x"}', r"no text in field 'text' .*\['txt'\].*data.text_field"),
        ('{"text": 3}', "no text in field 'text'"),
        (r'{"text": "\ud800"}', "not Unicode text"),
    ],
)
def test_a_bad_line_is_refused_by_file_and_number(tmp_path: Path, line: str, what: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(DataError, match=r"a\.jsonl:2: " + what):
        records(tmp_path / "a.jsonl")


def test_a_line_that_is_not_utf8_is_refused_by_file_and_number(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "caf\xe9"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:1: not JSON"):
        records(tmp_path / "a.jsonl")


# -- kinds -----------------------------------------------------------------------------------------------------------

KINDS = {
    "a.jsonl": "JSON lines",
    "b.parquet": "Parquet",
    "c.tar": "WebDataset shards",
    "d/e.png": "images",
    "f.md": "text files",
}


@pytest.mark.parametrize(("one", "other"), itertools.combinations(KINDS, 2))
def test_a_folder_with_two_kinds_is_refused_except_for_pictures_beside_text(
    tmp_path: Path, one: str, other: str
) -> None:
    for name in (one, other):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    if (one, other) == ("d/e.png", "f.md"):
        assert [record.key for record in records(tmp_path)] == ["f.md"]
        return
    message = rf"holds both {KINDS[one]} \({one}\) and {KINDS[other]} \({other}\); name a file, or a folder with one"
    with pytest.raises(DataError, match=message):
        resolve(tmp_path)


@pytest.mark.parametrize("name", KINDS)
def test_resolving_imports_none_of_the_libraries_that_reading_needs(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("x")
    script = (
        "import sys\n"
        "from kftrain.data.settings import DataConfig\n"
        "from kftrain.sharding import shard_dataset\n"
        "from kftrain.sharding.sources import resolve_source\n"
        "resolve_source.resolve(DataConfig(source=sys.argv[1])).listing()\n"
        "print(sorted({'pyarrow', 'PIL', 'datasets', 'torch'} & sys.modules.keys()))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"


# -- digits ----------------------------------------------------------------------------------------------------------


def test_digits_are_the_images_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    found, expected = records("digits"), load_digits()
    assert len(found) == 1797 and found[42].key == "digit-00042"
    assert found[0].fields["image"].dtype == np.uint8
    assert np.array_equal(np.stack([r.fields["image"] for r in found]), expected.images)
    assert [r.fields["label"] for r in found] == expected.target.tolist()
    assert resolve("digits").listing() == resolve("digits").listing()


def test_digits_without_scikit_learn_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from kftrain.sharding.sources import digits

    digits._load.cache_clear()
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ConfigError, match=r"pip install 'kftrain\[train\]'"):
        resolve("digits").listing()


# -- a user's own ----------------------------------------------------------------------------------------------------


def test_a_users_function_list_or_class_gives_records_or_pairs(user_module) -> None:
    name = user_module(
        "from kftrain.data.schema import Record\n"
        "def function():\n    yield 'a', {'text': b'1'}\n    yield Record('b', {'text': b'2'}, split='validation')\n"
        "pairs = [('a', {'text': b'1'})]\n"
        "class Items:\n    def __iter__(self):\n        return iter(pairs)\n"
    )
    expected = [Record("a", {"text": b"1"}), Record("b", {"text": b"2"}, "validation")]
    assert records(f"{name}:function") == expected
    assert records(f"{name}:pairs") == records(f"{name}:Items") == expected[:1]


def test_a_users_own_listing_is_used_and_content_is_hashed_without_one(user_module) -> None:
    name = user_module(
        "import numpy as np\n"
        "value = 1\n"
        "def plain():\n    yield 'a', {'x': np.arange(3), 'y': [value, None, 'text', {'z': 1.5}]}\n"
        "class Listed:\n"
        "    def __iter__(self):\n        raise RuntimeError('must not be read')\n"
        "    def listing(self):\n        return [{'version': 7}]\n"
    )
    assert resolve(f"{name}:Listed").listing() == [{"version": 7}]
    before = resolve(f"{name}:plain").listing()
    assert resolve(f"{name}:plain").listing() == before
    sys.modules[name].value = 2
    assert resolve(f"{name}:plain").listing() != before


@pytest.mark.parametrize(
    ("code", "error", "what"),
    [
        ("def f():\n    yield 'a', {}\n    raise KeyError('boom')", UserCodeError, r"KeyError: 'boom' \(.*:3\)"),
        ("def f():\n    return 3", UserCodeError, "TypeError"),
        ("f = iter([('a', {})])", ConfigError, "an iterator can be read only once"),
        ("f = 3", ConfigError, "neither a function nor an iterable but int"),
        ("f = [3]", DataError, "not a Record or a pair"),
        ("f = [('', {})]", DataError, "a key of text"),
        ("f = [('a', 3)]", DataError, "a dict of fields"),
        ("f = [('a', {}), ('b', {}), ('a', {})]", DataError, "a key comes twice .*'a'"),
        ("f = [('a', {'x': object()})]", DataError, r"'a' holds a object, which has no digest.*listing\(\)"),
    ],
)
def test_a_users_mistakes_are_named(user_module, code: str, error: type[Exception], what: str) -> None:
    name = user_module(code)
    with pytest.raises(error, match=what):
        resolve(f"{name}:f").listing()


def test_a_users_module_that_does_not_exist_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="no module named nowhere_to_be_found"):
        resolve("nowhere_to_be_found:f")


# -- splits ----------------------------------------------------------------------------------------------------------


def test_the_split_follows_the_key_alone_and_roughly_the_fraction() -> None:
    splits = [resolve_source.choose_split(Record(f"key-{n}", {}), 0.2) for n in range(2000)]
    assert 330 < splits.count("validation") < 470
    assert splits == [resolve_source.choose_split(Record(f"key-{n}", {"text": b"other"}), 0.2) for n in range(2000)]


def test_a_larger_fraction_only_adds_to_validation() -> None:
    keys = [f"key-{n}" for n in range(500)]
    held_out = [{k for k in keys if resolve_source.choose_split(Record(k, {}), f) == "validation"} for f in (0.1, 0.3)]
    assert held_out[0] < held_out[1]


def test_a_records_own_split_wins_and_an_unknown_one_is_refused() -> None:
    assert {resolve_source.choose_split(Record(f"{n}", {}, "validation"), 0.01) for n in range(50)} == {"validation"}
    with pytest.raises(DataError, match=r"'train' or 'validation'.*test"):
        resolve_source.choose_split(Record("a", {}, "test"), 0.1)
