"""What sources share in reading records: text as UTF-8, JSON, images, and libraries that are installed on demand."""

from __future__ import annotations

import importlib
import io
import json
import struct
from collections.abc import Iterable
from typing import Any

import numpy as np

from kftrain.errors import ConfigError, DataError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm", ".pgm", ".tif", ".tiff")
"""Files that count as images, by suffix in any case."""

HELD_OUT_NAMES = ("validation", "val", "test")
"""What a data set that is split already calls the part that is not trained on; the first that is there counts."""

_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
"""Content that is decoded, whatever the suffix says. Pillow knows more, one of which runs other programs (EPS)."""

_MODES = {
    **{mode: mode for mode in ("L", "LA", "RGB", "RGBA")},
    **{"1": "L", "PA": "RGBA", "RGBX": "RGB", "CMYK": "RGB", "YCbCr": "RGB"},
}
"""Pillow's mode of an image -> the one its pixels are taken in; a palette (`P`) depends on the image."""

_DAMAGED = (OSError, SyntaxError, ValueError, TypeError, LookupError, EOFError, OverflowError, struct.error)
"""What Pillow's decoders raise for content that is not an image, or only a part of one."""


def load_library(name: str, where: str = "data.source") -> Any:
    """A library of the extra `sources`, which the setting `where` needs. Raises ConfigError where it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"needs {name} ({error})", where=where, fix="pip install 'kftrain[sources]'") from error


def is_image(name: str) -> bool:
    """Whether a file counts as an image, by its suffix."""
    return name.lower().endswith(IMAGE_SUFFIXES)


def held_out_name(names: Iterable[str]) -> str | None:
    """Of the parts of a data set the one that becomes our validation split."""
    present = set(names)
    return next((name for name in HELD_OUT_NAMES if name in present), None)


def checked_text(content: bytes, where: str) -> bytes:
    """The same bytes. Raises DataError where they are not UTF-8."""
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"not UTF-8 text: {error.reason} at byte {error.start}", where=where, fix="convert it"
        ) from error
    return content


def parse_json(content: bytes, where: str) -> Any:
    """A JSON document. Raises DataError."""
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON: {error}", where=where, fix="correct or delete it") from error


def with_text(fields: Any, text_field: str, where: str) -> dict[str, Any]:
    """All fields of a record, the text in `text_field` as UTF-8 bytes under `text`.

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


def decode_image(content: bytes, where: str) -> np.ndarray:
    """Pixels `[height, width, channels]`, uint8, upright; 1 channel is grey, 3 are RGB, a last one more is alpha.

    Palettes, CMYK and YCbCr become RGB; of several frames the first counts. Raises DataError for what is
    damaged, no image of a known format, deeper than 8 bits, or larger than Pillow's limit against
    decompression bombs.
    """
    pillow, operations = load_library("PIL.Image"), load_library("PIL.ImageOps")
    try:
        with pillow.open(io.BytesIO(content), formats=_FORMATS) as opened:
            _refuse_bomb(opened.size, pillow.MAX_IMAGE_PIXELS, where)
            operations.exif_transpose(opened, in_place=True)
            pixels = np.asarray(opened.convert(_mode_of(opened, where)))
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
        raise _bomb(str(error), where) from error
    except _DAMAGED as error:
        raise DataError(f"the image cannot be decoded: {error}", where=where, fix="replace or delete it") from error
    return pixels if pixels.ndim == 3 else pixels[..., np.newaxis]


def _instead_of_text(fields: Any, text_field: str) -> Any:
    if not isinstance(fields, dict):
        return type(fields).__name__
    return fields[text_field] if text_field in fields else sorted(fields)


def _refuse_bomb(size: tuple[int, int], max_pixels: int | None, where: str) -> None:
    """Pillow itself only warns up to twice its limit."""
    if max_pixels is not None and size[0] * size[1] > max_pixels:
        raise _bomb(f"{size[0]} x {size[1]} pixels, the limit is {max_pixels}", where)


def _bomb(reason: str, where: str) -> DataError:
    return DataError(f"the image is too large: {reason}", where=where, fix="scale it down or delete it")


def _mode_of(image: Any, where: str) -> str:
    mode = ("RGBA" if "transparency" in image.info else "RGB") if image.mode == "P" else _MODES.get(image.mode)
    if mode is None:
        raise DataError(
            "the image does not have 8 bits per channel", where=where, value=f"mode {image.mode}", fix="convert it"
        )
    return mode
