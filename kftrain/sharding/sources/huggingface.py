"""Data sets that Hugging Face's `datasets` wrote with `save_to_disk`; mapped into memory, never loaded into it."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from kftrain.core import storage
from kftrain.data.file_content import choose_held_out_name, load_library, parse_json
from kftrain.data.schema import Record, Source, SourcePart
from kftrain.errors import DataError
from kftrain.sharding.sources.listing import SourceFile, digest_listing, list_files, reading_source
from kftrain.sharding.sources.tables import count_batch_rows, find_columns, iterate_rows

SPLITS_NAME = "dataset_dict.json"
"""File that makes a folder a `DatasetDict`."""

DATASET_NAMES = frozenset({"state.json", "dataset_info.json"})
"""Files that make a folder a `Dataset`."""

_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)
"""Exceptions that `datasets` raises for files that are missing, damaged or of a later version."""


class HuggingFaceSource(Source):
    """A saved `Dataset` or `DatasetDict`: one record per row, key = `<row>` or `<split>:<row>`, from 0 on.

    Of a `DatasetDict`, `train` is trained on and `validation` is our validation split or, if there is none,
    `val` or `test`; what is left over (`test` beside `validation`) is left out. With `train` alone, as for a
    `Dataset`, a hash of the key decides.

    Nothing is asked of the hub. What lies in an object store is copied to a temporary folder by `datasets`.
    Raises ConfigError where `datasets` is not installed.
    """

    def __init__(self, uri: str, text_field: str) -> None:
        self._uri = uri
        self._text_field = text_field

    def listing(self) -> list[dict[str, Any]]:
        """List names, sizes and times or versions of the files of all splits that are used. Raises DataError."""
        return [
            replace(entry, name=f"{split.name}/{entry.name}" if split.name else entry.name).to_dict()
            for split in self._splits.values()
            for entry in _list_files(split.uri)
        ]

    def parts(self, target_bytes: int) -> list[SourcePart]:
        """Cut the rows into ranges: whoever adds rows saves all files again. Raises DataError."""
        parts = []
        for name, dataset in self._datasets.items():
            files, state = digest_listing([entry.to_dict() for entry in _list_files(self._splits[name].uri)])
            num_rows, num_bytes = max(1, len(dataset)), max(1, dataset.data.nbytes)
            step = max(1, target_bytes * num_rows // num_bytes)
            for start in range(0, num_rows, step):
                stop = min(num_rows, start + step)
                piece = {"split": name, "start": start, "stop": stop, "files": files}
                parts.append(SourcePart((piece,), size_bytes=(stop - start) * num_bytes // num_rows, state=state))
        return parts

    def read(self, part: SourcePart) -> Iterator[Record]:
        """Yield all columns of each row, with `text` as UTF-8 bytes, or `image` as pixels and `label`.

        Raises DataError naming the folder and the row.
        """
        (piece,) = part.pieces
        split, dataset = self._splits[piece["split"]], self._datasets[piece["split"]]
        columns = find_columns(dataset.data.schema, self._text_field, split.uri)
        for number, row in _iterate_rows(dataset, piece["start"], piece["stop"], split.uri):
            key = f"{split.name}:{number}" if split.name else f"{number}"
            yield columns.make_record(key, row, split.split, f"{split.uri}:{number}")

    @functools.cached_property
    def _splits(self) -> dict[str, _Split]:
        """The splits by the name that the data set gives them; '' for a `Dataset`."""
        uri = storage.join(self._uri, SPLITS_NAME)
        if not storage.exists(uri):
            return {"": _Split(self._uri, "", "")}
        with reading_source(uri):
            document = parse_json(storage.read_bytes(uri), uri)
        names = document.get("splits") if isinstance(document, dict) else None
        if not isinstance(names, list) or "train" not in names:
            raise DataError("the saved data set has no split 'train'", where=uri, value=names, fix="rename one")
        held_out = choose_held_out_name(names)
        if held_out is None:
            return {"train": _Split(storage.join(self._uri, "train"), "train", "")}
        splits = {"train": "train", held_out: "validation"}
        return {name: _Split(storage.join(self._uri, name), name, split) for name, split in splits.items()}

    @functools.cached_property
    def _datasets(self) -> dict[str, Any]:
        """The opened data sets by split: opened once, as the library copies a remote one each time."""
        return {name: _load_dataset(split.uri) for name, split in self._splits.items()}


class _Split(NamedTuple):
    uri: str
    name: str
    """Name of the split in the data set; '' for a `Dataset`."""
    split: str


def is_saved_dataset(names: Collection[str]) -> bool:
    """Tell whether a folder with these files is what `save_to_disk` writes."""
    return SPLITS_NAME in names or DATASET_NAMES.issubset(names)


def _list_files(uri: str) -> list[SourceFile]:
    """List the files of a `Dataset` without those that `datasets` puts beside them while it works."""
    return list_files(uri, lambda name: not name.rsplit("/", 1)[-1].startswith(("cache-", "tmp")))


def _load_dataset(uri: str) -> Any:
    datasets = load_library("datasets")
    try:
        return datasets.load_from_disk(uri, keep_in_memory=False)
    except (*_UNREADABLE, load_library("pyarrow").ArrowException) as error:
        raise DataError(f"cannot be read as a saved data set: {error}", where=uri, fix="save it again") from error


def _iterate_rows(dataset: Any, start: int, stop: int, where: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number and values of the rows start … stop - 1.

    What is damaged is found before a value is taken from it.
    """
    arrow, first = load_library("pyarrow"), start
    size = count_batch_rows(dataset.data.nbytes, len(dataset))
    chosen = dataset if (start, stop) == (0, len(dataset)) else dataset.select(range(start, stop))
    for batch in chosen.with_format("arrow").iter(size):
        try:
            batch.validate(full=True)
        except arrow.ArrowInvalid as error:
            raise DataError(f"the rows are damaged: {error}", where=f"{where}:{first}", fix="save it again") from error
        yield from iterate_rows(batch, first, lambda number: f"{where}:{number}")
        first += batch.num_rows
