"""Configurations as layers of YAML: files over files, overrides over all. What keys mean is decided elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kftrain.core import plain
from kftrain.errors import ConfigError

Document = dict[str, Any]


def read(file: str | Path) -> Document:
    """The mapping in a YAML file. Raises ConfigError."""
    try:
        with open(file, "rb") as stream:  # no more of it than is looked at: it may be a device
            content = stream.read(plain.MAX_TEXT_LENGTH + 1)
        plain.require_length(content, str(file))
        text = content.decode()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the configuration: {error}", where=str(file), fix="check --config") from error
    return parse(text, str(file))


def parse(text: str, where: str) -> Document:
    """The mapping in a YAML text; empty for an empty text. Raises ConfigError."""
    document = plain.load(text, where)
    document = {} if document is None else document
    if not isinstance(document, dict):
        raise ConfigError("the configuration must be a mapping of sections", where=where, value=document)
    return document


def require_plain(documents: dict[str, Document], merged: Document) -> None:
    """Raises ConfigError that names the key where a value is not plain data, and the file that it comes from."""
    found = plain.flaw(merged)
    if found is not None:
        path, what, value = found
        key = ".".join(map(str, path))
        raise ConfigError(what, where=f"{origin(documents, path)}: {key}", value=value)


def merged(below: Document, above: Document) -> Document:
    """`above` over `below`: mappings key by key, everything else as a whole."""
    both = {key: merged(below[key], value) for key, value in above.items() if _are_mappings(below.get(key), value)}
    return {**below, **above, **both}


def beyond(document: Document, below: Document) -> Document:
    """What of `document` differs from `below`, which has no key that `document` lacks: merged over it, the same again.

    `1` and `1.0` differ. A mapping that is empty below counts as a whole.
    """
    found: Document = {}
    for key, value in document.items():
        known = below.get(key)
        if _are_mappings(value, known) and known:
            value = beyond(value, known)
            known = {}
        if (type(value), value) != (type(known), known) or key not in below:
            found[key] = value
    return found


def _are_mappings(*values: Any) -> bool:
    return all(isinstance(value, dict) for value in values)


def origin(documents: dict[str, Document], location: Sequence[Any]) -> str:
    """The file that a key comes from: the last one that has it, or else the last one."""
    for where, document in reversed(list(documents.items())):
        node: Any = document
        for part in location:
            if isinstance(node, list):
                node = dict(enumerate(node))
            node = node[part] if isinstance(node, dict) and part in node else None
        if node is not None:
            return where
    return list(documents)[-1] if documents else "config"


def override(document: Document, assignment: str) -> None:
    """Sets a key of the document, from a text like `train.steps=200`. Raises ConfigError."""
    key, separator, text = assignment.partition("=")
    path = key.strip().split(".")
    if not separator or len(path) < 2 or not all(path):
        raise ConfigError(
            "an override is section.field=value", where="--set", value=assignment, fix="e.g. train.steps=200"
        )
    if len(path) > plain.MAX_DEPTH:
        raise ConfigError("an override names too many levels", where="--set", value=f"{len(path)} of them")
    node = document
    for part in path[:-1]:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise ConfigError("an override must name a field of a section", where="--set", value=assignment)
    node[path[-1]] = plain.load(text, f"--set {key.strip()}")
