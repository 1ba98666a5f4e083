"""One suite over the launchers' protocol, against the real thing of each backend.

    make launchers                                  # installs what it can; the rest is skipped with the reason
    pytest tests/launchers -k trainjob --kubeconfig FILE --load COMMAND …      # the options of `make e2e`
    pytest tests/launchers -k local --record        # writes the cells that were run into record.json
    python tests/launchers/record.py                # makes the table of docs/launchers.md from record.json

How a backend is added. A file `sites/NAME.py` with one function:

    def open_site(request, folder):     # a context manager: yields a `Site`, calls pytest.skip where nothing is there
        ...

and its name in SITES below. `request` is pytest's, for options and for fixtures of the session such as `builder`,
`store` and `mlflow_uri` (`request.getfixturevalue`). The site says how a small training is configured there, which
promises the backend refuses (with a part of the error: the test demands it) and which cannot be tried here (with the
reason), and lends the tests its hands: `list_alive`, `list_left`, `kill_worker`, `stop_worker`, `check_request`. Tests
know nothing else about a backend and never ask for its name.

Each test bears `@promise(NAME)` of promises.py and runs once for each backend; its outcome is one cell of the matrix:
works, refused (the refusal was seen), not run (why), failed. Faults that take a controller or a node away run with
`--disturb SCRIPT` only, because others may use the cluster.

`make launchers` runs several backends at once (pytest-xdist, `BySite`): most of a test is waiting. What breaks the
cluster under everybody's feet is marked `breaks_cluster` and runs by itself, for all backends at the same moment: one
node dies for all of them.
"""

import contextlib
import importlib
import re
import subprocess
import zlib
from pathlib import Path

import pytest
from e2e.conftest import builder, host_address, kubeconfig, mlflow_uri, store  # noqa: F401
from launchers import record
from launchers.at_once import Meeting
from launchers.promises import PROMISES
from xdist.scheduler import LoadScopeScheduling

from kftrain.launch.backends import POD_BACKENDS

SITES = ("local", "pytorchjob", "trainjob", "jobset", "slurm", "ray", "rayjob")

_cells = {}


def pytest_generate_tests(metafunc):
    if "site" in metafunc.fixturenames:
        metafunc.parametrize("site", SITES, indirect=True, scope="session")


@pytest.hookimpl(tryfirst=True)  # before -m chooses among the marks
def pytest_collection_modifyitems(config, items):
    """One backend after the other, so that a site is opened once; nothing unless somebody asks for this folder."""
    places = [place for place, item in enumerate(items) if Path(__file__).parent in item.path.parents]
    ours = sorted((items[place] for place in places), key=_number_site)
    for place, item in zip(places, ours, strict=True):
        items[place] = item
        if not any("launchers" in argument for argument in config.args):
            item.add_marker(pytest.mark.skip(reason="it takes minutes: make launchers"))
        if "disturb" in item.fixturenames and _find_site(item) in POD_BACKENDS:
            item.add_marker(pytest.mark.breaks_cluster)


def _find_site(item):
    return item.callspec.params.get("site") if hasattr(item, "callspec") else None


def _number_site(item):
    """Pods first: theirs are the longest."""
    name = _find_site(item)
    return (name not in POD_BACKENDS, SITES.index(name)) if name else (True, -1)


class BySite(LoadScopeScheduling):
    """Hands out tests in groups, each for one process with a site of its own: half of what a backend has.

    What breaks the cluster is one group a backend, so that all of them come to the same fault together. (The groups of
    `--dist loadgroup` are marks that pytest 9 does not let xdist write down.)
    """

    def _split_scope(self, nodeid):
        words = re.split(r"[-\[\]]", nodeid.partition("::")[2])
        name = next((word for word in words if word in SITES), nodeid.partition("::")[0])
        breaks = "not breaks_cluster" not in self.config.option.markexpr
        return name if breaks else f"{name} {zlib.crc32(nodeid.encode()) % 2}"


def pytest_xdist_make_scheduler(config, log):
    return BySite(config, log)


@pytest.fixture(scope="session")
def site(request, tmp_path_factory):
    module = importlib.import_module(f"launchers.sites.{request.param}")
    with contextlib.ExitStack() as stack:
        yield stack.enter_context(module.open_site(request, tmp_path_factory.mktemp(request.param)))


_unwell = set()
"""Names of sites of which the last test has failed, in this process."""


@pytest.fixture(autouse=True)
def environment(request, monkeypatch):
    """The variables of the site; code of the tests may be imported by the processes that a test starts."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "e2e"))
    if "site" in request.fixturenames:
        site = request.getfixturevalue("site")
        for name, value in site.environment.items():
            monkeypatch.setenv(name, value)
        if site.name in _unwell:
            _unwell.remove(site.name)
            site.mend()


@pytest.fixture
def promise(request, site):
    """The name of the promise that a test is about; skips where the site cannot try it."""
    name = request.node.get_closest_marker("promise").args[0]
    if name in site.not_run:
        pytest.skip(site.not_run[name])
    return name


@pytest.fixture
def disturb(request, site, promise):
    """Runs a verb of the script that breaks this cluster, after `prepare`, and undoes everything in the end."""
    if site.is_private:
        yield None
        return
    script = request.config.getoption("--disturb", default="")
    if not script:
        pytest.skip("it takes away what others use: --disturb SCRIPT")
    meeting = Meeting(request)
    meeting.wait_for_all("begin", seconds=300)

    def run(*verb, prepare=lambda: None):
        meeting.wait_for_all("break", seconds=120)
        with meeting.alone("break") as is_first:
            if is_first:
                prepare()
                subprocess.run([script, *map(str, verb)], check=True, timeout=600)

    yield run
    meeting.wait_for_all("end", seconds=900)
    subprocess.run([script, "mend"], check=True, timeout=600)


@pytest.fixture
def expect_refusal(request, site, promise):
    """Asserts that `output` holds the error by which the backend refuses the promise, and records the cell so."""

    def check(output):
        reason = site.refused[promise]
        assert reason in output, output
        request.node.user_properties.append((record.REFUSED, reason))

    return check


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    marker = item.get_closest_marker("promise")
    if marker and hasattr(item, "callspec"):
        report.user_properties.append(("cell", [item.callspec.params["site"], marker.args[0]]))
        if report.failed:
            _unwell.add(item.callspec.params["site"])
    return report


def pytest_runtest_logreport(report):
    """In the process that writes the record, wherever the test has run."""
    cell = dict(report.user_properties).get("cell")
    if cell:
        _note(*cell, report)


def _note(backend, promise, report):
    """Keep the worst outcome of the tests of a cell, and of the phases of a test."""
    row = _cells.setdefault(backend, {})
    if report.failed:
        row[promise] = [record.FAILED, ""]
    elif report.skipped:  # a case that a backend does not have takes nothing from those it has
        row.setdefault(promise, [record.NOT_RUN, str(report.longrepr[2]).removeprefix("Skipped: ")])
    elif report.when == "call":
        refusal = dict(report.user_properties).get(record.REFUSED)
        if row.get(promise, [record.NOT_RUN])[0] == record.NOT_RUN:
            row[promise] = [record.REFUSED, refusal] if refusal else [record.WORKS, ""]


def pytest_terminal_summary(terminalreporter, config):
    if not _cells:
        return
    terminalreporter.section("backend x promise")
    for backend, row in _cells.items():
        for promise in PROMISES:
            if promise in row:
                terminalreporter.line(f"{backend:12} {promise:16} {': '.join(filter(None, row[promise]))}")
    if config.getoption("--record", default=False):
        record.write_cells(record.merge_cells(record.read_cells(), _cells))
