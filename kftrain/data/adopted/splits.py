"""Which split the shards of others are in: what their names say, else a hash of each sample's key."""

from __future__ import annotations

import re

from kftrain.data.sources.decoding import HELD_OUT_NAMES, held_out_name
from kftrain.errors import DataError

_TRAIN = "train"


def splits_by_name(names: list[str], where: str) -> dict[str, str] | None:
    """Name -> `train`, `validation`, or '' for what nobody reads; None where names do not tell.

    They tell where some say `train` and some `validation`, `val` or `test`, in a folder's name or in their own, as
    `imagenet-train-000000.tar`. Of the latter the first that is there is our validation split, as in folders of images.
    Raises DataError for a shard that says nothing then.
    """
    said = {name: _said(name) for name in names}
    held_out = held_out_name(said.values())
    if held_out is None or _TRAIN not in said.values():
        return None
    for name, word in said.items():
        if not word:
            raise DataError(
                "the name of the shard does not say which split it is in, as those of others do",
                where=where,
                value=name,
                fix=f"put it below {_TRAIN} or {held_out}, or adopt only the shards of one kind",
            )
    return {name: {_TRAIN: "train", held_out: "validation"}.get(word, "") for name, word in said.items()}


def _said(name: str) -> str:
    """The word that the first part of a path says that says only one of them."""
    for part in name.lower().split("/"):
        words = {word for word in re.split(r"[^a-z]+", part) if word in (_TRAIN, *HELD_OUT_NAMES)}
        if len(words) == 1:
            return words.pop()
    return ""
