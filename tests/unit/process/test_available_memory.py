"""Memory that a process may still take: figures of the kernel, made by hand."""

import functools
import os
import subprocess
import sys
import time

from kftrain.process import machine


def test_memory_that_is_available_is_the_machines_or_what_the_limit_leaves(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable:   3000 kB\nSwapFree:  1000 kB\n")
    (tmp_path / "v2").mkdir()
    (tmp_path / "v1" / "memory").mkdir(parents=True)
    found = functools.partial(machine.read_available_bytes, str(tmp_path / "meminfo"))
    assert found(str(tmp_path / "none")) == 4000 * 1024
    assert machine.read_available_bytes(str(tmp_path / "no"), str(tmp_path / "none")) == float("inf")
    for name, number in (("memory.max", 9000), ("memory.current", 8000)):
        (tmp_path / "v2" / name).write_text(f"{number}\n")
    (tmp_path / "v2" / "memory.stat").write_text("anon 5\ninactive_file 300\nactive_file 20\n")
    assert found(str(tmp_path / "v2")) == 1320
    (tmp_path / "v2" / "memory.max").write_text("max\n")
    assert found(str(tmp_path / "v2")) == 4000 * 1024
    for name, number in (("memory.limit_in_bytes", 9000), ("memory.usage_in_bytes", 8000)):
        (tmp_path / "v1" / "memory" / name).write_text(f"{number}\n")
    (tmp_path / "v1" / "memory" / "memory.stat").write_text("inactive_file 0\nactive_file 1\n")
    assert found(str(tmp_path / "v1")) == 1001


def test_a_thread_is_busy_while_it_runs_or_waits_for_a_processor_and_not_while_it_sleeps():
    def spin(seconds):
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    before = machine.read_busy_seconds()
    time.sleep(0.3)
    assert machine.read_busy_seconds() - before < 0.2
    affinity = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(affinity)})
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]  # on the same processor
    try:
        before, began = machine.read_busy_seconds(), time.perf_counter()
        spin(0.2)
        busy, took = machine.read_busy_seconds() - before, time.perf_counter() - began
        assert 0.8 * took <= busy <= 1.2 * took and took > 0.3
    finally:
        os.sched_setaffinity(0, affinity)
        for other in others:
            other.kill()
            other.wait()
