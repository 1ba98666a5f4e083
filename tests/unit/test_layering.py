"""Who may import whom, read from the source: the rules are few, and each keeps something out of somewhere."""

import ast
import functools
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TOP = {"errors", "config"}
"""Modules beside the folders that every folder may import; of the folders they import `core` and `settings`."""

COMMON = {"core", "settings"}
"""Folders that every folder may import; they import only each other."""

MAY_IMPORT = {
    "core": set(),
    "settings": set(),
    "run": set(),
    "process": {"run.log_size"},
    "statistics": {"run.documents"},
    "data": {"run", "process.child", "process.machine"},
    "sharding": {"run", "process", "data", "tasks"},
    "models": set(),
    "parallel": {"process"},
    "server": {"run", "process.signals"},
    "remote_parameters": set(),
    "tracking": {"run", "data.shards"},
    "reports": {"run"},
    "launch": {"run", "process"},
    "schedule": {"run"},
    "kubeflow": {"schedule", "run.best_effort"},
    "tasks": {"run", "data", "models", "statistics", "process.parent_death"},
    "checkpoint": {
        *("run", "process.machine", "data", "models", "parallel", "tasks"),
        *("server.rows", "server.table", "server.table_files"),
    },
    "registry": {"run", "tracking", "checkpoint", "models", "statistics"},
    "evaluate": {"run", "process", "data", "models", "parallel", "tasks", "checkpoint", "statistics"},
    "train": {
        *("run", "process", "data", "models", "parallel", "tasks", "checkpoint", "tracking", "evaluate"),
        *("launch.spec", "worker.error_report", "server", "remote_parameters"),
    },
    "worker": {"run", "process", "launch.spec"},
    "stages": {
        *("run", "process", "data", "sharding", "tasks", "checkpoint", "evaluate", "launch", "models"),
        *("registry", "reports", "tracking", "schedule", "kubeflow", "statistics", "parallel.layout"),
    },
    "client": {"run", "process", "stages", "kubeflow", "pipelines", "schedule", "tracking.mlflow_run", "tracking.runs"},
    "cli": {
        *(
            "client",
            "run",
            "process",
            "data",
            "sharding",
            "tasks",
            "checkpoint",
            "train",
            "worker",
            "server.process",
            "launch",
            "kubeflow",
            "registry",
            "reports",
        ),
        *("stages", "pipelines", "schedule", "components.images"),
    },
    "components": {"stages"},
    "pipelines": {"components"},
}
"""What the modules of a folder may import of kftrain besides TOP, COMMON and their own folder: folders, or single
modules."""

ONE_PLACE = {
    "fsspec": {"core/remote.py"},
    "mlflow": {"tracking/session.py"},
    "kubernetes": {"launch/kubernetes/"},
    "kfp": {"kubeflow/", "client/", "components/", "pipelines/"},
    "ray": {"launch/ray_driver.py"},
    "rich": {"client/console.py"},
    "tokenizers": {"tasks/bpe.py"},
    "click": {"cli/", "client/console.py", "worker/rank.py"},
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
        if not {folder, target} <= MAY_IMPORT.keys() or target in {folder, *COMMON}:
            continue
        if not MAY_IMPORT[folder] & {target, ".".join(parts[1:3])}:
            wrong.append(f"{where} imports {name}")
    assert not wrong


def test_every_folder_has_a_rule():
    folders = {place(path).split("/")[0] for path in sources() if "/" in place(path)}
    assert folders == MAY_IMPORT.keys()


def test_top_modules_import_only_what_is_common():
    wrong = [
        f"{where} imports {name}"
        for where, name, _ in all_imports()
        if where.removesuffix(".py") in TOP
        and name.startswith("kftrain.")
        and name.split(".")[1] in MAY_IMPORT.keys() - COMMON
        and not (where == "config.py" and name.split(".")[-2] == "settings")
    ]
    assert not wrong


def folder_imports():
    """Folder -> the other folders that it imports, wherever in a module the import stands."""
    targets = {folder: set() for folder in MAY_IMPORT}
    for where, name, _ in all_imports():
        folder, parts = where.split("/")[0], name.split(".")
        if parts[0] == "kftrain" and len(parts) > 1 and {folder, parts[1]} <= MAY_IMPORT.keys():
            targets[folder] |= {parts[1]} - {folder}
    return targets


def find_circle(targets):
    """Folders of which each imports the next and the last the first; empty if there are none."""
    graph = graphlib.TopologicalSorter(targets)
    try:
        graph.prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_folders_import_each_other_in_no_circle():
    assert not find_circle(folder_imports())


def test_a_circle_is_found():
    assert len(find_circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})) == 4 and not find_circle({"a": {"b"}, "b": set()})


