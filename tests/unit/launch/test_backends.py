"""The table of backends: what it names is there, and answers for itself."""

from pathlib import Path
from typing import get_args

import pytest

import kftrain
from kftrain import config
from kftrain.errors import ConfigError, LaunchError
from kftrain.launch import base
from kftrain.launch.backends import BACKENDS, POD_BACKENDS
from kftrain.launch.kubernetes.kinds import all_kinds
from kftrain.launch.settings import LaunchConfig

VERBS = ("build", "run", "describe", "cancel", "logs", "clean", "suspend", "unsuspend", "check", "prepare", "close")


@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_every_backend_has_a_launcher_with_every_verb(name, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", "/nowhere")  # to build one connects to nothing
    launcher = base.build_launcher(config.parse(f"launch: {{backend: {name}}}"))
    assert all(callable(getattr(launcher, verb)) for verb in VERBS) and launcher.interrupted is False


def test_the_setting_knows_the_table_and_nothing_else():
    assert set(get_args(LaunchConfig.model_fields["backend"].annotation)) == BACKENDS.keys()
    with pytest.raises(ConfigError, match="backend"):
        config.parse("launch: {backend: slurm}")


def test_kinds_differ_in_what_finds_their_jobs():
    kinds = all_kinds()
    assert len({(kind.group, kind.version, kind.plural) for kind in kinds}) == len(kinds) >= 1


def test_who_has_no_torch_is_told_which_backends_have_pods():
    base.require_pods(config.parse("launch: {backend: pytorchjob}"), "the steps")
    with pytest.raises(LaunchError, match=r"the steps have neither torch nor a GPU.*set it to pytorchjob"):
        base.require_pods(config.parse(""), "the steps")


def test_nobody_outside_knows_a_kind_by_its_name():
    """But for the configurations that `kftrain init` and the documentation show."""
    package = Path(kftrain.__file__).parent
    files = [path for path in package.rglob("*.py") if "launch" not in path.relative_to(package).parts]
    named = [str(path) for path in files if any(name in path.read_text() for name in POD_BACKENDS)]
    assert len(files) > 100 and named == []
