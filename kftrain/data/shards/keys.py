"""How the key of a block becomes the name of a tar member, and back.

A member is called `<encoded key>.<field>.npy`. Readers of WebDataset end the key at the first dot of the base
name, skip names that begin with `__`, and may be asked to extract: an encoded key therefore has no dots, no
leading `__`, no `..` and only characters of `[A-Za-z0-9_/-]`. Every other byte of the key's UTF-8 is written
`_xHH_`, the scheme of .NET's `XmlConvert.EncodeName`; an underscore of the key that would read as the start
of such an escape is itself escaped, so that decoding gives the key back.

USTAR holds 155 bytes of folders and 100 of base name. A key that does not fit keeps its beginning and gets
the first 96 bits of its sha256 for the rest (`<beginning>-<24 hex digits>`): still unique, but decoding gives
that shortened key.
"""

from __future__ import annotations

import hashlib
import re

MAX_FOLDER_BYTES = 155
"""Folders of a USTAR member name."""
MAX_BASE_BYTES = 100
"""Base name of a USTAR member name, suffix included."""

_PLAIN = re.compile(r"[A-Za-z0-9_-]+(?:/[A-Za-z0-9_-]+)*")
_TO_ESCAPE = re.compile(rb"[^A-Za-z0-9_/-]|^/|/$|(?<=/)/|^_(?![A-Za-z0-9-])|_(?=x[0-9a-f]{2})")
_ESCAPE = re.compile(rb"_x([0-9a-f]{2})_")


def encode_key(key: str, max_suffix_bytes: int) -> str:
    """Return the member name of any key but '', without its suffix (`.<field>.npy`, at most `max_suffix_bytes`)."""
    assert key, "a key is not empty"
    encoded = _escape(key)
    if len(encoded) + max_suffix_bytes <= MAX_BASE_BYTES or split_name(encoded, max_suffix_bytes):
        return encoded
    return _shorten(key, max_suffix_bytes)


def decode_key(encoded: str) -> str:
    """Invert `encode_key`; a shortened key stays as it was shortened, and what is no encoded key as it is."""
    if "_x" not in encoded:
        return encoded
    plain = _ESCAPE.sub(lambda match: bytes([int(match[1], 16)]), encoded.encode("utf-8", "surrogatepass"))
    try:
        return plain.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return encoded


def split_name(encoded: str, max_suffix_bytes: int) -> tuple[str, str] | None:
    """Split a name into folders and base name as the two fields of a USTAR header; None where they do not fit."""
    if len(encoded) + max_suffix_bytes <= MAX_BASE_BYTES:
        return "", encoded
    folder, _, base = encoded.rpartition("/")
    if folder and len(folder) <= MAX_FOLDER_BYTES and len(base) + max_suffix_bytes <= MAX_BASE_BYTES:
        return folder, base
    return None


def _escape(key: str) -> str:
    if "_x" not in key and not key.startswith("_") and _PLAIN.fullmatch(key):
        return key
    return _TO_ESCAPE.sub(lambda match: b"_x%02x_" % match[0][0], key.encode("utf-8", "surrogatepass")).decode("ascii")


def _shorten(key: str, max_suffix_bytes: int) -> str:
    ending = "-" + hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:24]
    limit = MAX_BASE_BYTES - max_suffix_bytes - len(ending)
    beginning = key[:limit]
    while len(_escape(beginning)) > limit:
        beginning = beginning[:-1]
    return _escape(beginning) + ending
