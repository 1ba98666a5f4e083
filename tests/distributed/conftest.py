"""What several tests of a process share: runs that others are compared with, trained once, and processes."""

import fcntl

import pytest
from helpers import jobs
from helpers.pool import Pools


@pytest.fixture(scope="module")
def pools():
    """Processes of the table of parity, which stay from row to row."""
    made = Pools()
    yield made
    made.close()


@pytest.fixture
def rendezvous(tmp_path_factory):
    """For a job of several nodes: on one machine all of them meet at the same port, so there may be one at a time."""
    with (tmp_path_factory.getbasetemp().parent / "rendezvous").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """The oracle: one process, never interrupted."""
    paths, resolved = jobs.make_run(tmp_path_factory.mktemp("reference"))
    done = jobs.run_worker(paths, resolved, processes=1)
    assert done.returncode == 0, done.stdout + done.stderr
    return paths, jobs.losses(paths)


@pytest.fixture(scope="session")
def two_processes(tmp_path_factory):
    paths, resolved = jobs.make_run(tmp_path_factory.mktemp("two"))
    done = jobs.run_worker(paths, resolved, processes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    return paths, jobs.losses(paths)
