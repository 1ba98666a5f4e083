"""Layers of YAML that make a configuration: files over files, overrides over all. Keys have no meaning here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kftrain.core import plain
from kftrain.errors import ConfigError

Document = dict[str, Any]


def read_layer(file: str | Path) -> Document:
    """Read the mapping in a YAML file. Raises ConfigError."""
    try:
        with open(file, "rb") as stream:  # no more than the limit: it may be a device that never ends
            content = stream.read(plain.MAX_TEXT_LENGTH + 1)
        plain.require_length(content, str(file))
        text = content.decode()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the configuration: {error}", where=str(file), fix="check --config") from error
    return parse_layer(text, str(file))


def parse_layer(text: str, where: str) -> Document:
    """Parse the mapping in a YAML text; an empty text is an empty one. Raises ConfigError."""
    document = plain.load_yaml(text, where)
    document = {} if document is None else document
    if not isinstance(document, dict):
        raise ConfigError("the configuration must be a mapping of sections", where=where, value=document)
    return document


def require_plain(documents: dict[str, Document], merged: Document) -> None:
    """Raise ConfigError for a value that is not plain data; it names the key and the file that it comes from."""
    flaw = plain.flaw(merged)
    if flaw is not None:
        path, what, value = flaw
        key = ".".join(map(str, path))
        raise ConfigError(what, where=f"{origin(documents, path)}: {key}", value=value)


def merged(below: Document, above: Document) -> Document:
    """Lay `above` over `below`: mappings key by key, everything else as a whole."""
    both = {key: merged(below[key], value) for key, value in above.items() if _are_mappings(below.get(key), value)}
    return {**below, **above, **both}


def beyond(document: Document, below: Document) -> Document:
    """Return what of `document` differs from `below`; merged over `below` it gives `document` again.

    `below` has no key that `document` lacks. `1` and `1.0` differ. A mapping that is empty below counts as a whole.
    """
    difference: Document = {}
    for key, value in document.items():
        known = below.get(key)
        if _are_mappings(value, known) and known:
            value = beyond(value, known)
            known = {}
        if (type(value), value) != (type(known), known) or key not in below:
            difference[key] = value
    return difference


def _are_mappings(*values: Any) -> bool:
    return all(isinstance(value, dict) for value in values)


def origin(documents: dict[str, Document], location: Sequence[Any]) -> str:
    """Name the file that a key comes from: the last one that has it, or else the last one."""
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
    """Set a key of the document from a text like `train.steps=200`. Raises ConfigError."""
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
    node[path[-1]] = plain.load_yaml(text, f"--set {key.strip()}")
