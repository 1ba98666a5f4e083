"""Which code a document may name, and that there is one way from a document to an import."""

import ast
import shutil

import pytest
from click.testing import CliRunner
from helpers.documents import finished_run
from unit.stages.test_comparison import reference_to
from unit.test_layering import place, sources

from kftrain import config, trust
from kftrain.cli import cli
from kftrain.config import Config
from kftrain.core import storage
from kftrain.errors import ConfigError
from kftrain.models import build_model
from kftrain.models.settings import ModelConfig
from kftrain.models.signature import options_of
from kftrain.registry import ComparedVersion
from kftrain.run.config import keep_job_config, read_config, read_job_config
from kftrain.run.paths import RunPaths
from kftrain.run.script import Script
from kftrain.sharding.sources.user import UserSource
from kftrain.stages import comparison, preflight
from kftrain.tasks import build_task
from kftrain.tasks.settings import TaskConfig
from kftrain.tasks.user_metrics import metrics_of
from kftrain.trust import KINDS_VARIABLE, Trust, load_code

KIND = "os:getcwd"

IMPORTERS = {
    "trust.py": "the way from a document to an import",
    "core/lazy.py": "names of ours, from a table in the source",
    "cli/__init__.py": "commands, from a table in the source",
    "launch/base.py": "launchers, from a table in the source",
    "launch/kubernetes/kinds/__init__.py": "kinds of jobs, from a table in the source",
    "run/script.py": "the script of `train.command`, after asking trust",
    "worker/rank.py": "the function of a job's ranks, from the table of tasks in the source",
    "data/file_content.py": "libraries that the callers name in the source",
    "sharding/parts/encoder.py": "unpickles a temporary file that this process itself has written",
    "checkpoint/reader.py": "an unpickler that knows what torch's own header consists of, and nothing else",
    "models/signature.py": "looks for a file after asking trust, and evaluates annotations of our own source",
    "registry/package.py": "looks for our own packages, and copies their list of entry points",
    "cli/run.py": "looks whether kfp is there",
    "cli/init.py": "looks whether the name of a folder is free",
    "tracking/client.py": "looks whether mlflow is there",
    "parallel/float8.py": "looks whether torchao is there",
}
"""Who may import or evaluate by name, and why that is no name from a document."""

IMPORTING = {
    *("import_module", "__import__", "find_spec", "spec_from_file_location", "exec_module", "load_module"),
    *("run_module", "run_path", "entry_points", "resolve_name", "pickle", "marshal", "exec", "eval", "builtins"),
}

COMPUTED_ATTRIBUTES = {
    *("trust.py", "core/lazy.py", "cli/__init__.py", "core/remote.py", "core/outages.py", "checkpoint/reader.py"),
    *("process/liveness.py", "tasks/base.py", "tasks/registry.py", "reports/comparison.py", "parallel/mesh.py"),
    *("parallel/settings.py", "parallel/tensor_plan.py", "parallel/buffers.py", "parallel/topology.py"),
    *("train/settings.py", "train/probe.py", "registry/gate.py", "sharding/mixing.py", "data/settings.py"),
    *("parallel/activations.py", "parallel/compression/shards.py", "parallel/layout.py", "train/bandwidth.py"),
    "launch/kubernetes/kinds/trainjob.py",
    *("sharding/sources/user.py", "schedule/spec.py", "run/error.py", "launch/kubernetes/diagnosis.py"),
}
"""Who takes attributes by names that stand elsewhere in the source, or, in trust.py alone, in a document."""


def calls_in(path):
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]


def imported_in(path):
    tree = ast.parse(path.read_text())
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    return {alias.name for node in nodes for alias in node.names} | {getattr(node, "module", None) for node in nodes}


def called_by(node):
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def is_torch_mode(node):
    return isinstance(node.func, ast.Attribute) and node.func.attr == "eval"


def test_nobody_else_imports_or_evaluates_by_name():
    found = set()
    for path in sources():
        called = {called_by(node) for node in calls_in(path) if not is_torch_mode(node)}
        if (called | imported_in(path)) & IMPORTING or '"entry_points' in path.read_text():
            found.add(place(path))
    assert found == set(IMPORTERS)


def test_nobody_else_takes_attributes_by_a_name_that_is_computed():
    found = set()
    for path in sources():
        names = [node.args[1] for node in calls_in(path) if called_by(node) == "getattr"]
        if not all(isinstance(name, ast.Constant) for name in names):
            found.add(place(path))
    assert found == COMPUTED_ATTRIBUTES


