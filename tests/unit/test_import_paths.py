"""Names that stand outside the repository, in compiled pipelines, registered models and users' code, still import."""

import importlib
import importlib.util
import json
import re
from pathlib import Path

import pytest
import yaml

import kftrain
from kftrain import api
from kftrain.registry import registration
from kftrain.tasks import Task

ROOT = Path(__file__).parents[2]

IMPORT = re.compile(r"from (kftrain[\w.]*) import (\w+(?:, *\w+)*)")

PROCESSES = (
    "kftrain",
    "kftrain.process.parent_death",
    "kftrain.train.data_worker",
    "kftrain.worker.agent",
)
"""Modules that are started by `python -m`."""

API = {
    "CompletedRun",
    "compile_pipeline",
    "load_config",
    "load_export",
    "open_dataset",
    "run_pipeline",
    "submit_pipeline",
}
"""Names of `kftrain` that notebooks use."""

COMPILED = {
    "kftrain.stages.evaluate": "evaluate",
    "kftrain.stages.finish": "finish",
    "kftrain.stages.outcome": "save",
    "kftrain.stages.promote": "promote_version",
    "kftrain.stages.register": "register",
    "kftrain.stages.resolve": "Knobs",
    "kftrain.stages.shard": "shard_from_pipeline",
    "kftrain.stages.train": "train",
}
"""Names that steps of a compiled pipeline import in the steps image, which may be newer than the pipeline."""

HOOKS = """
schema validation_schema learn asset_names assets restore export_files cluster settings encode encode_field
content_fields baselines show sample_schema model_arguments rows decode count_terms batch inputs loss statistics
metrics tallies slice_names confusion examples input_example answer_types predict answer
"""
"""Methods of `Task` that users' tasks define or call."""


def texts(document):
    """Every string in a document of YAML or JSON."""
    if isinstance(document, str):
        yield document
    elif isinstance(document, dict | list):
        for child in document.values() if isinstance(document, dict) else document:
            yield from texts(child)


def imports_in(text):
    """(module, name) of everything that a text imports from kftrain."""
    return {(module, name.strip()) for module, names in IMPORT.findall(text) for name in names.split(",")}


def documents():
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", *(ROOT / "examples").rglob("*.py")]
    compiled = (ROOT / "tests" / "golden").glob("*pipeline*.yaml")
    notebooks = (ROOT / "examples").glob("*.ipynb")
    return {
        **{page: page.read_text() for page in pages},
        **{path: "\n".join(t for doc in yaml.safe_load_all(path.read_text()) for t in texts(doc)) for path in compiled},
        **{path: "\n".join(texts(json.loads(path.read_text()))) for path in notebooks},
    }


def is_there(module, name):
    home = importlib.import_module(module)
    is_module = hasattr(home, "__path__") and importlib.util.find_spec(f"{module}.{name}") is not None
    return hasattr(home, name) or is_module


def test_what_pages_notebooks_and_compiled_pipelines_import_is_there():
    named = {(path.name, *pair) for path, text in documents().items() for pair in imports_in(text)}
    assert not [row for row in sorted(named) if not is_there(*row[1:])]


def test_compiled_pipelines_import_what_the_steps_image_promises():
    pairs = {pair for path, text in documents().items() if path.suffix == ".yaml" for pair in imports_in(text)}
    assert pairs == set(COMPILED.items())


@pytest.mark.parametrize("module", PROCESSES)
def test_what_is_started_by_its_module_is_there(module):
    assert importlib.util.find_spec(module) is not None


def test_registered_models_name_the_module_that_loads_them():
    """MLflow calls `_load_pyfunc` of the module that a version was registered with."""
    assert registration.LOADER_MODULE == "kftrain.registry.pyfunc_loader"
    assert callable(importlib.import_module(registration.LOADER_MODULE)._load_pyfunc)


def test_the_names_of_the_library_are_there():
    assert set(kftrain.__all__) >= API and all(callable(getattr(api, name)) for name in API)


@pytest.mark.parametrize("name", HOOKS.split())
def test_a_hook_of_tasks_is_there(name):
    assert hasattr(Task, name)
