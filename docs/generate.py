"""Writes `docs/architecture.md` from the first sentences of the modules: `make docs`."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "architecture.md"
ADDING = ROOT / "docs" / "adding.md"
"""Written by hand: the end of the page."""
FOLDERS = ("pipelines", "components", "kftrain")
HEAD = """# Architecture

Who may import whom is a test, `tests/unit/test_layering.py`. This page is written by `make docs` from the first
sentence of each module; a test compares.
"""


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    line = " ".join(text.split("\n\n")[0].split())
    return line.split(". ")[0].rstrip(".")


def folders() -> list[Path]:
    """Every folder with modules, parents first."""
    found = {path.parent for top in FOLDERS for path in (ROOT / top).rglob("*.py")}
    return sorted(found, key=lambda path: (FOLDERS.index(path.relative_to(ROOT).parts[0]), path.as_posix()))


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for folder in folders():
        parts.append(f"## `{folder.relative_to(ROOT).as_posix()}/`\n")
        about = first_sentence(folder / "__init__.py")
        if about:
            parts.append(f"{about}.\n")
        modules = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
        parts.append("".join(f"- `{path.name}`: {first_sentence(path)}\n" for path in modules))
    parts.append(ADDING.read_text())
    return "\n".join(parts)


if __name__ == "__main__":
    TARGET.write_text(page())