@pytest.mark.parametrize(
    "build",
    [
        lambda: build_task(TaskConfig(kind=KIND)),
        lambda: build_model(ModelConfig(kind=KIND), {}),
        lambda: options_of(ModelConfig(kind=KIND)),
        lambda: metrics_of(None, [KIND]),
        lambda: UserSource(KIND),
        lambda: load_code(KIND, "x"),
        lambda: Script(KIND, is_module=True, arguments=()).run(),
        lambda: trust.require_written(KIND, "x"),
    ],
)
def test_what_nobody_has_named_is_not_imported(build, nothing_permitted, monkeypatch):
    monkeypatch.setattr(trust, "_import_attribute", lambda *arguments: pytest.fail("imported"))
    with pytest.raises(ConfigError, match="may not run here"):
        build()


def test_what_ones_own_configuration_or_the_environment_names_is_imported(nothing_permitted, monkeypatch):
    config.parse(f"data: {{source: '{KIND}'}}")
    assert load_code(KIND, "x")
    monkeypatch.setenv(KINDS_VARIABLE, "os:getpid")
    assert load_code("os:getpid", "x")
    Trust(frozenset({"os:getppid"})).require_kind("task", "os:getppid", ())
    assert load_code("os:getppid", "x")


def test_the_configuration_in_a_runs_folder_permits_code_to_workers_of_its_job_alone(tmp_path, nothing_permitted):
    paths, _ = finished_run(tmp_path)
    other = Config(task=TaskConfig(kind=KIND))
    storage.publish(paths.config, other.to_yaml())
    keep_job_config(paths, other)
    read_config(paths)
    with pytest.raises(ConfigError, match="may not run here"):
        load_code(KIND, "x")
    read_job_config(paths, other.digest())
    assert load_code(KIND, "x")


def test_a_comparison_does_not_run_what_another_runs_configuration_names(tmp_path, nothing_permitted, monkeypatch):
    paths, own = finished_run(tmp_path)
    trust.permit(own)
    planted = RunPaths(paths.uri + "-planted")
    shutil.copytree(storage.local_path(paths.uri), storage.local_path(planted.uri))
    called = tmp_path / "called"
    task = TaskConfig(kind="subprocess:check_output", args=["touch", str(called)])
    storage.publish(planted.config, own.model_copy(update={"task": task}).to_yaml())
    monkeypatch.setattr(comparison, "is_stream", lambda schema: True)
    version = comparison._describe_version(ComparedVersion(2, reference=reference_to(planted.uri)), Trust.of(own))
    assert "neither built-in nor one that may be built here" in version.problem and not called.exists()


@pytest.fixture
def planted_run(tmp_path, monkeypatch):
    """A run whose kept configuration names a command as its task; and what that would write."""
    paths, own = finished_run(tmp_path)
    called = tmp_path / "called"
    task = TaskConfig(kind="subprocess:check_output", args=["touch", str(called)])
    storage.publish(paths.config, own.model_copy(update={"task": task}).to_yaml())
    monkeypatch.setattr(preflight, "require_database", lambda uri: None)
    return paths, called


def test_models_of_a_run_do_not_run_what_its_configuration_names(planted_run, nothing_permitted):
    paths, called = planted_run
    done = CliRunner().invoke(cli, ["models", "compare", "--run", paths.uri])
    assert not called.exists() and "may not run here" in str(done.exception)


def test_what_a_kept_configuration_trusts_is_trusted_by_nobody_else(nothing_permitted):
    kept = Config(registry={"trusted_kinds": [KIND]}, task=TaskConfig(kind="os:getpid")).to_yaml()
    for kind in (KIND, "os:getpid"):
        with pytest.raises(ConfigError, match="may be built here"):
            Trust.of(config.parse_kept(kept, "kept")).require_kind("task", kind, ())
    by_caller = config.parse_kept(kept, "kept", [f"registry.trusted_kinds=['{KIND}', os:getpgrp]"])
    Trust.of(by_caller).require_kind("task", KIND, ())
    assert load_code(KIND, "x") and load_code("os:getpgrp", "x")
    with pytest.raises(ConfigError, match="may not run here"):
        load_code("os:getpid", "x")


def test_code_in_a_folder_within_a_folder_is_looked_for_without_importing_either(tmp_path):
    """Neither folder has an `__init__.py`: Python's finders need the outer one imported before they look into it."""
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    (tmp_path / "outer" / "inner" / "tasks.py").write_text("class Task: ...")
    trust.require_written("outer.inner.tasks:Task", "task.kind", str(tmp_path))
