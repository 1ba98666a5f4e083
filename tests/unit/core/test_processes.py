"""The end of a process: as Python would end it, except that it takes nothing apart."""

import subprocess
import sys

import pytest

SCRIPT = """
import atexit, ctypes, os, sys, threading, time
from kftrain.processes import end_with

class Taken:
    def __del__(self, note=os.mkdir):
        note({marker!r})

kept = Taken()
stream = open({path!r}, "w")

def main():
    atexit.register(lambda: stream.write("atexit\\n"))
    threading.Thread(target=lambda: (time.sleep(0.2), stream.write("thread\\n"))).start()
    stream.write("main\\n")
    print("printed")
    ctypes.CDLL(None).printf(b"printed by C\\n")
    {end}

end_with(main)
"""


@pytest.mark.parametrize(
    ("end", "code", "message"),
    [
        ("return 17", 17, ""),
        ("return None", 0, ""),
        ("sys.exit(143)", 143, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit('why')", 1, "why"),
        ("raise ValueError('why')", 1, "ValueError: why"),
    ],
)
def test_nothing_is_lost_and_the_code_is_kept_though_nothing_is_taken_apart(tmp_path, end, code, message):
    path, marker = tmp_path / "written", tmp_path / "taken apart"
    script = SCRIPT.format(path=str(path), marker=str(marker), end=end)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == code and message in done.stderr
    assert path.read_text() == "main\nthread\natexit\n"
    assert done.stdout == "printed\nprinted by C\n"
    assert not marker.exists()
