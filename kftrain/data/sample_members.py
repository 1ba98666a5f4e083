"""Fields of a sample from the files in a tar that make it up, by their extensions. Nothing is ever unpickled."""

from __future__ import annotations

import io
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from kftrain.data.file_content import IMAGE_SUFFIXES, checked_text, parse_json, with_text
from kftrain.data.images import decode_image
from kftrain.data.schema import PICKLES, Lazy, LazyFields
from kftrain.data.shards.npy_header import NOT_ARRAY
from kftrain.errors import DataError

_IMAGES = frozenset(suffix.removeprefix(".") for suffix in IMAGE_SUFFIXES)


def decode_members(members: dict[str, bytes], text_field: str, where: str) -> Mapping[str, Any]:
    """Return the fields of one sample, from the contents of its members by extension. Raises DataError."""
    fields: dict[str, Any] = {}
    lazy: dict[str, Lazy] = {}
    for extension, content in members.items():
        if extension == "json":
            continue
        if extension in _IMAGES:
            name, value = "image", None
            lazy[name] = Lazy(content, partial(decode_image, where=f"{where}.{extension}"))
        else:
            name, value = _decode(extension, content, f"{where}.{extension}")
        if name in fields:
            raise DataError(f"two members give the field '{name}'", where=where, value=sorted(members))
        fields[name] = value
    fields = {**_read_description(members, text_field, not fields, where), **fields}
    return LazyFields({name: value for name, value in fields.items() if name not in lazy}, lazy)


def _read_description(members: dict[str, bytes], text_field: str, is_alone: bool, where: str) -> dict[str, Any]:
    """Read what the `.json` of a sample says; nothing where there is none."""
    if "json" not in members:
        return {}
    described = parse_json(members["json"], f"{where}.json")
    if not isinstance(described, dict):
        raise DataError("not a JSON object", where=f"{where}.json", value=type(described).__name__)
    if is_alone or isinstance(described.get(text_field), str):
        return with_text(described, text_field, f"{where}.json")
    return described


def _decode(extension: str, content: bytes, where: str) -> tuple[str, Any]:
    """Name and value of the field that a member gives."""
    ending = extension.rsplit(".", 1)[-1]
    if ending in PICKLES:
        raise DataError("a pickle, which can run anything, is not read", where=where, fix="store it as .npy or .json")
    if extension in ("txt", "text"):
        return "text", checked_text(content, where)
    if extension == "cls":
        return "label", _whole_number(content, where)
    if ending == "npy":
        return extension.removesuffix(".npy"), _array(content, where)
    return extension, content


def _whole_number(content: bytes, where: str) -> int:
    try:
        return int(content)
    except ValueError as error:
        raise DataError("not a whole number", where=where, value=content, fix="correct or delete it") from error


def _array(content: bytes, where: str) -> np.ndarray:
    try:
        return np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    except NOT_ARRAY as error:
        raise DataError(
            f"not an array: {error}", where=where, fix="store it with numpy.save, without objects"
        ) from error
