"""Where raw data comes from: `resolve` turns `data.source` into something that lists and yields records.

    stdlib         the running Python's standard library, one record per module     {"text": bytes}
    digits         scikit-learn's 8 x 8 images of digits                            {"image": uint8, "label": int}
    <folder>       text files (`text_sources.TEXT_SUFFIXES`), one record per file   {"text": bytes}
    <file>.jsonl   JSON lines, or a folder of such files: one record per line       {"text": bytes, …}
    module:attr    a user's function or iterable                                    whatever it gives

Folders and files may be local or anything storage knows (`s3://…`). A folder with a built-in's name is written
`./stdlib`.

Every source streams: memory holds one record and the list of files, never the data.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable

from kftrain import plugins, storage
from kftrain.config import DataConfig
from kftrain.data.digits_source import DigitsSource
from kftrain.data.files import list_files
from kftrain.data.schema import SPLITS, Record, Source
from kftrain.data.text_sources import JsonLinesSource, StdlibSource, TextFolderSource, is_json_lines, is_text
from kftrain.data.user_source import UserSource
from kftrain.errors import ConfigError, DataError

BUILT_IN: dict[str, Callable[[], Source]] = {"stdlib": StdlibSource, "digits": DigitsSource}


def resolve(data: DataConfig) -> Source:
    """The source that `data.source` names. Raises ConfigError for an unknown name, DataError for a missing path."""
    name = data.source
    if name in BUILT_IN:
        return BUILT_IN[name]()
    if plugins.is_plugin(name):
        return UserSource(name)
    if not storage.exists(name):
        raise _missing(name)
    if is_json_lines(name):
        return JsonLinesSource(name, data.text_field)
    return _folder_source(name, data.text_field)


def split_of(record: Record, validation_fraction: float) -> str:
    """The record's own split or, where it has none, one by the sha256 of its key: other records do not move it."""
    if record.split:
        if record.split not in SPLITS:
            raise DataError("a record's split is 'train' or 'validation'", where=record.key, value=record.split)
        return record.split
    digest = hashlib.sha256(record.key.encode("utf-8", "surrogatepass")).digest()
    return "validation" if int.from_bytes(digest[:8], "big") < validation_fraction * 2**64 else "train"


def _folder_source(uri: str, text_field: str) -> Source:
    names = [entry.name for entry in list_files(uri, lambda name: is_text(name) or is_json_lines(name))]
    json_lines = [name for name in names if is_json_lines(name)]
    if json_lines and len(json_lines) < len(names):
        text = next(name for name in names if is_text(name))
        raise DataError(
            f"the folder holds both JSON lines ({json_lines[0]}) and text files ({text})",
            where=uri,
            fix="name the .jsonl file, or a folder with one kind only",
        )
    return JsonLinesSource(uri, text_field) if json_lines else TextFolderSource(uri)


def _missing(name: str) -> ConfigError | DataError:
    if "/" in name or is_json_lines(name):
        return DataError("there is no such file or folder", where="data.source", value=name, fix="check the path")
    near = difflib.get_close_matches(name, BUILT_IN, n=1, cutoff=0.5)
    known = f"known: {', '.join(BUILT_IN)}, a folder, a .jsonl file, module:attr"
    hint = f"did you mean '{near[0]}'?" if near else known
    return ConfigError("no such source", where="data.source", value=name, fix=hint)
