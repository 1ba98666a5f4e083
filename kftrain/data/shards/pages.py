"""Pages: a file beside a manifest of many shards, of which a reader needs the pages of the shards that it opens.

    <folder of the manifest>/pages-<digest>.bin     JSON: field -> its value for each of 128 shards

The manifest itself holds the numbers of each shard and the digest of each page, so that nothing is used that was not
compared. The processes of a node fetch a page once.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field, ValidationError, model_validator

from kftrain.core import storage
from kftrain.data.schema import SPLITS
from kftrain.data.shards.cache import NodeCache
from kftrain.data.shards.reading import ADOPT_AGAIN, SHARD_AGAIN, reading
from kftrain.errors import DataError
from kftrain.run.documents import Document

PAGE_SHARDS = 128
"""Shards of a page: it is as large as a request is worth."""

KEPT_PAGES = 64
"""Pages that a process keeps as they were read last."""

DIGEST = r"^[0-9a-f]{64}$"

COLUMNS = ("bytes", "num_blocks", "num_samples")
"""Fields of a shard that the manifest itself holds."""

MAX_COUNT = (1 << 53) - 1
"""Most bytes and samples of a shard: what every reader of JSON holds exactly."""


class PagesEntry(Document):
    """Entry of a manifest for its pages."""

    num_shards: dict[str, Annotated[int, Field(ge=1)]]
    """Number of shards of each split, in their order there."""
    columns: dict[str, list[Annotated[int, Field(ge=0, le=MAX_COUNT)]]]
    page_shards: int = Field(ge=1)
    pages: list[tuple[Annotated[int, Field(ge=1, le=1 << 24)], Annotated[str, Field(pattern=DIGEST)]]]
    """Bytes and sha256 of each page."""
    adopted_folders: list[str]
    """Folders of adopted shards: a page may name no other."""

    @model_validator(mode="after")
    def _check_lengths(self) -> PagesEntry:
        count = sum(self.num_shards.values())
        lengths = {len(self.columns.get(name, ())) for name in COLUMNS}
        if lengths != {count} or len(self.pages) != -(-count // self.page_shards):
            raise ValueError(f"the pages are not those of {count} shards")
        return self


def publish_pages(manifest_uri: str, splits: Mapping[str, Any], adopted_folders: Iterable[str]) -> PagesEntry:
    """Write the pages of the shards of splits, given as plain data, beside a manifest; return its entry for them."""
    rows = [row for split in SPLITS for row in splits[split]["shards"]]
    contents = [_encode_page(rows[start : start + PAGE_SHARDS]) for start in range(0, len(rows), PAGE_SHARDS)]
    pages = [(len(content), storage.sha256_bytes(content)) for content in contents]
    storage.publish(_build_uri(manifest_uri, pages), b"".join(contents))
    return PagesEntry(
        num_shards={split: len(splits[split]["shards"]) for split in SPLITS},
        columns={name: [row[name] for row in rows] for name in COLUMNS},
        page_shards=PAGE_SHARDS,
        pages=pages,
        adopted_folders=sorted(adopted_folders),
    )


def _encode_page(rows: Sequence[Mapping[str, Any]]) -> bytes:
    names = [name for name in rows[0] if name not in COLUMNS and any(row[name] for row in rows)]
    return json.dumps({name: [row[name] for row in rows] for name in names}, sort_keys=True).encode()


def _build_uri(manifest_uri: str, pages: Sequence[tuple[int, str]]) -> str:
    return storage.join(manifest_uri.rsplit("/", 1)[0], f"pages-{storage.digest_json(pages)}.bin")


class PagedShards(Sequence[Any]):
    """Some shards of a dataset; each is read when it is asked for. All methods may be called from any thread."""

    def __init__(
        self, manifest_uri: str, entry: PagesEntry, cache: NodeCache | None, make_shard: Callable[[dict[str, Any]], Any]
    ) -> None:
        """Hold all of them.

        `cache`: keeps pages for the processes of this node; None: each reads by itself. `make_shard`: makes one of all
        that is said of it.
        """
        self.entry = entry
        self.uri = _build_uri(manifest_uri, entry.pages)
        self.starts = [0, *itertools.accumulate(num_bytes for num_bytes, _ in entry.pages)]
        self.cache = cache
        self._make_shard = make_shard
        self._numbers = range(sum(entry.num_shards.values()))
        self._whole = self

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, place: Any) -> Any:
        """Read a shard, or return some of them. Raises DataError for a page that is damaged."""
        numbers = self._numbers[place]
        if isinstance(numbers, range):
            part = copy.copy(self)
            part._numbers = numbers
            return part
        return self._make(_read_page(self._whole, numbers // self.entry.page_shards), numbers)

    def __iter__(self) -> Iterator[Any]:
        """Read all of them, with one request where they stand in many pages."""
        if not self._numbers:
            return
        first, last = sorted(number // self.entry.page_shards for number in (self._numbers[0], self._numbers[-1]))
        content = _read_part(self.uri, self.starts[first], self.starts[last + 1]) if last - first >= 16 else b""
        for page, numbers in itertools.groupby(self._numbers, lambda number: number // self.entry.page_shards):
            start, stop = (self.starts[at] - self.starts[first] for at in (page, page + 1))
            is_whole = storage.sha256_bytes(content[start:stop]) == self.entry.pages[page][1]
            values = storage.decode_json(content[start:stop], self.uri) if is_whole else _read_page(self._whole, page)
            yield from (self._make(values, number) for number in numbers)

    def column(self, name: str) -> np.ndarray:
        """Return a field of `COLUMNS` of each shard, int64; no page is read for it."""
        values = self.entry.columns[name]
        return np.array([values[number] for number in self._numbers], np.int64)

    def _make(self, values: Any, number: int) -> Any:
        try:
            row = {name: column[number % self.entry.page_shards] for name, column in values.items()}
            shard = self._make_shard(row | {name: self.entry.columns[name][number] for name in COLUMNS})
        except (AttributeError, TypeError, IndexError, KeyError, ValidationError) as error:
            raise DataError("the pages do not fit their manifest", where=self.uri, fix=SHARD_AGAIN) from error
        if shard.is_adopted and shard.folder not in self.entry.adopted_folders:
            what = "a page names a folder that its manifest does not"
            raise DataError(what, where=self.uri, value=shard.folder, fix=ADOPT_AGAIN)
        return shard


@functools.lru_cache(KEPT_PAGES)
def _read_page(shards: PagedShards, page: int) -> Any:
    """Read a page, from the node if it is there. Raises DataError where it is another one."""
    sha256 = shards.entry.pages[page][1]

    def fetch() -> bytes:
        for _ in range(2):  # what answers for a store may be wrong once
            content = _read_part(shards.uri, *shards.starts[page : page + 2])
            if storage.sha256_bytes(content) == sha256:
                return content
        raise DataError("its content has changed: the sha256 differs", where=shards.uri, fix=SHARD_AGAIN)

    return storage.decode_json(shards.cache.read_file(sha256, fetch) if shards.cache else fetch(), shards.uri)


def _read_part(uri: str, start: int, stop: int) -> bytes:
    with reading(uri):
        if not storage.is_local(uri):
            return storage.read_range(uri, start, stop)
        with storage.open_read(uri) as stream:
            stream.seek(start)
            return stream.read(stop - start)
