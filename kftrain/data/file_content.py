"""What sources share in reading records: text as UTF-8, JSON, and libraries that are installed on demand."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable
from typing import Any

from kftrain.errors import ConfigError, DataError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff")
"""Files that count as images, by suffix in any case."""

HELD_OUT_NAMES = ("validation", "val", "test")
"""Names of the held-out part of a data set that is split already; the first that is there counts."""


def load_library(name: str, where: str = "data.source") -> Any:
    """Return a library of the extra `sources`, which the setting `where` needs.

    Raises ConfigError where it is missing.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"needs {name} ({error})", where=where, fix="pip install 'kftrain[sources]'") from error


def is_image(name: str) -> bool:
    """Tell whether a file counts as an image, by its suffix."""
    return name.lower().endswith(IMAGE_SUFFIXES)


def choose_held_out_name(names: Iterable[str]) -> str | None:
    """Choose the part of a data set that becomes our validation split."""
    present = set(names)
    return next((name for name in HELD_OUT_NAMES if name in present), None)


def checked_text(content: bytes, where: str) -> bytes:
    """Return the same bytes. Raises DataError where they are not UTF-8."""
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"not UTF-8 text: {error.reason} at byte {error.start}", where=where, fix="convert it"
        ) from error
    return content


def parse_json(content: bytes, where: str) -> Any:
    """Parse a JSON document. Raises DataError."""
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON: {error}", where=where, fix="correct or delete it") from error


def with_text(fields: Any, text_field: str, where: str) -> dict[str, Any]:
    """Return all fields of a record, the text in `text_field` as UTF-8 bytes under `text`.

    Raises DataError where that is no text, or `fields` no dict.
    """
    text = fields.get(text_field) if isinstance(fields, dict) else None
    if not isinstance(text, str):
        raise DataError(
            f"no text in field '{text_field}'",
            where=where,
            value=_instead_of_text(fields, text_field),
            fix="set data.text_field, or correct the record",
        )
    try:
        return {**fields, "text": text.encode("utf-8")}
    except UnicodeEncodeError as error:
        raise DataError(f"not Unicode text: {error}", where=where, fix="correct or delete it") from error


def _instead_of_text(fields: Any, text_field: str) -> Any:
    if not isinstance(fields, dict):
        return type(fields).__name__
    return fields[text_field] if text_field in fields else sorted(fields)
