"""A user's own records: an iterable or a function behind `module:attr`.

What the attribute may be: a function or class that is called without arguments for every pass, or an object that can
be iterated more than once. It gives `Record`s or pairs `(key, fields)`. If it has a method `listing()`, that says
cheaply what is there; if not, all records are read and hashed instead. What its code raises becomes a UserCodeError.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from kftrain import plugins
from kftrain.data.schema import Record
from kftrain.errors import ConfigError, DataError

_END = object()
_WHERE = "data.source"


class UserSource:
    """The records of a user's object. Notices keys that come twice, for about 100 bytes per record."""

    def __init__(self, spec: str) -> None:
        """Raises ConfigError where `spec` names nothing to iterate over, UserCodeError where importing it raises."""
        self._spec = spec
        target = plugins.load_attribute(spec, _WHERE)
        if isinstance(target, type):
            with plugins.user_code(_WHERE):
                target = target()
        self._target = target
        self._open = _opener(target, spec)

    def listing(self) -> list[dict[str, Any]]:
        """The object's own listing, or the digest of all its records."""
        own = getattr(self._target, "listing", None)
        if own is None:
            return [{"name": self._spec, "sha256": self._content_digest()}]
        with plugins.user_code(_WHERE):
            return list(own())

    def records(self) -> Iterator[Record]:
        """What the object gives. Raises UserCodeError; DataError for what is no record or repeats a key."""
        seen: set[bytes] = set()
        for item in self._items():
            record = _as_record(item)
            digest = hashlib.blake2b(record.key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
            if digest in seen:
                raise DataError(
                    "a key comes twice", where=self._spec, value=record.key, fix="give each record its own key"
                )
            seen.add(digest)
            yield record

    def _items(self) -> Iterator[Any]:
        with plugins.user_code(_WHERE):
            iterator = iter(self._open())
        while True:
            with plugins.user_code(_WHERE):
                item = next(iterator, _END)
            if item is _END:
                return
            yield item

    def _content_digest(self) -> str:
        digest = hashlib.sha256()
        for record in self.records():
            for part in _canonical([record.key, record.split, record.fields], record.key):
                digest.update(part)
        return digest.hexdigest()


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


def _canonical(value: Any, key: str) -> Iterator[bytes]:
    """Bytes that are equal only for equal values: type, length, content."""
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield f"array {value.dtype.str} {value.shape} ".encode()
        yield value.tobytes()
    elif isinstance(value, bytes | bytearray | memoryview):
        yield f"bytes {len(value)} ".encode()
        yield bytes(value)
    elif isinstance(value, str):
        yield from _canonical(b"text " + value.encode("utf-8", "surrogatepass"), key)
    elif value is None or isinstance(value, bool | int | float | np.generic):
        yield f"{type(value).__name__} {value!r} ".encode()
    elif isinstance(value, list | tuple):
        yield f"list {len(value)} ".encode()
        for item in value:
            yield from _canonical(item, key)
    elif isinstance(value, dict):
        yield f"dict {len(value)} ".encode()
        for name in sorted(value, key=str):
            yield from _canonical([name, value[name]], key)
    else:
        raise DataError(
            f"record {key!r} holds a {type(value).__name__}, which has no digest",
            where=_WHERE,
            fix="give the object a listing()",
        )
