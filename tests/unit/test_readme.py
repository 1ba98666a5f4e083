"""What the documents say of the repository must not lie."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_of_the_architecture_is_that_of_the_modules():
    """`make docs` writes it."""
    made = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    assert made["TARGET"].read_text() == made["page"]()


def test_the_table_of_advice_is_that_of_the_product():
    """`make docs` writes it."""
    from kftrain.errors import FailureClass

    made = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    page = made["ADVICE_TARGET"].read_text()
    assert page == made["troubleshooting"]()
    assert all(f"\n| {kind.value} | " in page for kind in FailureClass)


def test_every_folder_stands_in_the_readmes_tree():
    tree = (ROOT / "README.md").read_text().split("## The tree")[1].split("```")[1]
    folders = {path.parent.relative_to(ROOT).parts[0] for path in ROOT.glob("*/*.py")} - {"docs"}
    library = {path.parent.name for path in (ROOT / "kftrain").glob("*/*.py")}
    assert [name for name in folders if f"\n{name}/" not in tree] == []
    assert [name for name in library if name not in tree] == []


def test_every_command_of_the_program_stands_in_the_readme():
    from kftrain.cli import COMMANDS

    readme = (ROOT / "README.md").read_text()
    hidden = {"worker"}
    assert [name for name in COMMANDS if name not in hidden and name not in readme] == []
