"""Processes of one suite (pytest-xdist) that run at once: what they make once for all, and when they meet."""

import contextlib
import fcntl
import os
import time

NUM_PROCESSES = "PYTEST_XDIST_WORKER_COUNT"
POLL_SECONDS = 0.5


def find_shared_folder(request):
    """The folder of this run of the suite, which all its processes have."""
    folder = request.getfixturevalue("tmp_path_factory").getbasetemp()
    return folder.parent if NUM_PROCESSES in os.environ else folder


@contextlib.contextmanager
def hold_lock(path):
    """Nobody else is within such a block of this file."""
    with path.open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def make_once(request, name, make):
    """The text that `make` returns, made by the first process that asks for it by this name."""
    path = find_shared_folder(request) / f"once-{name}"
    with hold_lock(path.with_suffix(".lock")):
        if not path.exists():
            path.write_text(make())
        return path.read_text()


class Meeting:
    """The tests of one function that run at once, one for each backend. In a suite of one process each is alone."""

    def __init__(self, request):
        function = request.node.originalname
        same = [item for item in request.session.items if item.originalname == function]
        marked = [item for item in same if item.get_closest_marker("breaks_cluster")]
        self._number = min(len(marked), int(os.environ.get(NUM_PROCESSES, "1")))
        self._folder = find_shared_folder(request)
        self._function = function
        self._name = request.node.name

    def wait_for_all(self, moment, seconds):
        """Returns when all have come to this moment; one that is skipped or has failed is waited for so long."""
        folder = self._folder / f"{self._function}-{moment}"
        folder.mkdir(exist_ok=True)
        (folder / self._name).touch()
        deadline = time.monotonic() + seconds
        while len(list(folder.iterdir())) < self._number and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    @contextlib.contextmanager
    def alone(self, moment):
        """One at a time; yields whether this is the first one, or alone altogether."""
        done = self._folder / f"{self._function}-{moment}.done"
        with hold_lock(done.with_suffix(".lock")):
            yield self._number == 1 or not done.exists()
            done.touch()
