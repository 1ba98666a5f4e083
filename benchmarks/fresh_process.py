"""Measures variants of one piece of work against each other: in fresh processes, in shuffled order, in rounds.

Ratios are taken within a round and their median is reported: neighbours on a shared machine slow whole rounds down.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

OURS = "ours"


@dataclass(frozen=True)
class Measurement:
    """One run of a variant: items per second of wall and of processor time (all threads), and a figure of its own."""

    per_second: float
    per_cpu_second: float
    extra: float


def measure(work: Callable[[], tuple[int, float]]) -> None:
    """Runs the work in this process and prints its measurement; the work gives its number of items and its figure."""
    wall, cpu = time.perf_counter(), time.process_time()
    num_items, extra = work()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(json.dumps([num_items / wall, num_items / cpu, extra]))


def compare(script: str, variants: list[str], arguments: list[str], num_rounds: int) -> dict[str, list[Measurement]]:
    """Measurements of each variant, one per round, from `script --variant V arguments…` in fresh processes."""
    found: dict[str, list[Measurement]] = {variant: [] for variant in variants}
    for round_index in range(num_rounds):
        for variant in random.Random(round_index).sample(variants, len(variants)):
            command = [sys.executable, script, "--variant", variant, *arguments]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            found[variant].append(Measurement(*json.loads(output.splitlines()[-1])))
    return found


def report(title: str, found: dict[str, list[Measurement]], extra_name: str) -> None:
    """Prints the medians of each variant, and how many times faster ours is."""
    print(f"{title}\n{'':28}{'per second':>14}{'per cpu second':>16}{extra_name:>18}{'ours is':>10}{'by cpu':>9}")
    for variant, runs in found.items():
        ratios = [
            statistics.median(getattr(a, field) / getattr(b, field) for a, b in zip(found[OURS], runs, strict=True))
            for field in ("per_second", "per_cpu_second")
        ]
        medians = [statistics.median(getattr(run, field) for run in runs) for field in Measurement.__annotations__]
        print(
            f"{variant:28}{medians[0]:14,.0f}{medians[1]:16,.0f}{medians[2]:18.3f}{ratios[0]:9.1f}x{ratios[1]:8.1f}x",
            flush=True,
        )
