"""Which fields a dataset has whose samples are files of others: by their extensions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kftrain.data.schema import BYTES, Field, SampleSchema
from kftrain.data.shards.manifest import check_schema
from kftrain.data.sources.decoding import IMAGE_SUFFIXES

IMAGE_EXTENSIONS = tuple(suffix.removeprefix(".") for suffix in IMAGE_SUFFIXES)

_NAMES = {**dict.fromkeys(IMAGE_EXTENSIONS, "image"), "txt": "text", "text": "text", "cls": "label"}


def field_name(extension: str) -> str:
    """The field that a member gives where nobody says another: as the records of such a shard have it."""
    if extension in _NAMES:
        return _NAMES[extension]
    return (extension.removesuffix(".npy") if extension != "npy" else extension).replace(".", "_")


def schema_of(extensions: Iterable[str], named: Mapping[str, Sequence[str]], where: str) -> SampleSchema:
    """A field for each name in `named`, with these extensions; where none is named, one for each kind of member.

    Raises DataError for what no field can be.
    """
    groups: dict[str, list[str]] = {name: list(of) for name, of in named.items()}
    for extension in sorted(set(extensions)) if not named else ():
        groups.setdefault(field_name(extension), []).append(extension)
    schema = SampleSchema(tuple(Field(name, BYTES, (), tuple(groups[name])) for name in sorted(groups)))
    check_schema(schema, where)
    return schema
