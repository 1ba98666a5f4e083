"""`kftrain init`: a project of one's own that trains at once, to be changed file by file."""

from __future__ import annotations

import importlib.util
import keyword
import re
import shlex
from importlib import resources
from pathlib import Path

import click
import jinja2

from kftrain.client.console import echo
from kftrain.errors import ConfigError

FILES = {
    "config.yaml": "config.yaml",
    "data.py": "{package}/data.py",
    "init.py": "{package}/__init__.py",
    "model.py": "{package}/model.py",
    "task.py": "{package}/task.py",
    "test_task.py": "tests/test_{package}.py",
}
"""Template -> where it goes in the project."""

MAX_NAME_CHARACTERS = 40
"""Number of characters that `run.name` may have."""


@click.command("init")
@click.argument("folder", metavar="DIR")
def init_command(folder: str) -> None:
    """Write a project: a configuration with comments, data, a task, a model, and a test."""
    root = Path(folder).expanduser()
    echo("\n".join(f"wrote {path}" for path in write_project(root, name_package(root))))
    echo(f"next: cd {shlex.quote(str(root))} && python -m pytest && PYTHONPATH=$PWD kftrain run --config config.yaml")


def name_package(root: Path) -> str:
    """Make the name of the project's package from its folder's name, so that Python can import it.

    Raises ConfigError where that is no name, or another module's.
    """
    name = re.sub(r"[^a-z0-9]+", "_", root.resolve().name.lower()).strip("_")
    fix = "name the folder after what the project learns, e.g. my_digits"
    if not re.match("[a-z]", name) or keyword.iskeyword(name) or len(name) > MAX_NAME_CHARACTERS:
        raise ConfigError("its name makes no package of Python", where="DIR", value=str(root), fix=fix)
    if importlib.util.find_spec(name) is not None:
        raise ConfigError("there is a module of that name already", where="DIR", value=name, fix=fix)
    return name


def write_project(root: Path, package: str) -> list[Path]:
    """Write the files of a project; return their paths. Raises ConfigError where the folder holds anything already."""
    try:
        if root.exists() and any(root.iterdir()):
            raise ConfigError("the folder is not empty", where="DIR", value=str(root), fix="name a new one")
        return [_write(root / path.format(package=package), name, package) for name, path in FILES.items()]
    except OSError as error:
        raise ConfigError(f"the project cannot be written: {error}", where="DIR", value=str(root)) from error


def _write(path: Path, template: str, package: str) -> Path:
    text = (resources.files("kftrain.cli") / "templates" / f"{template}.jinja").read_text()
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(environment.from_string(text).render(package=package, name=package.replace("_", "-")))
    return path
