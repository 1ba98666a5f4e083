"""What is wrong with the records of a dataset as a whole: copies, and records of no size or of a very large one.

A copy in the other split is the worst of them: a model that has seen a validation sample is measured too well. Records
are compared by the hashes that each part keeps of them (`records.py`), so that nothing is read again.

Memory: two numbers of 8 bytes for each record of the dataset, and as much again while they are sorted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kftrain.errors import DataError
from kftrain.sharding.parts.content import UNKNOWN
from kftrain.sharding.parts.document import MAX_NAMED, Named, PartDocument
from kftrain.sharding.parts.records import read_keys, read_table

KEY_TWICE = "key in both splits"
CONTENT_IN_BOTH = "content in both splits"
CONTENT_TWICE = "content again in its split"
EMPTY = "empty"
OVERSIZED = "larger than a shard"
"""Kinds of findings, as logs and reports call them."""

_VALIDATION = 1


def find(parts: Sequence[PartDocument], uri_of: Callable[[str], str]) -> dict[str, Any]:
    """What was found in a dataset: kind -> `{"count": records, "first": names of the first ten}`; {} if nothing.

    `uri_of`: a part's folder by its digest. Raises DataError for a key that comes twice in one split.
    """
    records = _Records([uri_of(part.part_digest) for part in parts])
    found = {KEY_TWICE: records.keys_in_both(), **records.copies()}
    for kind, name in ((EMPTY, "empty"), (OVERSIZED, "oversized")):
        found[kind] = Named()
        for part in parts:
            found[kind].add(part.findings[name].count, part.findings[name].first)
    return {kind: named.model_dump() for kind, named in found.items() if named.count}


def lines(findings: dict[str, Any]) -> list[str]:
    """What is said of findings: a line for each kind."""
    return [
        f"{each['count']:,} x {kind}: {', '.join(each['first'])}{' …' if each['count'] > len(each['first']) else ''}"
        for kind, each in findings.items()
    ]


class _Records:
    """The records of some parts, numbered in order."""

    def __init__(self, part_uris: list[str]) -> None:
        tables = [read_table(uri) for uri in part_uris]
        self._uris = part_uris
        self._starts = np.cumsum([0, *map(len, tables)])
        self._keys = np.concatenate([table[:, 0] for table in tables])
        self._contents = np.concatenate([table[:, 1] for table in tables])
        is_validation = np.concatenate([table[:, 2] == _VALIDATION for table in tables])
        self._splits = [np.flatnonzero(~is_validation), np.flatnonzero(is_validation)]

    def keys_in_both(self) -> Named:
        """Validation records of a key that is trained on, too. Raises DataError for a key twice in one split."""
        for split in self._splits:
            _, again = _repeated(self._keys, split)
            if len(again):
                (key,) = self._names(again[:1])
                raise DataError("a key comes twice in one split", where="data.source", value=key, fix="make it unique")
        _, found = _common(self._keys, *self._splits)
        return Named(count=len(found), first=self._names(found[:MAX_NAMED]))

    def copies(self) -> dict[str, Named]:
        """Validation records whose content is trained on, and records whose content came earlier in their split."""
        known = [split[self._contents[split] != UNKNOWN] for split in self._splits]
        repeated = [_repeated(self._contents, split) for split in known]
        again = np.concatenate([first for first, _ in repeated]), np.concatenate([second for _, second in repeated])
        return {CONTENT_IN_BOTH: self._named(*_common(self._contents, *known)), CONTENT_TWICE: self._named(*again)}

    def _named(self, first: np.ndarray, second: np.ndarray) -> Named:
        names = self._names(np.concatenate([first[:MAX_NAMED], second[:MAX_NAMED]]))
        half = len(names) // 2
        pairs = zip(names[:half], names[half:], strict=True)
        return Named(count=len(second), first=[f"{other} = {one}" for one, other in pairs])

    def _names(self, numbers: np.ndarray) -> list[str]:
        """The keys of some records."""
        by_part: dict[int, list[int]] = defaultdict(list)
        for number in numbers.tolist():
            by_part[int(np.searchsorted(self._starts, number, side="right")) - 1].append(number)
        keys: dict[int, str] = {}
        for part, wanted in by_part.items():
            start = int(self._starts[part])
            found = read_keys(self._uris[part], {number - start for number in wanted})
            keys |= {start + number: key for number, key in found.items()}
        return [keys[number] for number in numbers.tolist()]


def _repeated(values: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of these places the ones whose value came before, ascending: the first place of the value, and the place."""
    chosen = values[places]
    order = np.argsort(chosen, kind="stable")
    same = np.append(False, chosen[order][1:] == chosen[order][:-1])[: len(order)]
    run_start = np.maximum.accumulate(np.where(same, 0, np.arange(len(order)))) if len(order) else order
    first, again = order[run_start[same]], order[same]
    by_place = np.argsort(again)
    return places[first[by_place]], places[again[by_place]]


def _common(values: np.ndarray, train: np.ndarray, validation: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Places in validation whose value comes in training, too: its first place there, and the place; ascending."""
    if not len(train):
        return train, train
    order = np.argsort(values[train], kind="stable")
    ordered = values[train[order]]
    found = np.minimum(np.searchsorted(ordered, values[validation]), len(order) - 1)
    equal = ordered[found] == values[validation]
    return train[order[found[equal]]], validation[equal]
