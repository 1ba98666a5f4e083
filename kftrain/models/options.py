"""Keys of a configuration section as arguments of a class or function, ours or a user's.

The signature is the only description of what is accepted: names, which are required, and, where parameters
are annotated, types and ranges (`Annotated[int, Field(ge=1)]`). An error names the option and, for a misspelt
one, the nearest that exists.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from kftrain.core.plugins import is_plugin, user_code
from kftrain.errors import ConfigError
from kftrain.trust import load_code

_LENIENT = ConfigDict(arbitrary_types_allowed=True)


def import_kind(kind: str, built_in: Mapping[str, str], section: str) -> Callable[..., Any]:
    """Import the class or function behind a `kind`: a key of `built_in`, whose values are `module:attr`, or one itself.

    Nothing is called. Raises ConfigError for an unknown kind, with the nearest, and for what is neither a class nor a
    function.
    """
    where = f"{section}.kind"
    if kind not in built_in and not is_plugin(kind):
        raise ConfigError(
            "unknown kind",
            where=where,
            value=kind,
            fix=suggest(kind, built_in, "or a module:attr of your own"),
        )
    target = load_code(kind, where, built_in)
    if not callable(target) or inspect.isbuiltin(target):
        raise ConfigError("neither a class nor a function", where=where, value=kind, fix="name what builds it")
    return target  # type: ignore[no-any-return]


def construct(
    target: Callable[..., Any],
    kind: str,
    section: str,
    options: Mapping[str, Any],
    arguments: Mapping[str, Any] | None = None,
) -> Any:
    """Call `target(**arguments, **options)`, with the options converted to its annotations (`2` for a float is fine).

    `options` come from the user's section, `arguments` from our own code. Raises ConfigError for options that are
    unknown, missing or of the wrong type, and UserCodeError if a user's own target raises anything else.
    """
    arguments = arguments or {}
    Taken.by(target).check(section, options, arguments)
    converted = _convert(target, section, options)
    if not is_plugin(kind):
        return target(**arguments, **converted)
    with user_code(f"{section}.kind"):
        return target(**arguments, **converted)


def with_defaults(target: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that `target` is called with, and the defaults of the others."""
    parameters = inspect.signature(target).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty} | dict(options)


def suggest(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Suggest a fix for an unknown name: the nearest known one, else all of them."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if near:
        return f"did you mean '{near[0]}'?"
    return ", ".join(part for part in (f"known: {', '.join(names) or 'none'}", otherwise) if part)


@dataclass(frozen=True)
class Taken:
    """Names of the parameters that a class or a function takes."""

    names: frozenset[str]
    required: tuple[str, ...] = ()
    """Names without a default."""
    takes_any: bool = False

    @classmethod
    def by(cls, target: Callable[..., Any]) -> Taken:
        """Read the names from a signature."""
        parameters = inspect.signature(target).parameters.values()
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        required = tuple(p.name for p in named if p.default is p.empty)
        return cls(frozenset(p.name for p in named), required, any(p.kind is p.VAR_KEYWORD for p in parameters))

    def check(self, section: str, options: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
        """Raise ConfigError if a call with these options and these arguments of ours would not be accepted."""
        self.check_known(section, options, arguments)
        refused = [] if self.takes_any else [name for name in arguments if name not in self.names]
        if refused:
            raise ConfigError(
                f"does not accept {', '.join(refused)}",
                where=f"{section}.kind",
                fix="add the parameters, or **arguments, to it",
            )
        missing = [name for name in self.required if name not in options and name not in arguments]
        if missing:
            raise ConfigError("a required option is missing", where=f"{section}.{missing[0]}", fix="set it")

    def check_known(self, section: str, options: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
        """Raise ConfigError for an option that is not taken, or that is not for the user to set."""
        for name, value in options.items():
            if name in arguments:
                raise ConfigError("is set by the task", where=f"{section}.{name}", value=value, fix="remove it here")
            if name not in self.names and not self.takes_any:
                known = sorted(self.names - set(arguments))
                raise ConfigError("unknown option", where=f"{section}.{name}", value=value, fix=suggest(name, known))


def _convert(target: Callable[..., Any], section: str, options: Mapping[str, Any]) -> dict[str, Any]:
    hints = _read_hints(target)
    converted = {}
    for name, value in options.items():
        try:
            converted[name] = (
                TypeAdapter(hints[name], config=_LENIENT).validate_python(value) if name in hints else value
            )
        except ValidationError as error:
            message = error.errors()[0]["msg"]
            raise ConfigError(message[0].lower() + message[1:], where=f"{section}.{name}", value=value) from error
    return converted


def _read_hints(target: Callable[..., Any]) -> dict[str, Any]:
    try:
        parameters = inspect.signature(target, eval_str=True).parameters
    except NameError:  # an annotation that exists for the type checker only
        return {}
    return {name: p.annotation for name, p in parameters.items() if p.annotation is not p.empty}
