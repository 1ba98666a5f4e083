"""Writes what the documents repeat of the code: `make docs`.

The page of the architecture comes from the first sentences of the modules, the table of advice in
`docs/troubleshooting.md` from the one that the product reads.
"""

import ast
from pathlib import Path

from kftrain.errors import FailureClass, class_of
from kftrain.run.advice import TABLE, Place

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "architecture.md"
ADDING = ROOT / "docs" / "adding.md"
"""Written by hand: the end of the page."""
ADVICE_TARGET = ROOT / "docs" / "troubleshooting.md"
ADVICE_BEGIN, ADVICE_END = "<!-- advice: written by make docs -->\n", "<!-- end of advice -->"
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


def advice_table() -> str:
    """What to do by class of failure, as a worker's or a step's reader in Kubeflow is told."""
    lines = ["| class | exit code | what to do | then |", "|---|---|---|---|"]
    for kind in FailureClass:
        row = TABLE[kind][Place.KUBEFLOW]
        codes = [code for code in range(256) if class_of("", code) is kind and kind is not FailureClass.UNKNOWN]
        said = f"{row.remedy} {row.note}".strip().replace("|", "\\|")
        lines.append(f"| {kind.value} | {', '.join(map(str, codes))} | {said} | {row.next.value} |")
    return "\n".join(lines)


def troubleshooting() -> str:
    """The whole page, with the table of now."""
    before, _, rest = ADVICE_TARGET.read_text().partition(ADVICE_BEGIN)
    return f"{before}{ADVICE_BEGIN}\n{advice_table()}\n\n{ADVICE_END}{rest.partition(ADVICE_END)[2]}"


if __name__ == "__main__":
    TARGET.write_text(page())
    ADVICE_TARGET.write_text(troubleshooting())
