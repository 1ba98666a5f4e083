"""Samples as reports show them: texts that are cut, and a small picture as a PNG file."""

from __future__ import annotations

import base64
import contextlib
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from kftrain.data.file_content import IMAGE_SUFFIXES
from kftrain.data.images import decode_image
from kftrain.data.schema import Arrays, Field, SampleSchema
from kftrain.errors import DataError, UserCodeError

MAX_NAMES = 8
MAX_NAME_CHARACTERS = 40
MAX_TEXT_CHARACTERS = 200
MAX_PICTURE_PX = 48

TEXT_EXTENSIONS = frozenset({"txt", "text", "json", "cls"})
"""Extensions of files that are shown as text."""


def show_fields(schema: SampleSchema, block: Arrays) -> dict[str, Any]:
    """Show the first row of a block: the fields that are texts, pictures or single numbers."""
    fields = {field.name: _show_field(field, block[field.name][0]) for field in schema.fields if field.name in block}
    return {name: value for name, value in fields.items() if value is not None}


def _show_field(field: Field, value: Any) -> Any:
    if field.is_encoded:
        return _show_file(field, bytes(value))
    array = np.asarray(value)
    if array.dtype == np.uint8 and (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (1, 3))):
        return array[..., 0] if array.shape[2:] == (1,) else array
    return array.item() if not array.shape else None


def _show_file(field: Field, content: bytes) -> Any:
    if any(f".{ending}".endswith(IMAGE_SUFFIXES) for ending in field.extensions):
        with contextlib.suppress(DataError):  # training names the sample; a report shows the others
            pixels = decode_image(content, field.name)
            return pixels[..., 0] if pixels.shape[2] < 3 else pixels[..., :3]
        return "cannot be decoded"
    if TEXT_EXTENSIONS.intersection(field.extensions):
        return content[: 4 * MAX_TEXT_CHARACTERS].decode("utf-8", "replace")
    return f"{len(content):,} bytes"


def format_example(shown: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Format an example as `shown`, `names` and `picture`: texts are cut, the first picture is made small.

    Raises UserCodeError, which names `where`, for a picture that is none.
    """
    pictures = [value for value in shown.values() if isinstance(value, np.ndarray) and value.ndim > 0]
    texts = {
        str(name)[:MAX_NAME_CHARACTERS]: _cut_text(value)
        for name, value in shown.items()
        if not (isinstance(value, np.ndarray) and value.ndim > 0)
    }
    names = list(texts)[:MAX_NAMES]
    picture = base64.b64encode(_encode_png(_shrink(pictures[0], where))).decode() if pictures else ""
    return {"shown": {name: texts[name] for name in names}, "names": names, "picture": picture}


def _cut_text(value: Any) -> str:
    text = value if isinstance(value, str) else f"{float(value):.6g}" if isinstance(value, float) else str(value)
    cut = text if len(text) <= MAX_TEXT_CHARACTERS else text[: MAX_TEXT_CHARACTERS - 1] + "\u2026"
    return cut.encode("utf-8", "replace").decode()


def _shrink(picture: np.ndarray, where: str) -> np.ndarray:
    """Shrink a picture to at most `MAX_PICTURE_PX` high and wide by the means of equal squares; cut the rest off."""
    if (
        picture.dtype != np.uint8
        or 0 in picture.shape
        or not (picture.ndim == 2 or (picture.ndim == 3 and picture.shape[2] == 3))
    ):
        raise UserCodeError(
            "a picture must be uint8 [height, width] or [height, width, 3]",
            where=where,
            value=f"{picture.dtype} {list(picture.shape)}",
        )
    side = max(1, -(-max(picture.shape[:2]) // MAX_PICTURE_PX))
    high, wide = (min(side, size) for size in picture.shape[:2])
    height, width = picture.shape[0] // high, picture.shape[1] // wide
    squares = picture[: height * high, : width * wide].reshape(height, high, width, wide, *picture.shape[2:])
    small: np.ndarray = squares.mean(axis=(1, 3)).astype(np.uint8)
    return small


def _encode_png(picture: np.ndarray) -> bytes:
    """Encode a picture as a PNG file."""
    height, width = picture.shape[:2]
    lines = b"".join(b"\0" + line.tobytes() for line in picture)
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if picture.ndim == 3 else 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
        for name, content in chunks
    )
