"""The training loop against its bars: ours and the others in turns, as a table in Markdown.

    python benchmarks/train/table.py [--rounds 5] [--peers PYTHON] [--rows A,B]

`--peers`: the interpreter of the environment that has lightning and accelerate (made by `make bench-train`). Every
contender takes turns with what it is held against within the same processes; figures are ratios or differences of the
two, so that a loaded machine slows both. Each row says whether the machine had its CPUs to itself when it began.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

QUIET_SHARE = 0.95
"""Of its time a busy process must get on a CPU of a machine that is called quiet."""

BUSY_SECONDS = 0.5


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    bar: str
    figure: str
    met: bool | None
    """None where there is no bar."""
    note: str = ""


@dataclass(frozen=True)
class Bench:
    """One run of the table."""

    rounds: int
    peers_python: str
    peers: dict[str, str]
    """Peer -> why it cannot be imported; empty where it can."""


def overhead(bench: Bench) -> list[Row]:
    """What a loop takes beyond the bare step, of a model so small that nothing else counts."""
    bare, loop, size = median_of([last_line(sys.executable, "overhead_ours.py") for _ in range(bench.rounds)])
    notes = [f"bare step {bare:.0f} µs, {size:,.0f} parameters"]
    for peer, problem in bench.peers.items():
        if problem:
            notes.append(f"{peer} cannot be imported: {problem}")
            continue
        runs = [last_line(bench.peers_python, "overhead_peers.py", peer) for _ in range(bench.rounds)]
        theirs, with_loop = median_of(runs)
        notes.append(f"{peer} {with_loop - theirs:+.0f}")
    name = "loop over the bare step, with metrics, checkpoint hooks and liveness: CPU µs a step"
    return [Row(name, "≤ 60", f"{loop - bare:+.0f}", loop - bare <= 60, "; ".join(notes))]


def scaled(bench: Bench) -> list[Row]:
    """The same in fp16 with a dynamic scale and averages of the weights, which the bare step does, too."""
    runs = [last_line(sys.executable, "overhead_ours.py", "--scaled") for _ in range(bench.rounds)]
    bare, loop, _ = median_of(runs)
    name = "the same in fp16 with averages, over a bare step with torch's scaler and averages: CPU µs a step"
    return [Row(name, "≤ 25", f"{loop - bare:+.0f}", loop - bare <= 25, f"bare step {bare:.0f} µs")]


def against(bench: Bench, kind: str, name: str, bar: float, *options: str) -> list[Row]:
    """Ours against a bare loop around the same wrapper; with `--free` also against what the machine can do."""
    found = last_line(sys.executable, "processes.py", kind, "--rounds", str(2 * bench.rounds), *options)
    ratio = found["bare"]
    note = f"ours {found['ours']:.3f} s a turn"
    rows = [Row(f"{name} against the same wrapper in a bare loop", f"≥ {bar}", f"{ratio:.3f}", ratio >= bar, note)]
    if "free" in found:
        ratio = found["free"]
        note = f"the bare loop {found['free'] / found['bare']:.3f}"
        note += f"; exchanges alone take {found['exchanges']:.3f} of a turn" if "exchanges" in found else ""
        bar = FREE_BARS.get(kind, 0.0)
        rows.append(
            Row(
                f"{name} against 2 free processes",
                f"≥ {bar}" if bar else "—",
                f"{ratio:.3f}",
                ratio >= bar if bar else None,
                note,
            )
        )
    return rows


def experts(bench: Bench) -> list[Row]:
    """A mixture of experts against a dense model; spread over two processes beside that, without a bar."""
    rounds = ("--rounds", str(bench.rounds))
    alone, shared = (last_line(sys.executable, "experts.py", "--processes", size, *rounds) for size in ("1", "2"))
    ratio, note = alone["experts"], f"expert: 2 over fsdp {shared['experts']:.3f}"
    return [
        Row(
            "mixture of experts over a dense step, same active parameters",
            "≤ 1.15",
            f"{ratio:.3f}",
            ratio <= 1.15,
            note,
        )
    ]


def chunked_loss(bench: Bench) -> list[Row]:
    """A loss by chunks against one of whole logits: 2,048 tokens, 128 k classes, dim 256."""
    found = last_line(sys.executable, "memory.py", "chunked", "--rounds", str(min(bench.rounds, 3)))
    peak, seconds = found["chunked peak"], found["chunked time"]
    note = (
        f"plain {found['plain_mib']:.0f} MiB, {found['plain_seconds']:.1f} s; of single terms {found['terms peak']:.3f}"
    )
    name = "loss by chunks over whole logits"
    return [
        Row(f"{name}: peak without the head's gradient", "≤ 0.1", f"{peak:.3f}", peak <= 0.1, note),
        Row(f"{name}: time", "≤ 1.4", f"{seconds:.3f}", seconds <= 1.4, f"of single terms {found['terms time']:.3f}"),
    ]


def selective(bench: Bench) -> list[Row]:
    """Selective recomputation against keeping all activations."""
    found = last_line(sys.executable, "memory.py", "selective", "--rounds", str(bench.rounds))
    kept, seconds = found["selective kept"], found["selective time"]
    note = f"keeps {kept:.3f}; blocks: {found['blocks time']:.3f}, keeps {found['blocks kept']:.3f}"
    is_met = seconds <= 1.12 and kept <= 0.5
    return [
        Row("selective recomputation over none, at half of the memory: time", "≤ 1.12", f"{seconds:.3f}", is_met, note)
    ]


def compression(bench: Bench) -> list[Row]:
    """Steps whose gradients travel compressed, over a link of 100 Mbit/s."""
    found, rows = last_line(sys.executable, "compression.py", "--rounds", str(bench.rounds)), []
    for kind, bar in (("int8", 0.35), ("topk", 0.15)):
        name = f"{kind} over fp32, 2 processes of ddp, 100 Mbit/s: time of a step"
        if "problem" in found:
            rows.append(Row(name, f"≤ {bar}", "—", None, found["problem"]))
            continue
        note = f"fp32 {found['fp32']:.2f} s, {found['parameters'] / 1e6:.1f} M parameters"
        rows.append(Row(name, f"≤ {bar}", f"{found[kind]:.3f}", found[kind] <= bar, note))
    return rows


FREE_BARS = {"fsdp": 0.78}

ROWS: dict[str, Callable[[Bench], list[Row]]] = {
    "overhead": overhead,
    "scaled": scaled,
    "ddp": lambda bench: against(bench, "ddp", "27 M GPT, 2 processes: ddp", 0.97, "--free"),
    "zero2": lambda bench: against(bench, "zero2", "27 M GPT, 2 processes: zero2", 0.97, "--free"),
    "fsdp": lambda bench: against(bench, "fsdp", "27 M GPT, 2 processes: fsdp", 0.97, "--free"),
    "tensor": lambda bench: against(bench, "tensor", "27 M GPT, tensor: 2", 0.95),
    "context": lambda bench: against(bench, "context", "27 M GPT, context: 2, rows of 1,024", 0.97),
    "pipeline": lambda bench: against(bench, "pipeline", "27 M GPT, pipeline: 2, four micro batches", 0.97),
    "experts": experts,
    "chunked-loss": chunked_loss,
    "selective": selective,
    "compression": compression,
    "evaluation-1": lambda bench: against(bench, "evaluation", "evaluation, 1 process", 0.97, "--processes", "1"),
    "evaluation-2": lambda bench: against(bench, "evaluation", "evaluation, 2 processes, fsdp", 0.97),
}


def last_line(python: str, script: str, *options: str) -> Any:
    """What a script prints at last, as JSON."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE.parents[1]}:{HERE}"}
    command = [python, str(HERE / script), *options]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    return json.loads(output.splitlines()[-1])


