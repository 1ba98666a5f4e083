"""Writes what the documents repeat of the code: `make docs`.

The page of the architecture comes from the first sentences of the modules, that of the configuration from its sections,
the table of advice in `docs/troubleshooting.md` from the one that the product reads.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import types
import typing
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from kftrain.config import Config
from kftrain.errors import FailureClass, class_of
from kftrain.run.advice import TABLE, Place
from kftrain.settings.section import Section
from kftrain.stages.resolve import KNOBS

ROOT = Path(__file__).parents[1]
ADDING = ROOT / "docs" / "adding.md"
"""Written by hand: the end of the page."""
ADVICE_TARGET = ROOT / "docs" / "troubleshooting.md"
ADVICE_BEGIN, ADVICE_END = "<!-- advice: written by make docs -->\n", "<!-- end of advice -->"
PARITY_TARGET = ROOT / "docs" / "parallelism.md"
PARITY_BEGIN, PARITY_END = "<!-- parity: written by make docs -->\n", "<!-- end of parity -->"
FOLDERS = ("pipelines", "components", "kftrain")

ARCHITECTURE = """# Architecture

This page has one line for every module. `make docs` writes it from the first sentence of the module's docstring, and a
test compares. `tests/unit/test_layering.py` says who may import whom.
"""

CONFIGURATION = """# Configuration

A run is configured by a YAML file of sections, such as `run` and `data`. This page lists every key with its type, its
default and its meaning. `make docs` writes the page from the source, and a test compares.

- `--config FILE` reads a file. You may repeat it: a later file wins, key by key.
- `--set train.steps=200` overrides one key.
- `kftrain config show` prints the result. kftrain refuses an unknown key and names the nearest known one.
"""

PARAMETERS = """## Parameters of the pipeline

Knobs are the keys that people change from run to run, as parameters of the pipeline. A knob that is `''` or `0` means
"as in the configuration"; any other value wins. [pipeline.md](pipeline.md#parameters) explains the other parameters,
`config`, `config_json` and `resume_run`.

| parameter | key |
|---|---|
"""

BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
LARGEST = 2**53 - 1
"""What every number is at most is not worth saying."""


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    line = " ".join(text.split("\n\n")[0].split())
    return line.split(". ")[0].rstrip(".")


def folders() -> list[Path]:
    """Every folder with modules, parents first."""
    found = {path.parent for top in FOLDERS for path in (ROOT / top).rglob("*.py")}
    return sorted(found, key=lambda path: (FOLDERS.index(path.relative_to(ROOT).parts[0]), path.as_posix()))


def architecture() -> str:
    """Each module with one line."""
    parts = [ARCHITECTURE]
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


def parallelism() -> str:
    """The whole page, with what the test's table of now proves."""
    before, _, rest = PARITY_TARGET.read_text().partition(PARITY_BEGIN)
    sys.path.insert(0, str(ROOT / "tests"))
    try:
        table = importlib.import_module("helpers.parity.page").table()
    finally:
        sys.path.pop(0)
    return f"{before}{PARITY_BEGIN}\n{table}\n{PARITY_END}{rest.partition(PARITY_END)[2]}"


def configuration() -> str:
    """Each key of the configuration, and the pipeline's parameters."""
    sections = [part for name, field in Config.model_fields.items() for part in section(name, field.annotation)]
    knobs = "".join(f"| `{parameter}` | `{key}` |\n" for parameter, key in KNOBS.items())
    return "\n".join([CONFIGURATION, *sections, PARAMETERS + knobs])


def section(name: str, kind: Any) -> list[str]:
    """A section and the ones within it, outer ones first."""
    fields: dict[str, FieldInfo] = kind.model_fields
    inner = {key: field.annotation for key, field in fields.items() if is_section(field.annotation)}
    rows = [row(field.alias or key, field) for key, field in fields.items() if key not in inner]
    listed = {f"{key}[]": item_of(field.annotation) for key, field in fields.items() if is_list(field.annotation)}
    inner |= listed
    head = f"## `{name}`\n\n{inspect.getdoc(kind)}\n\n| key | type | default | |\n|---|---|---|---|\n"
    return [head + "".join(rows), *(part for key, each in inner.items() for part in section(f"{name}.{key}", each))]


def row(key: str, field: FieldInfo) -> str:
    """One line of a section's table."""
    kind = " ".join([type_name(field.annotation), *bounds(field.metadata)])
    default = field.get_default(call_default_factory=True)
    cells = (f"`{key}`", kind, shown(default), " ".join((field.description or "").split()))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def is_section(kind: Any) -> bool:
    """Whether a field is a section of its own."""
    return inspect.isclass(kind) and issubclass(kind, Section)


def item_of(kind: Any) -> Any:
    """Of what a list is one."""
    return typing.get_args(kind)[0]


def is_list(kind: Any) -> bool:
    """Whether a field is a list of sections."""
    return typing.get_origin(kind) in (tuple, list) and is_section(item_of(kind))


def type_name(kind: Any) -> str:
    """A type as people write it: `int`, one of some texts, a list of something."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return " ".join([type_name(parts[0]), *bounds(parts[1:])])
    if origin is typing.Literal:
        return " or ".join(f"`{part}`" for part in parts)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(part) for part in parts)
    if is_list(kind):
        return "list"
    if origin in (tuple, list):
        return f"list of {type_name(parts[0])}"
    if origin is dict:
        return f"mapping to {type_name(parts[1])}"
    return {str: "text", type(None): "null", Any: "anything"}.get(kind, getattr(kind, "__name__", str(kind)))


def bounds(metadata: Any) -> list[str]:
    """The limits of a number, as `≥ 1`."""
    parts = [part for each in metadata for part in (getattr(each, "metadata", None) or [each])]
    found = [(sign, getattr(part, name, None)) for part in parts for name, sign in BOUNDS.items()]
    return [f"{sign} {limit}" for sign, limit in found if limit is not None and limit != LARGEST]


def shown(default: Any) -> str:
    """A default as YAML has it."""
    if default is PydanticUndefined:
        return "required"
    if default is None or isinstance(default, bool):
        return f"`{ {None: 'null', True: 'true', False: 'false'}[default] }`".replace(" ", "")
    if isinstance(default, tuple | list):
        return f"`[{', '.join(str(item) for item in default)}]`"
    return "`''`" if default == "" else f"`{default}`"


PAGES = {
    "docs/architecture.md": architecture,
    "docs/configuration.md": configuration,
    "docs/parallelism.md": parallelism,
    "docs/troubleshooting.md": troubleshooting,
}
"""Path -> what makes the page."""


if __name__ == "__main__":
    for path, page in PAGES.items():
        (ROOT / path).write_text(page())
