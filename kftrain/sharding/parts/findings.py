"""Findings about the records of a dataset as a whole: copies, and records of no size or of a very large one.

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


def find_flaws(parts: Sequence[PartDocument], uri_of: Callable[[str], str]) -> dict[str, Any]:
    """Compare the records of all parts; return kind -> `{"count": records, "first": ten names}`, {} if all is well.

    `uri_of`: a part's folder by its digest. Raises DataError for a key that comes twice in one split.
    """
    records = _Records([uri_of(part.part_digest) for part in parts])
    named_by_kind = {KEY_TWICE: records.find_keys_in_both(), **records.find_copies()}
    for kind, name in ((EMPTY, "empty"), (OVERSIZED, "oversized")):
        named_by_kind[kind] = Named()
        for part in parts:
            named_by_kind[kind].add(part.findings[name].count, part.findings[name].first)
    return {kind: named.model_dump() for kind, named in named_by_kind.items() if named.count}


def describe_findings(findings: dict[str, Any]) -> list[str]:
    """Describe findings, a line for each kind."""
    return [
        f"{one['count']:,} x {kind}: {', '.join(one['first'])}{' …' if one['count'] > len(one['first']) else ''}"
        for kind, one in findings.items()
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

    def find_keys_in_both(self) -> Named:
        """Find validation records of a key that is trained on, too. Raises DataError for a key twice in one split."""
        for split in self._splits:
            _, again = _find_repeated(self._keys, split)
            if len(again):
                (key,) = self._read_names(again[:1])
                raise DataError("a key comes twice in one split", where="data.source", value=key, fix="make it unique")
        _, places = _find_common(self._keys, *self._splits)
        return Named(count=len(places), first=self._read_names(places[:MAX_NAMED]))

    def find_copies(self) -> dict[str, Named]:
        """Find validation records whose content is trained on, and records whose content came before in their split."""
        known = [split[self._contents[split] != UNKNOWN] for split in self._splits]
        repeated = [_find_repeated(self._contents, split) for split in known]
        again = np.concatenate([first for first, _ in repeated]), np.concatenate([second for _, second in repeated])
        return {
            CONTENT_IN_BOTH: self._describe_pairs(*_find_common(self._contents, *known)),
            CONTENT_TWICE: self._describe_pairs(*again),
        }

    def _describe_pairs(self, first: np.ndarray, second: np.ndarray) -> Named:
        names = self._read_names(np.concatenate([first[:MAX_NAMED], second[:MAX_NAMED]]))
        half = len(names) // 2
        pairs = zip(names[:half], names[half:], strict=True)
        return Named(count=len(second), first=[f"{other} = {one}" for one, other in pairs])

    def _read_names(self, numbers: np.ndarray) -> list[str]:
        """Read the keys of some records."""
        by_part: dict[int, list[int]] = defaultdict(list)
        for number in numbers.tolist():
            by_part[int(np.searchsorted(self._starts, number, side="right")) - 1].append(number)
        keys: dict[int, str] = {}
        for part, wanted in by_part.items():
            start = int(self._starts[part])
            part_keys = read_keys(self._uris[part], {number - start for number in wanted})
            keys |= {start + number: key for number, key in part_keys.items()}
        return [keys[number] for number in numbers.tolist()]


def _find_repeated(values: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find the places whose value came before, ascending: the first place of the value, and the place."""
    chosen = values[places]
    order = np.argsort(chosen, kind="stable")
    same = np.append(False, chosen[order][1:] == chosen[order][:-1])[: len(order)]
    run_start = np.maximum.accumulate(np.where(same, 0, np.arange(len(order)))) if len(order) else order
    first, again = order[run_start[same]], order[same]
    by_place = np.argsort(again)
    return places[first[by_place]], places[again[by_place]]


def _find_common(values: np.ndarray, train: np.ndarray, validation: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find places in validation whose value comes in training, too: its first place there, and the place; ascending."""
    if not len(train):
        return train, train
    order = np.argsort(values[train], kind="stable")
    ordered = values[train[order]]
    matches = np.minimum(np.searchsorted(ordered, values[validation]), len(order) - 1)
    equal = ordered[matches] == values[validation]
    return train[order[matches[equal]]], validation[equal]
