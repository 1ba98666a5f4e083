"""Measures pieces of work against each other: in fresh processes, in shuffled order, in rounds.

Ratios are taken within a round and their median is reported: neighbours on a shared machine slow whole rounds down.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import random
import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """What a process does: prepared, and not yet done."""

    num_items: int
    run: Callable[[], object]
    """The part that is measured."""
    checksum: Callable[[], int]
    """Of the content that was written or is read: of all contenders the same. Called after `run`."""
    extra: Callable[[], float] = lambda: math.nan
    """A figure beside the times, taken after `run`."""


@dataclass(frozen=True)
class Measurement:
    """One run: items per second of wall and of processor time (all threads and child processes), a further figure."""

    per_second: float
    per_cpu_second: float
    extra: float


Runs = dict[str, list[Measurement]]
"""Contender -> its measurements, one per round."""


def main(works: dict[str, Callable[[argparse.Namespace], Work]]) -> None:
    """Does the work that the command line names and prints its measurement, or with `--check` its checksum."""
    parser = argparse.ArgumentParser()
    parser.add_argument("work", choices=works)
    parser.add_argument("--folder", required=True, help="with the content, and with what is read")
    parser.add_argument("--out", required=True, help="a new folder for what is written")
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--at", type=float, default=0.0, help="where reading resumes, as a share of the samples")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    work = works[arguments.work](arguments)
    gc.collect()  # what the imports have left, which is no part of anybody's work
    wall, cpu = time.perf_counter(), _cpu_seconds()
    work.run()
    wall, cpu = time.perf_counter() - wall, _cpu_seconds() - cpu
    if arguments.check:
        print(json.dumps(work.checksum()))
    else:
        print(json.dumps([work.num_items / wall, work.num_items / max(cpu, 1e-9), work.extra()]))


def compare(commands: dict[str, list[str]], num_rounds: int) -> Runs:
    """Measurements of each contender, whose work prints one as its last line."""
    found: Runs = {contender: [] for contender in commands}
    for round_index in range(num_rounds):
        for contender in random.Random(round_index).sample(list(commands), len(commands)):
            found[contender].append(Measurement(*last_line(commands[contender])))
    return found


def last_line(command: list[str]) -> list[float]:
    """What a process prints at last, as JSON."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    found: list[float] = json.loads(output.splitlines()[-1])
    return found


def ratio(runs: Runs, contender: str, other: str, field: str = "per_second") -> float:
    """Median over the rounds of how many times more than the other."""
    pairs = zip(runs[contender], runs[other], strict=True)
    return statistics.median(getattr(a, field) / getattr(b, field) for a, b in pairs)


def median(runs: Runs, contender: str, field: str = "per_second") -> float:
    """Over the rounds."""
    return statistics.median(getattr(run, field) for run in runs[contender])


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def copy_all(files: Iterable[bytes | memoryview]) -> None:
    """What a decoder does first with the bytes it is given: all are read once."""
    buffer = memoryview(bytearray(1 << 20))
    for file in files:
        buffer[: len(file)] = file
