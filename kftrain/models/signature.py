"""Check of a model's options against the source of its constructor: without torch, and without building a model.

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
from kftrain.models.expert_layouts import of_mixture_of_experts
from kftrain.models.options import Taken
from kftrain.models.registry import BUILT_IN
from kftrain.models.settings import ModelConfig
from kftrain.models.sizes import SIZES, SPLITS
from kftrain.settings import section
from kftrain.trust import require_code

CHECKS = {**SIZES, "mixture_of_experts": of_mixture_of_experts}

SPLIT_BY_OTHERS = ("num_layers", "num_experts", "sequence_length")
"""Options whose values other axes than `tensor` split."""

_NAMES: dict[str, Any] = {**vars(typing), **vars(pydantic), **vars(section)}
"""Names in the annotations of our own models' options; an annotation with another name is not checked here."""


def check_options(config: ModelConfig, arguments: Mapping[str, Any] | None = None) -> None:
    """Raise ConfigError for options that the constructor of the model's kind does not take.

    For a built-in kind also for wrong values, and for sizes that do not fit each other; nothing of a user's kind is
    evaluated. A kind whose source does not show a constructor is not checked.

    Args:
        config: The model.
        arguments: What the task tells the model; None where that is not known, and nothing is said of it.
    """
    tree, constructor = _find_source(config.kind)
    if tree is None or constructor is None:
        return
    taken, options = _read_parameters(constructor.args), config.options()
    if arguments is None:
        taken.check_known("model", options, {})
    else:
        taken.check("model", options, arguments)
    if config.kind in BUILT_IN:
        _call_check(CHECKS, config.kind, {**_complete_options(tree, constructor, options), **(arguments or {})})


def splits_of(config: ModelConfig, arguments: Mapping[str, Any] | None = None) -> dict[str, int]:
    """Return the sizes of what the axes of a mesh split of a built-in model, by option.

    Empty for a user's model, and if it is not known what the task tells the model. Call `check_options` first.
    """
    tree, constructor = _find_source(config.kind)
    if config.kind not in BUILT_IN or arguments is None or tree is None or constructor is None:
        return {}
    values = {**_complete_options(tree, constructor, config.options()), **arguments}
    splits: dict[str, int] | None = _call_check(SPLITS, config.kind, values)
    return {**(splits or {}), **{name: values[name] for name in SPLIT_BY_OTHERS if name in values}}


def options_of(config: ModelConfig) -> dict[str, Any]:
    """Return the configuration's options, and the defaults of others as far as the constructor's source shows them."""
    tree, constructor = _find_source(config.kind)
    if tree is None or constructor is None:
        return config.options()
    if config.kind in BUILT_IN:
        return _complete_options(tree, constructor, config.options())
    defaults = _read_defaults(constructor.args)
    return {name: value for name, value in defaults.items() if not isinstance(value, ast.expr)} | config.options()


def _complete_options(tree: ast.Module, constructor: ast.FunctionDef, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a constructor of ours: its defaults, and the options converted to its annotations."""
    names, annotations = _collect_names(tree), _read_annotations(constructor.args)
    given = {name: _convert(name, value, _evaluate(annotations.get(name), names)) for name, value in options.items()}
    return {**_read_defaults(constructor.args), **given}


def _find_source(kind: str) -> tuple[ast.Module | None, ast.FunctionDef | None]:
    require_code(kind, "model.kind", BUILT_IN)
    tree = _parse_module(BUILT_IN.get(kind, kind).partition(":")[0])
    return tree, _find_constructor(tree, kind) if tree else None


def _read_parameters(arguments: ast.arguments) -> Taken:
    named, defaults = _read_annotations(arguments), _read_defaults(arguments)
    required = tuple(name for name in named if name not in defaults)
    return Taken(frozenset(named), required, arguments.kwarg is not None)


def _read_annotations(arguments: ast.arguments) -> dict[str, ast.expr | None]:
    """Return the annotation of each parameter, by name."""
    every = (*arguments.args, *arguments.kwonlyargs)
    return {argument.arg: argument.annotation for argument in every if argument.arg != "self"}


def _read_defaults(arguments: ast.arguments) -> dict[str, Any]:
    """Return the default of each parameter that has one; if it is no literal, its expression."""
    positional = arguments.args[len(arguments.args) - len(arguments.defaults) :]
    pairs = [*zip(positional, arguments.defaults, strict=True)]
    pairs += [(a, d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is not None]
    return {argument.arg: _parse_literal(default) for argument, default in pairs}


def _parse_literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return node


def _call_check(questions: Mapping[str, Callable[..., Any]], kind: str, values: Mapping[str, Any]) -> Any:
    """Call the function of a kind with the values that it takes; None if not all of them are known."""
    question = questions.get(kind)
    wanted = inspect.signature(question).parameters if question else {}
    if question is None or not all(name in values for name in wanted):
        return None
    return question(**{name: values[name] for name in wanted})


def _convert(name: str, value: Any, annotation: Any) -> Any:
    """Convert an option to its annotation. Raises ConfigError."""
    if annotation is None:
        return value
    try:
        return TypeAdapter(annotation).validate_python(value)
    except ValidationError as error:
        message = error.errors()[0]["msg"]
        raise ConfigError(message[0].lower() + message[1:], where=f"model.{name}", value=value) from error


def _parse_module(module: str) -> ast.Module | None:
    """Parse the source of a module without importing it; None if there is none to be read."""
    search_current_folder()
    try:
        spec = importlib.util.find_spec(module)
        return ast.parse(Path(spec.origin).read_text()) if spec and spec.origin else None
    except (ImportError, ValueError, OSError, SyntaxError):
        return None


def _find_constructor(tree: ast.Module, kind: str) -> ast.FunctionDef | None:
    """Find the `__init__` of a class, or a function, without decorators; None for anything else."""
    name = BUILT_IN.get(kind, kind).partition(":")[2]
    target = next((node for node in tree.body if getattr(node, "name", None) == name), None)
    if isinstance(target, ast.ClassDef) and not target.decorator_list and not target.keywords:
        target = next((node for node in target.body if getattr(node, "name", None) == "__init__"), None)
    return target if isinstance(target, ast.FunctionDef) and not target.decorator_list else None


def _collect_names(tree: ast.Module) -> dict[str, Any]:
    """Collect the names in the annotations of one of our modules, with those that the module defines itself."""
    names = dict(_NAMES)
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            names[node.targets[0].id] = _evaluate(node.value, names)
    return names


def _evaluate(node: ast.expr | None, names: dict[str, Any]) -> Any:
    """Evaluate an annotation of our own source; None if it needs a name that is not among these."""
    if node is None or not names:
        return None
    try:
        return eval(compile(ast.Expression(node), "annotation", "eval"), dict(names))
    except (NameError, TypeError, AttributeError):
        return None
