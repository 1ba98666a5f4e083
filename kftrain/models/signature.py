"""The options of a model, checked against the source of its constructor: torch need not be there, no model is built.

A typo is found in the first second of a run, on a laptop as in the first pod of a pipeline, which has no torch. What
cannot be seen without building (values that are at odds with each other, a constructor that is computed) is left to
the workers, who build the model before its first step.
"""

from __future__ import annotations

import ast
import importlib.util
import typing
from pathlib import Path
from typing import Any

import pydantic
from pydantic import TypeAdapter, ValidationError

from kftrain.config import ModelConfig
from kftrain.errors import ConfigError
from kftrain.models.options import suggest
from kftrain.models.registry import BUILT_IN
from kftrain.plugins import search_current_folder
from kftrain.settings import section

_NAMES: dict[str, Any] = {**vars(typing), **vars(pydantic), **vars(section)}
"""What annotations of our own models' options consist of; one that needs more is not checked here."""


def check_options(config: ModelConfig) -> None:
    """Raises ConfigError for an option that the constructor of the model's kind does not take.

    And for one of a built-in kind that has a wrong value; of a user's kind nothing is evaluated. Nothing is said about
    a kind whose source does not show a constructor.
    """
    tree = _source(BUILT_IN.get(config.kind, config.kind).partition(":")[0])
    constructor = _constructor(tree, config.kind) if tree else None
    if tree is None or constructor is None or constructor.args.kwarg:
        return
    known = {argument.arg: argument.annotation for argument in (*constructor.args.args, *constructor.args.kwonlyargs)}
    known.pop("self", None)
    names = _aliases(tree) if config.kind in BUILT_IN else {}
    for name, value in config.options().items():
        if name not in known:
            raise ConfigError("unknown option", where=f"model.{name}", value=value, fix=suggest(name, known))
        _check_value(name, value, _evaluated(known[name], names))


def _check_value(name: str, value: Any, annotation: Any) -> None:
    if annotation is None:
        return
    try:
        TypeAdapter(annotation).validate_python(value)
    except ValidationError as error:
        message = error.errors()[0]["msg"]
        raise ConfigError(message[0].lower() + message[1:], where=f"model.{name}", value=value) from error


def _source(module: str) -> ast.Module | None:
    """The source of a module, which is not imported; None where there is none to be read."""
    search_current_folder()
    try:
        spec = importlib.util.find_spec(module)
        return ast.parse(Path(spec.origin).read_text()) if spec and spec.origin else None
    except (ImportError, ValueError, OSError, SyntaxError):
        return None


def _constructor(tree: ast.Module, kind: str) -> ast.FunctionDef | None:
    """The `__init__` of a class, or a function, without decorators; None for anything else."""
    name = BUILT_IN.get(kind, kind).partition(":")[2]
    found = next((node for node in tree.body if getattr(node, "name", None) == name), None)
    if isinstance(found, ast.ClassDef) and not found.decorator_list and not found.keywords:
        found = next((node for node in found.body if getattr(node, "name", None) == "__init__"), None)
    return found if isinstance(found, ast.FunctionDef) and not found.decorator_list else None


def _aliases(tree: ast.Module) -> dict[str, Any]:
    """The names that annotations of one of our modules consist of, with those that it makes for itself."""
    found = dict(_NAMES)
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = _evaluated(node.value, found)
    return found


def _evaluated(node: ast.expr | None, names: dict[str, Any]) -> Any:
    """The value of an annotation in our own source; None where it needs what is not among the names."""
    if node is None or not names:
        return None
    try:
        return eval(compile(ast.Expression(node), "annotation", "eval"), dict(names))
    except (NameError, TypeError, AttributeError):
        return None
