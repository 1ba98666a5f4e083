"""Plain data from YAML: texts, finite numbers, lists and mappings of texts, as every language and JSON can hold them.

YAML knows more: dates, bytes, sets, references, numbers without a bound. None of it survives a way through JSON, some
of it costs memory or time without a bound, and what PyYAML makes of a wrong one is an exception of any kind. So a
configuration knows only plain data, and whatever is none is refused here, in one line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterator
from typing import Any, ClassVar

import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.resolver import Resolver
from yaml.scanner import Scanner

from kftrain.errors import ConfigError

MAX_TEXT_LENGTH = 1 << 20
"""Most characters of a configuration, which is text by hand; anything larger is a mistake or an attack."""

MAX_DEPTH = 64
"""Most levels of mappings and lists in each other."""

MAX_INTEGER = 2**53 - 1
"""Largest integer that a JSON number is sure to hold: beyond, readers that know only doubles round."""

_NOT_YAML = (yaml.YAMLError, ValueError, LookupError, OverflowError)
"""Exceptions that PyYAML raises for a wrong text: its own, and those of Python's conversions of numbers and characters.
"""

_TAGS = {
    None,
    *(f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map")),
}
"""Tags that are known; None stands for every tag that is not."""

_INTEGER = re.compile(r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)$")
"""Pattern of an integer. YAML 1.1 takes 010 for 8 and 1:30 for 90; here they are text."""

Path = tuple[str | int, ...]
"""Keys and positions that lead to a value."""


def load_yaml(text: str, where: str) -> Any:
    """Parse a YAML text; None where it is empty. Raises ConfigError, for what is not plain data too."""
    require_length(text, where)
    try:
        return yaml.load(text, Loader=_PlainLoader)
    except _NOT_YAML as error:
        raise ConfigError(f"not valid YAML: {error}", where=where) from error


def require_length(text: str | bytes, where: str) -> None:
    """Raise ConfigError where a text is too long to be looked at."""
    if len(text) > MAX_TEXT_LENGTH:
        raise ConfigError("the configuration is larger than 1 MiB", where=where, fix="is it the right file?")


def flaw(value: Any) -> tuple[Path, str, Any] | None:
    """Find the first part of a value that is not plain: its place, what is wrong with it, and the part; else None."""
    return next(_iterate_flaws(value, ()), None)


def _iterate_flaws(value: Any, path: Path) -> Iterator[tuple[Path, str, Any]]:
    if len(path) > MAX_DEPTH:
        yield path[:3], f"more than {MAX_DEPTH} levels of lists and mappings", "…"
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _iterate_text_flaws(key, path)
            yield from _iterate_flaws(item, (*path, key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _iterate_flaws(item, (*path, number))
    elif isinstance(value, str):
        yield from _iterate_text_flaws(value, path)
    elif isinstance(value, float) and not math.isfinite(value):
        yield path, "not a finite number", value
    elif isinstance(value, int) and abs(value) > MAX_INTEGER:
        # Python refuses to write out one of more than 4,300 digits.
        part = value if value.bit_length() < 1000 else f"an integer of {value.bit_length()} bits"
        yield path, f"not an integer up to {MAX_INTEGER} (2^53 - 1)", part


def _iterate_text_flaws(text: str, path: Path) -> Iterator[tuple[Path, str, Any]]:
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        yield path, "text with a zero byte, or with half a character", text


if yaml.__with_libyaml__:
    from yaml import cyaml

    class _Parser(cyaml.CParser):  # type: ignore[misc,name-defined]
        """Text to events, in C: a MiB in Python takes many seconds."""

else:

    class _Parser(Reader, Scanner, Parser):  # type: ignore[no-redef]
        """Text to events."""

        def __init__(self, text: str) -> None:
            Reader.__init__(self, text)
            Scanner.__init__(self)
            Parser.__init__(self)


class _PlainLoader(Composer, _Parser, SafeConstructor, Resolver):
    """Knows null, booleans, numbers, texts, lists and mappings; what else YAML knows is text, or refused by its tag."""

    yaml_constructors: ClassVar = {tag: make for tag, make in SafeConstructor.yaml_constructors.items() if tag in _TAGS}
    yaml_implicit_resolvers = {  # noqa: RUF012 - an instance variable by its stub
        first: [(tag, _INTEGER if tag.endswith(":int") else pattern) for tag, pattern in known if tag in _TAGS]
        for first, known in Resolver.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        _Parser.__init__(self, text)  # type: ignore[call-arg]
        Composer.__init__(self)
        SafeConstructor.__init__(self)
        Resolver.__init__(self)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose the next node. Raises YAMLError for an alias, and before Python's own limit on recursion."""
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("YAML aliases are not supported; write the value out")
        if self._depth > MAX_DEPTH:
            raise yaml.YAMLError(f"more than {MAX_DEPTH} levels of lists and mappings")
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Construct the mapping, with integers as keys turned into texts, as JSON would.

        Raises YAMLError for other keys, and for one that is written twice: the first of its values would be lost.
        """
        mapping: dict[Hashable, Any] = {
            _make_text_key(key): value for key, value in super().construct_mapping(node, deep=deep).items()
        }
        if len(mapping) < len(node.value):
            names = [_make_text_key(self.construct_object(key)) for key, _ in node.value]
            twice = next(name for name in names if names.count(name) > 1)
            raise yaml.YAMLError(f"the key {twice!r} is there twice")
        return mapping


def _make_text_key(key: Hashable) -> str:
    if isinstance(key, str):
        return key
    if isinstance(key, int) and not isinstance(key, bool):
        return str(key)
    raise yaml.YAMLError(f"a key must be text, not {key!r}; write it in quotes")
