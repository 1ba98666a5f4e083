"""Who may import whom, read from the source: the rules are few, and each keeps something out of somewhere."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

BASE = {
    *("errors", "credentials", "printable", "plain", "section", "layers", "cluster_config", "config", "contracts"),
    *(
        "plugins",
        "storage",
        "remote",
        "outages",
        "bootstrap",
        "processes",
        "attempts",
        "progress",
        "channel",
        "advice",
        "threads",
    ),
}
"""Modules that every folder may import; they import only each other."""

MAY_IMPORT = {
    "data": set(),
    "models": set(),
    "parallel": set(),
    "tracking": set(),
    "report": set(),
    "launch": set(),
    "tasks": {"data", "models"},
    "checkpoint": {"data", "models", "parallel", "tasks"},
    "registry": {"tracking", "checkpoint"},
    "train": {"data", "models", "parallel", "tasks", "checkpoint", "tracking", "launch", "evaluate"},
    "evaluate": {"data", "models", "parallel", "tasks", "checkpoint"},
    "stages": {"data", "tasks", "checkpoint", "evaluate", "launch", "models", "registry", "report", "tracking"},
    "cli": {"data", "tasks", "checkpoint", "train", "launch", "registry", "report", "stages", "pipelines"},
    "components": {"stages"},
    "pipelines": {"components"},
}
"""What the modules of a folder may import of kftrain besides BASE and their own folder."""

ONE_PLACE = {
    "fsspec": {"remote.py"},
    "mlflow": {"tracking/session.py"},
    "kubernetes": {"launch/"},
    "kfp": {"cli/", "components/", "pipelines/"},
    "rich": {"cli/"},
    "click": {"cli/", "worker/rank.py"},
}
"""A library -> the only places that may import it."""


def sources():
    files = [*(ROOT / "kftrain").rglob("*.py"), *(ROOT / "components").glob("*.py"), *(ROOT / "pipelines").glob("*.py")]
    return sorted(path for path in files if "__pycache__" not in path.parts)


def place(path):
    """`data/order.py` for a module of the package, wherever its folder stands in the repository."""
    return path.relative_to(ROOT).as_posix().removeprefix("kftrain/")


def imports(tree):
    """(imported name, whether at module level outside TYPE_CHECKING)."""
    typing_only = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.walk(node)
    }
    inside = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) not in inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide what is imported"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from ((name, id(node) not in inside) for name in names)


@functools.cache
def all_imports():
    """(place, imported name, at_top) of every import in the package."""
    return [(place(path), name, at_top) for path in sources() for name, at_top in imports(ast.parse(path.read_text()))]


def test_each_folder_imports_only_what_stands_below_it():
    wrong = []
    for where, name, _ in all_imports():
        folder, parts = where.split("/")[0], name.split(".")
        target = parts[1] if parts[0] == "kftrain" and len(parts) > 1 else ""
        if folder in MAY_IMPORT and target in MAY_IMPORT and target not in MAY_IMPORT[folder] | {folder}:
            wrong.append(f"{where} imports {name}")
    assert not wrong


def test_every_folder_has_a_rule():
    folders = {place(path).split("/")[0] for path in sources() if "/" in place(path)}
    assert folders == MAY_IMPORT.keys()


def test_base_modules_import_only_each_other():
    wrong = [
        f"{where} imports {name}"
        for where, name, _ in all_imports()
        if where.removesuffix(".py") in BASE and name.startswith("kftrain.") and name.split(".")[1] in MAY_IMPORT
    ]
    assert not wrong


@pytest.mark.parametrize("library", sorted(ONE_PLACE))
def test_a_library_is_imported_in_one_place(library):
    found = {where for where, name, _ in all_imports() if name.split(".")[0] == library}
    assert all(where.startswith(tuple(ONE_PLACE[library])) for where in found), found


def test_mlflow_and_torch_are_never_imported_at_the_top_of_what_the_steps_image_runs():
    folders = ("stages/", "launch/", "registry/", "report/", "tracking/", "tasks/", "components/", "cli/")
    wrong = [
        f"{where} imports {name}"
        for where, name, at_top in all_imports()
        if at_top and name.split(".")[0] in ("torch", "mlflow", "safetensors") and where.startswith(folders)
    ]
    assert not [line for line in wrong if "tracking/client.py" not in line and "tasks/inference.py" not in line]


SETTINGS = {"kftrain.components.images.STEPS_IMAGE", "kftrain.components.workers.FOR_WORKERS"}


def test_a_component_imports_only_kfp_and_its_settings_at_its_top():
    for where, name, at_top in all_imports():
        if where.startswith("components/") and at_top and where != "components/images.py":
            allowed = name.startswith("kfp.") or name in SETTINGS
            assert allowed or name.split(".")[0] in sys.stdlib_module_names, f"{where} imports {name}"


NO_TORCH = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "safetensors", "sklearn", "mlflow", "kfp"):
            raise ModuleNotFoundError(f"no {name} in this image", name=name)

sys.meta_path.insert(0, Blocked())
import importlib
for module in sys.argv[1:]:
    importlib.import_module(module)
"""


def test_the_steps_image_needs_no_torch():
    folders = ("stages", "launch", "registry", "report", "tracking", "tasks")
    modules = [
        place(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for path in sources()
        if place(path).startswith(folders) and place(path) not in ("tracking/client.py", "tasks/inference.py")
    ]
    names = [
        f"kftrain.{module}" for module in [*modules, "data.sharding", "evaluate.identity", "checkpoint.commit", "cli"]
    ]
    subprocess.run([sys.executable, "-c", NO_TORCH, *names], check=True, cwd=ROOT)
