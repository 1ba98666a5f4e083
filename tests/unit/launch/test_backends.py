"""The table of backends: what it names is there, and answers for itself."""

from pathlib import Path
from typing import get_args

import pytest

import kftrain
from kftrain import config
from kftrain.errors import ConfigError, LaunchError
from kftrain.launch import base, spec
from kftrain.launch.backends import BACKENDS, POD_BACKENDS, Backend
from kftrain.launch.kubernetes.kinds import load_kinds
from kftrain.launch.settings import LaunchConfig
from kftrain.stages import resolve
from kftrain.tracking import runs

VERBS = ("build", "run", "describe", "cancel", "logs", "clean", "suspend", "unsuspend", "check", "prepare", "close")


@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_every_backend_has_a_launcher_with_every_verb(name, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", "/nowhere")  # to build one connects to nothing
    launcher = base.build_launcher(config.parse(f"launch: {{backend: {name}}}"))
    assert all(callable(getattr(launcher, verb)) for verb in VERBS) and launcher.interrupted is False


def test_the_setting_knows_the_table_and_nothing_else():
    assert set(get_args(LaunchConfig.model_fields["backend"].annotation)) == BACKENDS.keys()
    with pytest.raises(ConfigError, match="backend"):
        config.parse("launch: {backend: mesos}")


def test_kinds_differ_in_what_finds_their_jobs():
    kinds = load_kinds()
    assert len({(kind.group, kind.version, kind.plural) for kind in kinds}) == len(kinds) >= 1


def test_who_has_no_torch_is_told_which_backends_are_remote():
    base.require_remote_jobs(config.parse("launch: {backend: pytorchjob}"), "the steps")
    with pytest.raises(LaunchError, match=r"the steps have neither torch nor a GPU.*set it to pytorchjob"):
        base.require_remote_jobs(config.parse(""), "the steps")


@pytest.fixture
def mesos(monkeypatch):
    """A configuration whose jobs run on other machines, and not in pods."""
    monkeypatch.setitem(BACKENDS, "mesos", Backend(__name__, is_remote=True, has_pods=False))
    resolved = config.parse("tracking: {uri: 'https://me:secret@mlflow'}")
    return resolved.model_copy(update={"launch": resolved.launch.model_copy(update={"backend": "mesos"})})


def build_launcher(resolved):
    """Build the launcher of `mesos`."""
    return "the launcher of mesos"


def test_a_backend_may_be_remote_without_pods(mesos, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")  # of the machine that submits
    base.require_remote_jobs(mesos, "the steps")
    assert base.build_launcher(mesos) == base.find_jobs(mesos) == "the launcher of mesos"
    assert (spec.count_processes_per_node(mesos), mesos.launch.gpus_per_node) == (spec.DEFAULT_CPU_PROCESSES, 0)
    assert resolve.anchor_paths(mesos, "/").tracking.uri == mesos.tracking.uri
    assert not [name for name in runs.list_parameters(mesos) if name.startswith("launch.kubernetes")]


def test_jobs_that_are_pods_are_remote():
    assert all(backend.is_remote for backend in BACKENDS.values() if backend.has_pods)


def test_nobody_outside_knows_a_kind_by_its_name():
    """But for the configurations that `kftrain init` and the documentation show."""
    package = Path(kftrain.__file__).parent
    files = [path for path in package.rglob("*.py") if "launch" not in path.relative_to(package).parts]
    named = [str(path) for path in files if any(name in path.read_text() for name in POD_BACKENDS)]
    assert len(files) > 100 and named == []
