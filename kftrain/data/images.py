"""Encoded images: what kind a file is, and its pixels, whole or a part of it in the size that is wanted.

Pillow decodes. A part that is much larger than what it becomes is decoded in less detail where the format allows that
(JPEG, by 2, 4 or 8), yet in twice the detail that is wanted: a photo of a camera costs a fraction.
"""

from __future__ import annotations

import contextlib
import io
import math
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kftrain.data.file_content import load_library
from kftrain.errors import DataError

Box = tuple[float, float, float, float]
"""Left, top, right and bottom of a part of an image, in pixels."""

ChooseBox = Callable[[int, int], Box]
"""Function from the width and height of an upright image to the part of it that is wanted."""

EXTENSIONS = ("jpg", "jpeg", "png", "webp", "bmp", "ppm", "pgm", "tif", "tiff", "gif")
"""Files that count as images, by what their names end in; the first is the usual one."""

_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
"""Content that is decoded, whatever the extension says. Pillow knows more, one of which runs other programs (EPS)."""

_BEGINNINGS = {
    **{b"\xff\xd8\xff": "jpg", b"\x89PNG\r\n\x1a\n": "png", b"BM": "bmp", b"GIF8": "gif"},
    **{b"P5": "pgm", b"P6": "ppm", b"II*\0": "tif", b"MM\0*": "tif"},
}
"""First bytes of a file -> its extension."""

_MODES = {
    **{mode: mode for mode in ("L", "LA", "RGB", "RGBA")},
    **{"1": "L", "PA": "RGBA", "RGBX": "RGB", "CMYK": "RGB", "YCbCr": "RGB"},
}
"""Pillow's mode of an image -> the one its pixels are taken in; a palette (`P`) depends on the image."""

_DAMAGED = (OSError, SyntaxError, ValueError, TypeError, LookupError, EOFError, OverflowError, struct.error)
"""Exceptions that Pillow's decoders raise for content that is not an image, or only a part of one."""

_ORIENTATION = 0x0112
"""EXIF tag of the orientation."""
_ON_THEIR_SIDE = range(5, 9)
"""Values of that tag for which width and height change places."""

_DETAIL = 2
"""Pixels in each direction that are decoded for one that is wanted, at least."""


def decode_image(content: bytes, where: str) -> np.ndarray:
    """Decode pixels `[height, width, channels]`, uint8, upright; 1 channel is grey, 3 are RGB, one more is alpha.

    Palettes, CMYK and YCbCr become RGB; of several frames the first counts. Raises DataError for what is damaged, no
    image of a known format, deeper than 8 bits, or larger than Pillow's limit against decompression bombs.
    """
    with _open_image(content, where) as image:
        load_library("PIL.ImageOps").exif_transpose(image, in_place=True)
        pixels = np.asarray(image.convert(_mode_of(image, where)))
    return pixels if pixels.ndim == 3 else pixels[..., np.newaxis]


def decode_part(content: bytes, size: int, num_channels: int, choose: ChooseBox, where: str) -> np.ndarray:
    """Decode a part of an upright image, scaled bilinearly: `[size, size, num_channels]` uint8, grey (1) or RGB (3).

    Transparency is dropped. Raises DataError as `decode_image` does.
    """
    with _open_image(content, where) as image:
        is_on_its_side = image.getexif().get(_ORIENTATION) in _ON_THEIR_SIDE
        width, height = image.size[::-1] if is_on_its_side else image.size
        left, top, right, bottom = box = choose(width, height)
        _mode_of(image, where)
        wanted = (
            math.ceil(width * _DETAIL * size / (right - left)),
            math.ceil(height * _DETAIL * size / (bottom - top)),
        )
        image.draft(None, wanted[::-1] if is_on_its_side else wanted)
        load_library("PIL.ImageOps").exif_transpose(image, in_place=True)
        x, y = image.size[0] / width, image.size[1] / height
        return scaled(image, size, num_channels, (box[0] * x, box[1] * y, box[2] * x, box[3] * y))


def scaled(image: Any, size: int, num_channels: int, box: Box) -> np.ndarray:
    """Scale a part of an image of Pillow, as `decode_part` returns it."""
    pillow = load_library("PIL.Image")
    for mode in (_mode_of(image, ""), "L" if num_channels == 1 else "RGB"):
        if image.mode != mode:
            image = image.convert(mode)
    part = image.resize((size, size), pillow.Resampling.BILINEAR, box=box)
    return np.asarray(part).reshape(size, size, num_channels)


def from_pixels(pixels: np.ndarray) -> Any:
    """Make an image of Pillow of pixels `[height, width]` or `[height, width, 1 to 4 channels]`, uint8."""
    flat = pixels[..., 0] if pixels.shape[2:] == (1,) else pixels
    return load_library("PIL.Image").fromarray(np.ascontiguousarray(flat))


def image_extension(content: bytes) -> str:
    """Find the extension of an image by its first bytes: `jpg`; '' where it is no image that is known."""
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "webp"
    return next((extension for start, extension in _BEGINNINGS.items() if content.startswith(start)), "")


def check_image(content: bytes, where: str) -> None:
    """Raise DataError for what `decode_image` refuses, as far as the header shows."""
    with _open_image(content, where) as image:
        _mode_of(image, where)


def middle_square(width: int, height: int) -> Box:
    """Return the largest square in the middle."""
    side = min(width, height)
    left, top = (width - side) * 0.5, (height - side) * 0.5
    return left, top, left + side, top + side


@contextlib.contextmanager
def _open_image(content: bytes, where: str) -> Iterator[Any]:
    """Yield an image of which the header has been read; what Pillow raises for its content becomes a DataError."""
    pillow = load_library("PIL.Image")
    try:
        with pillow.open(io.BytesIO(content), formats=_FORMATS) as image:
            (width, height), most = image.size, pillow.MAX_IMAGE_PIXELS
            if most is not None and width * height > most:  # Pillow itself only warns up to twice its limit
                raise _bomb(f"{width} x {height} pixels, the limit is {most}", where)
            yield image
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
        raise _bomb(str(error), where) from error
    except pillow.UnidentifiedImageError as error:  # whose text names a stream of ours
        fix = "replace or delete it"
        raise DataError("the image cannot be decoded: its format is not known", where=where, fix=fix) from error
    except _DAMAGED as error:
        raise DataError(f"the image cannot be decoded: {error}", where=where, fix="replace or delete it") from error


def _bomb(reason: str, where: str) -> DataError:
    return DataError(f"the image is too large: {reason}", where=where, fix="scale it down or delete it")


def _mode_of(image: Any, where: str) -> str:
    mode = ("RGBA" if "transparency" in image.info else "RGB") if image.mode == "P" else _MODES.get(image.mode)
    if mode is None:
        raise DataError(
            "the image does not have 8 bits per channel", where=where, value=f"mode {image.mode}", fix="convert it"
        )
    return mode
