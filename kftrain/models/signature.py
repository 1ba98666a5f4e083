"""The options of a model, checked against the source of its constructor: torch need not be there, no model is built.

A typo, a model for another task, sizes at odds with each other: all of that is found in the first second of a run, on a
laptop as in the first pod of a pipeline, which has no torch. What cannot be seen without building (what a user's code
requires, a constructor that is computed) is left to the workers, who build the model before its first step.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pydantic
from pydantic import TypeAdapter, ValidationError

from kftrain.core.plugins import search_current_folder
from kftrain.errors import ConfigError
from kftrain.models.options import Taken
from kftrain.models.registry import BUILT_IN
from kftrain.models.settings import ModelConfig
from kftrain.models.sizes import SIZES, SPLITS
from kftrain.settings import section
from kftrain.trust import require_code

_NAMES: dict[str, Any] = {**vars(typing), **vars(pydantic), **vars(section)}
"""What annotations of our own models' options consist of; one that needs more is not checked here."""


def check_options(config: ModelConfig, arguments: Mapping[str, Any] | None = None) -> None:
    """Raises ConfigError for options that the constructor of the model's kind does not take.

    And for those of a built-in kind that have a wrong value, or sizes that do not fit each other; of a user's kind
    nothing is evaluated. Nothing is said about a kind whose source does not show a constructor.

    Args:
        config: The model.
        arguments: What the task tells the model; None where that is not known, and nothing is said of it.
    """
    tree, constructor = _source_of(config.kind)
    if tree is None or constructor is None:
        return
    taken, options = _taken(constructor.args), config.options()
    if arguments is None:
        taken.check_known("model", options, {})
    else:
        taken.check("model", options, arguments)
    if config.kind in BUILT_IN:
        _ask(SIZES, config.kind, {**_values(tree, constructor, options), **(arguments or {})})


def splits_of(config: ModelConfig, arguments: Mapping[str, Any] | None = None) -> dict[str, int]:
    """Option -> size that the processes which split the matrices of a built-in model must divide.

    Empty for a user's model, and where what the task tells the model is not known. After `check_options`.
    """
    tree, constructor = _source_of(config.kind)
    if config.kind not in BUILT_IN or arguments is None or tree is None or constructor is None:
        return {}
    found: dict[str, int] | None = _ask(
        SPLITS, config.kind, {**_values(tree, constructor, config.options()), **arguments}
    )
    return found or {}


def options_of(config: ModelConfig) -> dict[str, Any]:
    """What the constructor gets from the configuration; with the defaults of the others where its source shows them."""
    tree, constructor = _source_of(config.kind)
    if tree is None or constructor is None:
        return config.options()
    if config.kind in BUILT_IN:
        return _values(tree, constructor, config.options())
    shown = {name: value for name, value in _defaults(constructor.args).items() if not isinstance(value, ast.expr)}
    return {**shown, **config.options()}


def _values(tree: ast.Module, constructor: ast.FunctionDef, options: Mapping[str, Any]) -> dict[str, Any]:
    """What a constructor of ours gets: its defaults, and the options as their annotations want them."""
    names, annotations = _aliases(tree), _annotations(constructor.args)
    given = {name: _checked(name, value, _evaluated(annotations.get(name), names)) for name, value in options.items()}
    return {**_defaults(constructor.args), **given}


def _source_of(kind: str) -> tuple[ast.Module | None, ast.FunctionDef | None]:
    require_code(kind, "model.kind", BUILT_IN)
    tree = _source(BUILT_IN.get(kind, kind).partition(":")[0])
    return tree, _constructor(tree, kind) if tree else None


def _taken(arguments: ast.arguments) -> Taken:
    named, defaults = _annotations(arguments), _defaults(arguments)
    required = tuple(name for name in named if name not in defaults)
    return Taken(frozenset(named), required, arguments.kwarg is not None)


def _annotations(arguments: ast.arguments) -> dict[str, ast.expr | None]:
    """Name -> annotation of each parameter."""
    found = {argument.arg: argument.annotation for argument in (*arguments.args, *arguments.kwonlyargs)}
    found.pop("self", None)
    return found


def _defaults(arguments: ast.arguments) -> dict[str, Any]:
    """Name -> default of each parameter that has one; of one that is no literal, the expression."""
    positional = arguments.args[len(arguments.args) - len(arguments.defaults) :]
    pairs = [*zip(positional, arguments.defaults, strict=True)]
    pairs += [(a, d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is not None]
    return {argument.arg: _literal(default) for argument, default in pairs}


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return node


def _ask(questions: Mapping[str, Callable[..., Any]], kind: str, values: Mapping[str, Any]) -> Any:
    """What the function of a kind says of these values; None where not all that it wants is known."""
    question = questions.get(kind)
    wanted = inspect.signature(question).parameters if question else {}
    if question is None or not all(name in values for name in wanted):
        return None
    return question(**{name: values[name] for name in wanted})


def _checked(name: str, value: Any, annotation: Any) -> Any:
    """The value as the constructor gets it."""
    if annotation is None:
        return value
    try:
        return TypeAdapter(annotation).validate_python(value)
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
