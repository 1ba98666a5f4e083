"""What a process imports for good is not searched for garbage; everything else ends as it ever did."""

import gzip
import os
import subprocess
import sys

import pytest

from kftrain.process import machine

EARLY = """
import gc, sys
from kftrain.worker.rank import freeze_imports

class Cycle:
    def __init__(self, name):
        self.name, self.itself = name, self
    def __del__(self, say=sys.stdout.write):
        say(self.name)

with freeze_imports():
    assert not gc.isenabled()
    Cycle("kept ")
assert gc.isenabled()
import late
sys.exit(17)
"""

LATE = """
import gc, gzip, logging, logging.handlers, sys, threading, time
from __main__ import Cycle

gc.disable()  # the collection at the end is meant, not one that comes by itself
Cycle("collected ")
writer = gzip.open(sys.argv[1], "wt")
handler = logging.handlers.MemoryHandler(1000, target=logging.StreamHandler(sys.stdout))
logging.getLogger("user").addHandler(handler)
logging.getLogger("user").warning("logged")
threading.Thread(target=lambda: (time.sleep(0.2), writer.write("thread"))).start()
"""


def test_imports_are_kept_and_what_came_later_is_closed_and_collected(tmp_path):
    path = tmp_path / "written.gz"
    (tmp_path / "late.py").write_text(LATE)
    command = [sys.executable, "-c", EARLY, str(path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200)
    assert (done.returncode, done.stdout, done.stderr) == (17, "logged\ncollected ", "")
    assert gzip.decompress(path.read_bytes()) == b"thread"


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "9900000 100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({}, 8),
        ({"cpu.max": "\n"}, 8),
    ],
)
def test_threads_follow_the_limit_of_the_pod_rather_than_the_cores_of_its_host(tmp_path, monkeypatch, files, cpus):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert machine.num_cpus(str(tmp_path)) == cpus
