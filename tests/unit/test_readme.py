"""What the documents say of the repository must not lie."""

import re
import runpy
from pathlib import Path
from typing import get_args

import pytest

ROOT = Path(__file__).parents[2]


MADE = runpy.run_path(str(ROOT / "docs" / "generate.py"))["PAGES"]


@pytest.mark.parametrize("path", MADE)
def test_a_page_that_is_made_from_the_source_is_up_to_date(path):
    """`make docs` writes it."""
    assert (ROOT / path).read_text() == MADE[path]()


def test_the_table_of_advice_has_every_class():
    from kftrain.errors import FailureClass

    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert all(f"\n| {kind.value} | " in page for kind in FailureClass)


def test_every_folder_stands_in_the_readmes_tree():
    tree = (ROOT / "README.md").read_text().split("## The tree")[1].split("```")[1]
    folders = {path.parent.relative_to(ROOT).parts[0] for path in ROOT.glob("*/*.py")} - {"docs"}
    library = {path.parent.name for path in (ROOT / "kftrain").glob("*/*.py")}
    assert [name for name in folders if f"\n{name}/" not in tree] == []
    assert [name for name in library if name not in tree] == []


def test_every_command_of_the_program_stands_in_the_readme():
    from kftrain.cli import COMMANDS

    block = (ROOT / "README.md").read_text().split("## Commands")[1].split("```")[1]
    shown = {word for line in block.splitlines() for word in re.findall(r"[a-z-]+", line.partition("   ")[0])}
    hidden = {"worker", "server"}
    assert [name for name in COMMANDS if name not in hidden | shown] == []


def test_the_readme_says_which_parallelism_is_there_and_which_not():
    from kftrain.parallel.settings import ParallelConfig

    there, missing = (
        (ROOT / "README.md").read_text().split("## What is there")[1].split("##")[0].split("Not there yet:")
    )
    strategies = set(get_args(ParallelConfig.model_fields["strategy"].annotation)) - {"auto"}
    assert all(f"`{name}`" in there for name in strategies)
    assert all(
        f"`{axis}`" in there and f"`{axis}`" not in missing for axis in ("tensor", "pipeline", "expert", "context")
    )


def test_every_line_that_installs_takes_the_versions_that_are_tested():
    """PyPI's newest torch is none that was tested, and 5 GB with CUDA."""
    readme = (ROOT / "README.md").read_text()
    lines = [line for line in readme.splitlines() if line.startswith("pip install")]
    assert len(lines) == 3 and all("-c constraints.txt" in line for line in lines)
    assert all("--extra-index-url $CPU" in line for line in lines if "[train" in line or "[all" in line)
    extras = (ROOT / "pyproject.toml").read_text()
    (tested,) = re.findall(r"torch==2\.(\d+)", (ROOT / "constraints.txt").read_text())
    assert f'"torch>=2.11,<2.{int(tested) + 1}"' in extras
    assert re.search(r'^all = \[.*"pytest>=', extras, re.MULTILINE), "what `kftrain init` writes has tests"
