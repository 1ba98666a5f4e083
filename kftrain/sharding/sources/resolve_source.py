"""Resolving `data.source`: the name becomes something that lists and yields records.

    stdlib          the running Python's standard library, one record per module      {"text": bytes}
    digits          scikit-learn's 8 x 8 images of digits                             {"image": uint8, "label": int}
    clicks          three million made-up clicks on 64 million ids                        {"ids": int64, "label": int}
    module:attr     a user's function or iterable                                     whatever it gives
    text files      by suffix (`text_sources.TEXT_SUFFIXES`), one record per file     {"text": bytes}
    *.jsonl         JSON lines, one record per line                                   {"text": bytes, …}
    *.parquet       one record per row: a text, or an image and a label               as JSON lines or images, …
    *.tar           WebDataset shards, one record per sample; shard-{000..012}.tar    by the members' extensions
    images          `<class>/<image>`, or so below `train` and `validation`           {"image": uint8, "label": int, …}
    a saved data set of Hugging Face's `datasets` (`save_to_disk`), one per row       as Parquet

The files of each kind are named one by one or by a folder, which may be local or anything storage knows (`s3://…`). A
folder with a built-in's name is written `./stdlib`.

Every source streams: memory holds a record or a batch of them and the list of files, never the data.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import NamedTuple

from kftrain.core import plugins, storage
from kftrain.core.progress import Progress
from kftrain.data.file_content import is_image
from kftrain.data.schema import SPLITS, Record, Source
from kftrain.data.settings import CONTENT_KEY, DataConfig
from kftrain.errors import ConfigError, DataError
from kftrain.sharding.sources.clicks import ClicksSource
from kftrain.sharding.sources.digits import DigitsSource
from kftrain.sharding.sources.huggingface import HuggingFaceSource, is_saved_dataset
from kftrain.sharding.sources.images import ImageFolderSource
from kftrain.sharding.sources.keyed import HASH_VALUES, hash_name
from kftrain.sharding.sources.listing import is_hidden, list_files, reading_source
from kftrain.sharding.sources.parquet import ParquetSource, is_parquet
from kftrain.sharding.sources.text import JsonLinesSource, StdlibSource, TextFolderSource, is_json_lines, is_text
from kftrain.sharding.sources.user import UserSource
from kftrain.sharding.sources.webdataset import WebDatasetSource, is_shard, is_shard_pattern
from kftrain.sharding.sources.windowed import restrict_to_window

BUILT_IN: dict[str, Callable[[], Source]] = {
    "stdlib": StdlibSource,
    "digits": DigitsSource,
    "clicks": ClicksSource,
}


class FileKind(NamedTuple):
    """A kind of files that a source may consist of."""

    name: str
    matches: Callable[[str], bool]
    open: Callable[[DataConfig], Source]


IMAGES = FileKind("images", is_image, lambda data: ImageFolderSource(data.source))
TEXT = FileKind("text files", is_text, lambda data: TextFolderSource(data.source))

SHARDS = FileKind("WebDataset shards", is_shard, lambda data: WebDatasetSource(data.source, data.text_field))

FILE_KINDS = (
    FileKind("JSON lines", is_json_lines, lambda data: JsonLinesSource(data.source, data.text_field)),
    FileKind("Parquet", is_parquet, lambda data: ParquetSource(data.source, data.text_field)),
    SHARDS,
    IMAGES,
    TEXT,
)

_USERS, _SAVED_DATASET = "a user's own", "a saved data set"

COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".snappy", ".zip")

KNOWN = "text files, .jsonl, .parquet, .tar, images in folders of their class, a saved Hugging Face data set"
"""Kinds of data that a path may lead to, for messages."""


def resolve(data: DataConfig) -> Source:
    """Open the source that `data.source` names.

    Raises ConfigError for an unknown name, DataError for a path where nothing is, or nothing of one known kind.
    """
    return open_kind(source_kind(data), data)


def source_kind(data: DataConfig, progress: Progress = lambda line: None) -> str:
    """Find what kind of source `data.source` names: for `open_kind`, in another process, too. Raises as `resolve` does.

    `progress` is told how many files of no known kind are left out; where they are most, that is a DataError.
    """
    name = data.source
    if name in BUILT_IN:
        return name
    if plugins.is_plugin(name):
        return _USERS
    if not _exists(name):
        if is_shard_pattern(name):
            return SHARDS.name
        raise _make_missing_error(name)
    names = [entry.name for entry in list_files(name, lambda _: True)]
    if is_saved_dataset(names):
        return _SAVED_DATASET
    kind = _find_kind(names, name)
    others = [file for file in names if not (kind.matches(file) or is_hidden(file))]
    unknown = [file for file in others if kind is not TEXT or file.endswith(COMPRESSED)]
    what = f"{len(unknown):,} of {len(names):,} files are left out, which are no {kind.name}: {', '.join(unknown[:3])}"
    if 2 * len(unknown) > len(names):
        raise DataError(what, where=name, fix="unpack or convert them, or move them away")
    if unknown:
        progress(what)
    return kind.name


def with_content_keys(data: DataConfig, kind: str) -> DataConfig:
    """Fill in `data.key` for records that have no name but the number of their line or row."""
    is_numbered = kind in ("JSON lines", "Parquet", _SAVED_DATASET) and not data.key
    return data.model_copy(update={"key": CONTENT_KEY}) if is_numbered else data


def open_kind(kind: str, data: DataConfig, times_uri: str = "") -> Source:
    """Open the source of a kind that `source_kind` has found, or what of it lies in `data.window`.

    `times_uri`: a folder for what is remembered of the times of records; empty: nothing is. Raises ConfigError,
    UserCodeError.
    """
    return restrict_to_window(_open_unwindowed(kind, data), data, times_uri)


def _open_unwindowed(kind: str, data: DataConfig) -> Source:
    if kind in BUILT_IN:
        return BUILT_IN[kind]()
    if kind == _USERS:
        return UserSource(data.source)
    if kind == _SAVED_DATASET:
        return HuggingFaceSource(data.source, data.text_field)
    return {file_kind.name: file_kind for file_kind in FILE_KINDS}[kind].open(data)


def choose_split(record: Record, validation_fraction: float, name: str = "") -> str:
    """Return the record's own split or, where it has none, one by the sha256 of a name: other records do not move it.

    `name`: what must not be torn apart; empty: the record's unit, or its key.
    """
    if record.split:
        if record.split not in SPLITS:
            raise DataError("a record's split is 'train' or 'validation'", where=record.key, value=record.split)
        return record.split
    is_held_out = hash_name(name or record.unit or record.key) < validation_fraction * HASH_VALUES
    return "validation" if is_held_out else "train"


def make_empty_split_error(split: str, data: DataConfig, largest_stratum: int = 0) -> DataError:
    """Describe a source that has nothing for a split. `largest_stratum`: its different records; 0: none was counted."""
    if split == "validation" and largest_stratum == 1:
        what, fix = "every stratum has one record", "name a column in data.stratify whose values come again"
        return DataError(f"no samples for the {split} split: {what}", where=data.source, value=data.stratify, fix=fix)
    fix = f"add data, or {'lower' if split == 'train' else 'raise'} data.validation_fraction"
    return DataError(f"no samples for the {split} split", where=data.source, value=data.validation_fraction, fix=fix)


def _find_kind(names: list[str], where: str) -> FileKind:
    """Find the kind of the files. Pictures beside text illustrate it; any other mixture is refused."""
    seen = dict.fromkeys(FILE_KINDS, [name for name in names if not is_hidden(name)] or names) | {TEXT: names}
    examples = {kind: name for kind, those in seen.items() if (name := next(filter(kind.matches, those), None))}
    if TEXT in examples:
        examples.pop(IMAGES, None)
    if not examples:
        raise DataError("the source has no files of a known kind", where=where, fix=f"known: {KNOWN}")
    if len(examples) > 1:
        (one, first), (other, second), *_ = examples.items()
        raise DataError(
            f"the folder holds both {one.name} ({first}) and {other.name} ({second})",
            where=where,
            fix="name a file, or a folder with one kind only",
        )
    return next(iter(examples))


def require_there(name: str) -> None:
    """Raise ConfigError or DataError for a path of this machine where nothing is, and for what is no path."""
    if storage.is_local(name) and not is_shard_pattern(name) and not _exists(name):
        raise _make_missing_error(name)


def _exists(name: str) -> bool:
    with reading_source(name):
        return storage.exists(name)


def _make_missing_error(name: str) -> ConfigError | DataError:
    if "/" in name or any(kind.matches(name) for kind in FILE_KINDS):
        return DataError("there is no such file or folder", where="data.source", value=name, fix="check the path")
    near = difflib.get_close_matches(name, BUILT_IN, n=1, cutoff=0.5)
    known = f"known: {', '.join(BUILT_IN)}, module:attr, or a path to {KNOWN}"
    hint = f"did you mean '{near[0]}'?" if near else known
    return ConfigError("no such source", where="data.source", value=name, fix=hint)
