"""Configurations as layers of YAML: files over files, overrides over all. What keys mean is decided elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from kftrain.errors import ConfigError

MAX_CONFIG_BYTES = 1 << 20
"""A configuration is text by hand; anything larger is a mistake or an attack."""

Document = dict[str, Any]


def read(file: str | Path) -> Document:
    """The mapping in a YAML file. Raises ConfigError."""
    try:
        if Path(file).stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(
                "the configuration file is larger than 1 MiB", where=str(file), fix="is it the right file?"
            )
        text = Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration: {error}", where=str(file), fix="check --config") from error
    return parse(text, str(file))


def parse(text: str, where: str) -> Document:
    """The mapping in a YAML text; empty for an empty text. Raises ConfigError."""
    try:
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)):
            raise ConfigError("YAML aliases are not supported", where=where, fix="write the value out")
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"not valid YAML: {error}", where=where) from error
    document = {} if document is None else document
    if not isinstance(document, dict):
        raise ConfigError("the configuration must be a mapping of sections", where=where, value=document)
    return document


def merged(below: Document, above: Document) -> Document:
    """`above` over `below`: mappings key by key, everything else as a whole."""
    both = {key: merged(below[key], value) for key, value in above.items() if _are_mappings(below.get(key), value)}
    return {**below, **above, **both}


def _are_mappings(*values: Any) -> bool:
    return all(isinstance(value, dict) for value in values)


def origin(documents: dict[str, Document], location: Sequence[Any]) -> str:
    """The file that a key comes from: the last one that has it, or else the last one."""
    for where, document in reversed(list(documents.items())):
        node: Any = document
        for part in location:
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
    node = document
    for part in path[:-1]:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise ConfigError("an override must name a field of a section", where="--set", value=assignment)
    try:
        node[path[-1]] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"not a YAML value: {error}", where="--set", value=assignment) from error
