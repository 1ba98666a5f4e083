"""What every test has: code that it names itself may be imported; and the options of tests on real clusters."""

import pytest

from kftrain import trust

OPTIONS = {
    "--kubeconfig": "the cluster's kubeconfig",
    "--engine": "buildah, docker or podman",
    "--base": "base image",
    "--load": "command that puts an image archive into the cluster",
    "--build-flags": "further arguments of the image build",
    "--disturb": "script that breaks and mends the cluster, for what `make e2e-full` adds",
    "--trainer-image": "a trainer image of this code that the nodes hold already, instead of a build (tests/launchers)",
    "--kfp-namespace": "where Kubeflow Pipelines is installed, by default: kubeflow",
}


def pytest_addoption(parser):
    for name, text in OPTIONS.items():
        parser.addoption(name, default="", help=text)
    parser.addoption("--record", action="store_true", help="keep the matrix of tests/launchers in its record.json")


class _Everything(set):
    def __contains__(self, kind):
        return True


@pytest.fixture(autouse=True)
def permitted(request, monkeypatch):
    """A test is whoever has started the process; one that asks for `nothing_permitted` begins as a process does."""
    strict = "nothing_permitted" in request.fixturenames
    monkeypatch.setattr(trust, "_permitted", set() if strict else _Everything())


@pytest.fixture
def nothing_permitted(permitted):
    """Nobody has named any code yet."""