def median_of(runs: list[list[float]]) -> list[float]:
    """Of each figure by itself, the lower of two in the middle."""
    return [sorted(figures)[(len(figures) - 1) // 2] for figures in zip(*runs, strict=True)]


def is_quiet() -> bool:
    """Whether busy processes, one for each CPU, all get their time at once."""
    num_cpus = len(os.sched_getaffinity(0))
    with multiprocessing.get_context("spawn").Pool(num_cpus) as pool:
        return min(pool.map(_share_of_a_cpu, [BUSY_SECONDS] * num_cpus, chunksize=1)) >= QUIET_SHARE


def _share_of_a_cpu(seconds: float) -> float:
    wall, used = time.perf_counter(), time.process_time()
    while time.perf_counter() - wall < seconds:
        pass
    return (time.process_time() - used) / (time.perf_counter() - wall)


def show(rows: list[Row], quiet: bool) -> None:
    """Lines of the table."""
    for row in rows:
        met = {True: "met", False: "missed", None: ""}[row.met]
        machine = "quiet" if quiet else "loaded"
        print(f"| {row.name} | {row.bar} | {row.figure} | {met} | {machine} | {row.note} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", default=sys.executable, help="their interpreter")
    parser.add_argument("--rows", default=",".join(ROWS), help="which, of: %(default)s")
    arguments = parser.parse_args()
    command = [arguments.peers, str(HERE / "overhead_peers.py"), "available"]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    bench = Bench(arguments.rounds, arguments.peers, json.loads(output.splitlines()[-1]))
    print("| benchmark | bar | measured | | | |\n|---|---|---|---|---|---|", flush=True)
    for name in arguments.rows.split(","):
        quiet = is_quiet()
        show(ROWS[name](bench), quiet)


if __name__ == "__main__":
    main()
