"""How much memory a process takes: anonymous memory, sampled by a thread, over what it had at first."""

import contextlib
import ctypes
import re
import threading
import time
from pathlib import Path

SAMPLE_SECONDS = 0.0005

MMAP_THRESHOLD = -3
"""Of glibc's malloc: tensors of a megabyte go back to the system when they are freed, instead of leaving holes
whose number depends on what pytest has done before."""


@contextlib.contextmanager
def peak_of_memory():
    """Bytes of anonymous memory at the highest, over those at the beginning."""
    libc = ctypes.CDLL(None)
    libc.mallopt(MMAP_THRESHOLD, 1 << 20)
    libc.malloc_trim(0)  # what pytest has freed would be taken again, and not be seen
    ended, start = threading.Event(), anonymous_bytes()
    peak = [start]

    def sample():
        while not ended.is_set():
            peak[0] = max(peak[0], anonymous_bytes())
            time.sleep(SAMPLE_SECONDS)

    thread = threading.Thread(target=sample)
    thread.start()
    found = {}
    try:
        yield found
    finally:
        ended.set()
        thread.join()
        found["bytes"] = peak[0] - start


def anonymous_bytes():
    return int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
