"""Files that a dataset's samples were encoded with, such as a tokenizer.

    <root>/assets/<sha256>/<name>      found by what is in it

The settings of the dataset name each file with its digest, and so does the dataset's own digest. No document says where
they lie: below the storage root that the manifest itself lies below. They are written before the dataset is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kftrain.core import storage
from kftrain.data.shards.manifest import reading
from kftrain.errors import DataError

ASSETS = "assets"
"""Entry of a dataset's settings: file name -> sha256."""

MAX_ASSET_BYTES = 64 << 20

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,80}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FIX = "shard the data again: kftrain shard"


def keep_assets(root: str, assets: Mapping[str, bytes]) -> dict[str, str]:
    """Write the files below a storage root, where they are not there yet: name -> digest."""
    digests = digest_assets(assets)
    for name, digest in digests.items():
        uri = _uri(root, name, digest)
        if len(assets[name]) > MAX_ASSET_BYTES:
            raise DataError(f"larger than {MAX_ASSET_BYTES} bytes", where="task.assets()", value=name)
        if not (storage.exists(uri) and storage.sha256_file(uri) == digest):
            storage.publish(uri, assets[name])
    return digests


def digest_assets(assets: Mapping[str, bytes]) -> dict[str, str]:
    """Return name -> sha256 of each file."""
    return {name: storage.sha256_bytes(content) for name, content in assets.items()}


def read_assets(root: str, settings: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files below a storage root that a dataset's settings name: name -> content.

    Raises DataError where one is missing, or is not what the dataset's settings say.
    """
    assets = {}
    for name, digest in dict(settings.get(ASSETS) or {}).items():
        uri = _uri(root, name, digest)
        with reading(uri):
            size = storage.size_bytes(uri)
            content = storage.read_bytes(uri) if size <= MAX_ASSET_BYTES else b""
        if storage.sha256_bytes(content) != digest:
            raise DataError("its content has changed: the sha256 differs", where=uri, fix=_FIX)
        assets[name] = content
    return assets


def find_storage_root(manifest_uri: str) -> str:
    """Return the storage root of `<root>/shards/<digest>/manifest.json`."""
    return manifest_uri.rsplit("/", 3)[0]


def _uri(root: str, name: str, digest: str) -> str:
    if not (isinstance(digest, str) and _NAME.fullmatch(name) and _DIGEST.fullmatch(digest)):
        raise DataError("no file that a dataset may name", where="task_settings.assets", value=name, fix=_FIX)
    return storage.join(root, "assets", digest, name)
