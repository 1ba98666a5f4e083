"""The README's tree is the architecture: it must not lie."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("kftrain", "components", "pipelines")


def test_every_module_stands_in_the_readmes_tree_and_nothing_else_does():
    tree = (ROOT / "README.md").read_text().split("## The tree")[1].split("```")[1]
    folder, listed = "", set()
    for line in tree.splitlines():
        name = line.split()[0] if line.split() else ""
        if line.startswith("  ") and name.endswith(".py"):
            listed.add(f"{folder}{name}")
        elif name.endswith("/"):
            folder = name
    files = {
        path.relative_to(ROOT).as_posix()
        for top in FOLDERS
        for path in (ROOT / top).rglob("*.py")
        if path.name != "__init__.py"
    }
    assert listed == files


def test_every_command_of_the_program_stands_in_the_readme():
    from kftrain.cli import COMMANDS

    readme = (ROOT / "README.md").read_text()
    hidden = {"worker"}
    assert [name for name in COMMANDS if name not in hidden and name not in readme] == []
