"""A user's own records: an iterable or a function behind `module:attr`.

What the attribute may be: a function or class that is called without arguments for every pass, or an object that can
be iterated more than once. It gives `Record`s or pairs `(key, fields)`. If it has a method `listing()`, that says
cheaply what is there; if not, all records are read and hashed instead.

An object with the methods `parts()` and `read(part)` is encoded part by part, by several processes: `parts()` lists
what is there as plain data (a dict each, with what shows that the part has changed), `read` gives a part's records.

What its code raises becomes a UserCodeError.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kftrain.core import plugins
from kftrain.data.schema import Record, SourcePart
from kftrain.errors import ConfigError, DataError
from kftrain.sharding.canonical import encode_canonically
from kftrain.trust import load_code

_END = object()
_WHERE = "data.source"


class UserSource:
    """The records of a user's object. Notices keys that come twice, for about 100 bytes per record."""

    def __init__(self, spec: str) -> None:
        """Raises ConfigError where `spec` names nothing to iterate over, UserCodeError where importing it raises."""
        self._spec = spec
        target = load_code(spec, _WHERE)
        if isinstance(target, type):
            with plugins.user_code(_WHERE):
                target = target()
        self._target = target
        self._has_parts = hasattr(target, "parts") and hasattr(target, "read")
        self._open = None if self._has_parts else _opener(target, spec)
        self._is_hashed = not self._has_parts and not hasattr(target, "listing")
        self._digest = ""
        """Of the records when they were read the last time, where nothing else tells whether they have changed."""

    def listing(self) -> list[dict[str, Any]]:
        """List what the object says of itself, else its parts, else the digest of all its records."""
        for name in ("listing", "parts") if self._has_parts else ("listing",):
            own = getattr(self._target, name, None)
            if own is not None:
                with plugins.user_code(_WHERE):
                    return list(own())
        if not self._digest:
            for _ in self.records():
                pass
        return [{"name": self._spec, "sha256": self._digest}]

    def parts(self, target_bytes: int) -> list[SourcePart]:
        """Return the object's own parts, or all that it lists as one."""
        if not self._has_parts:
            return [SourcePart(tuple(self.listing()))]
        with plugins.user_code(_WHERE):
            parts = list(self._target.parts())
        for part in parts:
            if not isinstance(part, dict):
                raise DataError("a part is no dict of plain data", where=f"{self._spec}.parts()", value=part)
        return [SourcePart((part,)) for part in parts]

    def read(self, part: SourcePart) -> Iterator[Record]:
        """Yield what the object gives of a part.

        Raises UserCodeError; DataError for what is no record or repeats a key.
        """
        if self._has_parts:
            (piece,) = part.pieces
            return self._read_records(lambda: self._target.read(piece))
        return self.records()

    def records(self) -> Iterator[Record]:
        """Yield what the object gives. Raises UserCodeError; DataError for what is no record or repeats a key."""
        if self._has_parts:
            for part in self.parts(0):
                yield from self.read(part)
        else:
            assert self._open is not None
            yield from self._read_records(self._open)

    def _read_records(self, open_: Callable[[], Iterable[Any]]) -> Iterator[Record]:
        seen: set[bytes] = set()
        content = hashlib.sha256()
        for item in _items(open_):
            record = _as_record(item)
            name = f"{record.split}:{record.key}".encode("utf-8", "surrogatepass")
            digest = hashlib.blake2b(name, digest_size=16).digest()
            if digest in seen:
                raise DataError(
                    "a key comes twice", where=self._spec, value=record.key, fix="give each record its own key"
                )
            seen.add(digest)
            if self._is_hashed:
                _add(record, content)
            yield record
        self._digest = content.hexdigest()


def _add(record: Record, digest: Any) -> None:
    try:
        files = [dict(record.files)] if record.files else []
        for part in encode_canonically([record.key, record.split, record.fields, *files]):
            digest.update(part)
    except TypeError as error:
        raise DataError(
            f"record {record.key!r} holds a {error}, which has no digest",
            where=_WHERE,
            fix="give the object a listing()",
        ) from error


def _items(open_: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    with plugins.user_code(_WHERE):
        iterator = iter(open_())
    while True:
        with plugins.user_code(_WHERE):
            item = next(iterator, _END)
        if item is _END:
            return
        yield item


def _opener(target: Any, spec: str) -> Callable[[], Iterable[Any]]:
    if isinstance(target, Iterator):
        raise ConfigError(
            "an iterator can be read only once",
            where=_WHERE,
            value=spec,
            fix="name the function that makes it, or a list",
        )
    if isinstance(target, Iterable):
        return lambda: target
    if callable(target):
        return target  # type: ignore[no-any-return]
    raise ConfigError(
        f"neither a function nor an iterable but {type(target).__name__}",
        where=_WHERE,
        value=spec,
        fix="name one of these",
    )


def _as_record(item: Any) -> Record:
    record = Record(*item) if isinstance(item, tuple) and len(item) == 2 else item
    if not isinstance(record, Record):
        raise DataError("not a Record or a pair (key, fields)", where=_WHERE, value=item, fix="yield one of these")
    if not isinstance(record.key, str) or not record.key or not isinstance(record.fields, dict):
        raise DataError(
            "a record needs a key of text and a dict of fields", where=_WHERE, value=(record.key, record.fields)
        )
    return record
