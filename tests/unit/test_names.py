"""A public name means one thing in the whole package."""

import ast
import collections
import functools
from pathlib import Path

ROOT = Path(__file__).parents[2]

PROTOCOLS = {
    "main": "the entry point of a process",
    "section": "what every part of a report has",
    "render": "what every format of a report has",
    "build_launcher": "what every launcher's module has, for `launch.base.build_launcher`",
    "load_export": "what the library does, and what `import kftrain` gives of it",
    "train": "a stage, and the job that it launches",
    "evaluate": "a stage, and the job that it launches",
    "register": "a stage, and what it does in the registry",
}
"""Names that several modules define because whoever calls them calls them all alike."""


@functools.cache
def trees():
    """Module name -> its syntax tree."""
    files = sorted((ROOT / "kftrain").rglob("*.py"))
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): ast.parse(path.read_text())
        for path in files
    }


def is_command(node):
    """Whether click calls it, by the name that its decorator gives it."""
    return any("command(" in ast.unparse(decorator) for decorator in node.decorator_list)


def definitions():
    """Public name -> (module, whether it is a class) of each of its definitions at module level."""
    found = collections.defaultdict(list)
    for module, tree in trees().items():
        for node in tree.body:
            is_public = isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
            if is_public and not is_command(node):
                found[node.name].append((module, isinstance(node, ast.ClassDef)))
    return found


def imported_by_name():
    """(module, name) of everything that is imported by its own name somewhere in the package."""
    return {
        (node.module, alias.name)
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_a_public_class_has_a_name_of_its_own():
    twice = {name: places for name, places in definitions().items() if len(places) > 1}
    assert not {name: places for name, places in twice.items() if any(is_class for _, is_class in places)}


def test_a_public_function_has_a_name_of_its_own_or_is_called_through_its_module_only():
    """`documents.read`, `layers.read`: there the module says which; a bare `read` would not."""
    by_name = imported_by_name()
    wrong = {
        name: [module for module, _ in places]
        for name, places in definitions().items()
        if len(places) > 1 and name not in PROTOCOLS and any((module, name) in by_name for module, _ in places)
    }
    assert not wrong


def test_every_protocol_has_several_that_follow_it():
    assert not [name for name in PROTOCOLS if len(definitions()[name]) < 2]
