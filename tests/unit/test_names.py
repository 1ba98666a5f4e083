"""A public name means one thing in the whole package, and an attribute has a line of its own."""

import ast
import collections
import functools
import itertools
from pathlib import Path

import mutants
import pytest

ROOT = Path(__file__).parents[2]

FOLDERS = ("kftrain", "components", "pipelines", "examples", "benchmarks", "tests")
"""Where Python stands."""

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


def attributes_of(statement, is_in_class):
    """Targets of an assignment that are attributes: each name in the body of a class, `self.x` in a constructor."""
    targets = [part for each in statement.targets for part in getattr(each, "elts", [each])]
    return [each for each in targets if isinstance(each, ast.Name if is_in_class else ast.Attribute)]


def is_crowded(statement, is_in_class):
    """Whether one statement defines several attributes by values of their own; `a, b = f()` and aliases are one."""
    if not isinstance(statement, ast.Assign) or len(attributes_of(statement, is_in_class)) < 2:
        return False
    is_alias = isinstance(statement.value, ast.Name)
    is_unpacked = len(statement.targets) == 1 and not isinstance(statement.value, ast.Tuple)
    return not is_alias and not is_unpacked


def crowded_in(tree):
    """Statements that define several attributes, and those that share a line with another."""
    for found in [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]:
        makers = [node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
        assigned = [node for node in found.body if isinstance(node, ast.Assign | ast.AnnAssign)]
        yield from (node for node in assigned if is_crowded(node, is_in_class=True))
        yield from (after for before, after in itertools.pairwise(assigned) if before.end_lineno == after.lineno)
        yield from (node for each in makers for node in ast.walk(each) if is_crowded(node, is_in_class=False))


def crowded_statements():
    """(file, statement) of all that is crowded."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield from ((path, node) for node in crowded_in(ast.parse(path.read_text())))


def test_one_attribute_per_line():
    assert not [f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}" for path, node in crowded_statements()]


@pytest.mark.parametrize(
    ("code", "num_crowded"),
    [
        ("class A:\n a, b = 0, 1", 1),
        ("class A:\n a: int; b: int", 1),
        ("class A:\n a = b = 0", 1),
        ("class A:\n a = 0\n b: int = 1", 0),
        ("class A:\n def __init__(self):\n  self.a, self.b = 0, 1", 1),
        ("class A:\n def __init__(self):\n  if self:\n   self.a = self.b = 0", 1),
        ("class A:\n def __init__(self):\n  self.a, self.b = f()\n  c, d = 0, 1", 0),
        ("class A:\n def f(self): ...\n g = h = f", 0),
    ],
)
def test_what_is_crowded(code, num_crowded):
    assert len(list(crowded_in(ast.parse(code)))) == num_crowded


def test_every_mutant_breaks_a_text_that_is_there_once():
    assert not mutants.describe_stale(mutants.MUTANTS)
