"""Names say what they mean: once in the package, in the words of the field; docstrings name their subject."""

import ast
import collections
import functools
import itertools
import re
from pathlib import Path

import mutants
import pytest

ROOT = Path(__file__).parents[2]

FOLDERS = ("kftrain", "components", "pipelines", "examples", "benchmarks", "tests")
"""Where Python stands."""

PROTOCOLS = {
    "main": "the entry point of a process",
    "build_launcher": "what every launcher's module has, for `launch.base.build_launcher`",
    "load_export": "what the library does, and what `import kftrain` gives of it",
    "commit": "what becomes of a checkpoint, and what `import kftrain` gives a script of it",
    "complete": "the end of a training, and what `import kftrain` gives a script of it",
    "train": "a stage, and the job that it launches",
    "evaluate": "a stage, and the job that it launches",
    "register": "a stage, and what it does in the registry",
}
"""Names that several modules define because whoever calls them calls them all alike."""


VAGUE = """ahead each found given kept own rest said settled shown spread taken told wider"""
"""Words that name nothing: no function, class, attribute or variable is called by one of them alone."""

PARTICIPLES = """
announced asked begun built called checked chosen claimed committed compared compiled completed counted cut
declared described differing done drawn dropped ended expected filled fixed followed formatted gathered gone handed
hashed held ignored joined judged known limited listed loaded looked lost made mapped marked measured merged named
opened ordered parsed permitted placed planned prepared reached recorded refused released removed renamed replaced
reported required resolved restored reused seen sent skipped sorted split started stated stored tried trusted
unmarked used verified wanted watched weighted written
"""
"""Fine words for a variable or a property; the name of a function starts with a verb."""

PRONOUNS = """
After All Another Around As Before Between Each Everything From How In It Its Not Of One Since Something That Their
They Those Until What When Where Whether Which Who Whose Why With Within Without
"""
"""First words of a docstring that does not say what it is about."""

UNCLEAN = {
    "cli": (0, 1, 0),
    "config": (0, 0, 1),
    "core": (0, 1, 0),
    "data": (4, 11, 0),
    "errors": (0, 10, 2),
    "models": (1, 0, 0),
    "parallel": (1, 1, 0),
    "run": (2, 0, 0),
    "settings": (1, 1, 0),
    "sharding": (3, 3, 0),
    "tasks": (0, 1, 0),
    "trust": (0, 1, 0),
}
"""Room -> how many names, docstrings and variables still break these rules. Numbers may only fall; a room that is not
here breaks none."""


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
    """`documents.read`, `layers.read_layer`: there the module says which; a bare `read` would not."""
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


def rooms():
    """Room (a folder of the package, or the file beside the folders) -> syntax trees of its modules."""
    by_room = collections.defaultdict(list)
    for module, tree in trees().items():
        by_room[module.removeprefix("kftrain").lstrip(".").split(".")[0] or "__init__"].append(tree)
    return by_room


def is_property(node):
    return any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


def named_things(tree):
    """(name, whether it is a function that must start with a verb) of functions, classes and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield node.name, not is_property(node) and not is_command(node)
        elif isinstance(node, ast.ClassDef):
            yield node.name.lower(), False
            fields = [field for field in node.body if isinstance(field, ast.AnnAssign | ast.Assign)]
            targets = [
                target for field in fields for target in getattr(field, "targets", [getattr(field, "target", 0)])
            ]
            yield from ((target.id, False) for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, False


def bad_names(tree):
    return [
        name
        for name, is_function in named_things(tree)
        if (word := name.strip("_")) in VAGUE.split() or (is_function and word in PARTICIPLES.split())
    ]


def docstrings(tree):
    """Docstrings of modules, classes and functions, and those that stand below constants and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield ast.get_docstring(node) or ""
        if isinstance(node, ast.Module | ast.ClassDef):
            for before, after in itertools.pairwise(node.body):
                is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                if is_text and isinstance(before, ast.Assign | ast.AnnAssign):
                    yield after.value.value


def bad_docstrings(tree):
    return [text for text in docstrings(tree) if re.split(r"[\s,;:]", text, maxsplit=1)[0] in PRONOUNS.split()]


def bad_variables(tree):
    names = (getattr(node, "arg", getattr(node, "id", "")) for node in ast.walk(tree) if is_binding(node))
    return [name for name in names if name in ("found", "each")]


def is_binding(node):
    return isinstance(node, ast.arg) or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))


def count_unclean(room_trees):
    """How many names, docstrings and variables of these modules break the rules."""
    return tuple(sum(len(bad(tree)) for tree in room_trees) for bad in (bad_names, bad_docstrings, bad_variables))


def test_names_and_docstrings_of_a_room_say_what_they_mean():
    """Clean one up and lower its numbers here; `pytest -k say_what_they_mean` prints what a room has too many of."""
    counts = {room: count_unclean(room_trees) for room, room_trees in rooms().items()}
    worse = {
        room: {"found": found, "allowed": UNCLEAN.get(room, (0, 0, 0))}
        for room, found in counts.items()
        if any(number > allowed for number, allowed in zip(found, UNCLEAN.get(room, (0, 0, 0)), strict=True))
    }
    lines = [
        f"{room}: {text.splitlines()[0]}"
        for room in worse
        for tree in rooms()[room]
        for text in [*bad_names(tree), *bad_docstrings(tree), *bad_variables(tree)]
    ]
    assert not worse, "\n".join(lines)


@pytest.mark.parametrize(
    ("code", "counts"),
    [
        ("def said(): ...", (1, 0, 0)),
        ("def _opened(): ...", (1, 0, 0)),
        ("def read_manifest(): ...", (0, 0, 0)),
        ("class A:\n @property\n def known(self): ...", (0, 0, 0)),
        ("class A:\n rest: int\n wider = 0", (2, 0, 0)),
        ("class A:\n def __init__(self):\n  self.taken = 0", (1, 0, 0)),
        ("class Ahead: ...", (1, 0, 0)),
        ('def f():\n "Of its rows."', (0, 1, 0)),
        ('A = 1\n"What it is."', (0, 1, 0)),
        ('class A:\n a: int\n "Which it is."', (0, 1, 0)),
        ('"""Tables of what is sold."""', (0, 0, 0)),
        ("found = 0\nfor each in []: ...", (0, 0, 2)),
        ("def f(found): ...", (0, 0, 1)),
    ],
)
def test_what_is_unclean(code, counts):
    assert count_unclean([ast.parse(code)]) == counts


def test_every_mutant_breaks_a_text_that_is_there_once():
    assert not mutants.describe_stale(mutants.MUTANTS)
