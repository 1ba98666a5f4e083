"""How much memory a process takes: anonymous memory, sampled by a thread, or the bytes of tensors, which are exact."""

import contextlib
import ctypes
import json
import re
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from helpers.parity.defects import patched
from torch.profiler import ProfilerActivity, profile

from kftrain.parallel import tensor_exchange
from kftrain.parallel.sharded import all_gather

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


@contextlib.contextmanager
def peak_of_tensors():
    """Bytes of the tensors made since the beginning, when they were most, as torch's allocator counts them."""
    found = {}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, exchanged_as_copies():
        yield found
    with tempfile.NamedTemporaryFile(suffix=".json") as trace:
        profiler.export_chrome_trace(trace.name)
        events = json.loads(Path(trace.name).read_text())["traceEvents"]
    found["bytes"] = max(event["args"]["Total Allocated"] for event in events if event["name"] == "[memory]")


@contextlib.contextmanager
def exchanged_as_copies():
    """Gloo is given copies, in memory that torch's allocator does not know.

    It lets go of a tensor some time after the exchange, in a thread of its own, where the profiler does not see it.
    """
    with (
        patched(dist, "all_reduce", exchange_copies(dist.all_reduce)),
        patched(dist, "all_to_all_single", exchange_copies(dist.all_to_all_single)),
        patched(tensor_exchange, "all_gather", exchange_copies(all_gather)),
    ):
        yield


def exchange_copies(collective):
    def exchange(*arguments, **settings):
        copies = [
            torch.from_numpy(argument.detach().numpy().copy()) if isinstance(argument, torch.Tensor) else argument
            for argument in arguments
        ]
        collective(*copies, **settings)
        with torch.no_grad():
            arguments[0].copy_(copies[0])

    return exchange


def anonymous_bytes():
    return int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