@pytest.mark.parametrize("library", sorted(ONE_PLACE))
def test_a_library_is_imported_in_one_place(library):
    found = {where for where, name, _ in all_imports() if name.split(".")[0] == library}
    assert all(where.startswith(tuple(ONE_PLACE[library])) for where in found), found


def test_mlflow_and_torch_are_never_imported_at_the_top_of_what_the_steps_image_runs():
    folders = ("stages/", "launch/", "registry/", "reports/", "tracking/", "tasks/", "components/", "client/", "cli/")
    wrong = [
        f"{where} imports {name}"
        for where, name, at_top in all_imports()
        if at_top and name.split(".")[0] in ("torch", "mlflow", "safetensors") and where.startswith(folders)
    ]
    assert not [line for line in wrong if "tracking/client.py" not in line and "tasks/inference.py" not in line]


def test_what_both_sides_of_a_job_share_knows_neither_torch_nor_kubernetes():
    wrong = [
        f"{where} imports {name}"
        for where, name, _ in all_imports()
        if where.startswith("run/") and name.split(".")[0] in ("torch", "kubernetes", "kubeflow", "mlflow", "kfp")
    ]
    assert not wrong


def test_nobody_outside_launch_asks_which_backend_it_is():
    wrong = [
        f"{place(path)}:{node.lineno}"
        for path in sources()
        if not place(path).startswith("launch/")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "backend"
    ]
    assert not wrong


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
    folders = ("stages", "run", "process", "launch", "kubeflow", "registry", "reports", "schedule", "tracking", "tasks")
    modules = [
        place(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for path in sources()
        if place(path).startswith(folders) and place(path) not in ("tracking/client.py", "tasks/inference.py")
    ]
    names = [f"kftrain.{module}" for module in [*modules, "sharding.shard_dataset", "evaluate.identity", "cli"]]
    subprocess.run([sys.executable, "-c", NO_TORCH, *names], check=True, cwd=ROOT)


MAX_FILE_LINES = 600

MAX_FUNCTION_LINES = 80

LONG_FUNCTIONS = {}
"""Functions that may be longer than the rest, and why."""


def test_no_module_grows_beyond_what_one_reads_at_once():
    long = {place(path): len(path.read_text().splitlines()) for path in sources()}
    assert not {where: lines for where, lines in long.items() if lines > MAX_FILE_LINES}


def test_hardly_a_function_is_longer_than_a_screen():
    long = {
        f"{place(path)}:{node.name}"
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    }
    assert long == LONG_FUNCTIONS.keys()


@pytest.mark.parametrize(
    ("door", "importers"),
    [
        ("client", {"client", "cli", "api.py"}),
        ("cli", {"cli", "__main__.py"}),
        ("api", {"__init__.py"}),
    ],
)
def test_the_command_line_and_python_are_two_doors_to_one_client(door, importers):
    """Neither door goes through the other, and nothing below the client may lean on it."""
    assert {where.split("/")[0] for where, name, _ in all_imports() if name.startswith(f"kftrain.{door}.")} <= importers
