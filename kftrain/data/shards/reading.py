"""Errors of whoever reads the files of a dataset."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kftrain.core import storage
from kftrain.errors import DataError

SHARD_AGAIN = "shard the data again: kftrain shard --rehash"
"""Fix for damaged shards."""

ADOPT_AGAIN = "adopt the shards again: kftrain shards adopt"
"""Fix where somebody has changed shards that are not ours."""

VERIFY_AGAIN = "make it again: kftrain shards verify"
"""Fix for damaged tables of digests."""


@contextlib.contextmanager
def reading(uri: str, fix: str = SHARD_AGAIN) -> Iterator[None]:
    """Make what goes wrong while reading a shard or its index a DataError that names it.

    Storage that is away for now is a StorageError: another attempt may find it.
    """
    try:
        with storage.simplify_errors(uri):
            yield
    except FileNotFoundError as error:
        raise DataError("missing", where=uri, fix=fix) from error
    except OSError as error:
        raise DataError(f"cannot be read: {error}", where=uri, fix="check the storage and its permissions") from error
