"""One strategy of ours against the same wrapper of PyTorch in a bare loop, on processes of one thread each.

    python benchmarks/train/processes.py ddp|zero2|fsdp|tensor|context|pipeline|evaluation [--processes 2] [--rounds 8]

A transformer of 27 million parameters, 512 tokens a process and step, over gloo. All contenders stand in the same
processes and take turns, a step each: ours (`Loop.run`), the bare loop, and with `--free` the same step without any
exchange, which is what the machine can do at most; of `fsdp` also its exchanges without any step. `evaluation`: batches
of rows through ours and through a bare loop of forward passes. Last line: `ours` -> seconds of a turn, each other
contender -> its time over ours; medians over the rounds.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.multiprocessing
from wrappers import NUM_MICRO_BATCHES, bare_step, exchanges_alone

from kftrain import config
from kftrain.data.counters import Counters
from kftrain.data.loader import MicroBatch, StepBatch
from kftrain.models.transformer import Transformer
from kftrain.parallel.mesh import Mesh
from kftrain.parallel.world import World, join_world
from kftrain.process.liveness import Liveness
from kftrain.process.stop_request import StopRequest
from kftrain.tasks import build_task
from kftrain.tasks.language_modeling import LanguageModeling
from kftrain.train import session
from kftrain.train.loop import Loop
from kftrain.train.recorder import Recorder
from kftrain.train.step import Carrier, count_loss_terms

VOCABULARY, LENGTH, ROWS, NUM_TOKENS = 8192, 128, 4, 250
LONG_LENGTH, LONG_ROWS = 1024, 1
"""Those of `context`, whose processes share rows: as many tokens for each process."""
PIPELINE_ROWS = 8
"""Those of a step of `pipeline`, whose processes share rows, too."""
EVALUATED_BATCHES = 6
TEXT = """
task: {kind: "processes:Tokens", sequence_length: 128}
model: {kind: transformer, dim: 384, num_heads: 6}
checkpoint: {interval_steps: 1000000}
evaluate: {interval_steps: 0}
"""
STRATEGIES = {
    "ddp": "parallel.strategy=ddp",
    "zero2": "parallel.strategy=zero2",
    "fsdp": "parallel.strategy=fsdp",
    "tensor": "parallel.tensor=2",
    "context": "parallel.context=2",
    "pipeline": "parallel.pipeline=2",
    "evaluation": "parallel.strategy=fsdp",
}
SETTLING_ROUNDS = 2


class Tokens(LanguageModeling):
    """Bytes, with the vocabulary of a tokenizer."""

    def model_arguments(self) -> dict[str, Any]:
        return {**super().model_arguments(), "vocab_size": VOCABULARY}


class Clock:
    """Times of the contenders; all processes begin and end each turn together."""

    def __init__(self, world: World, read: Callable[[], float] = time.perf_counter) -> None:
        self._world = world
        self._read = read
        self.seconds: dict[str, list[float]] = {}

    def begin(self) -> float:
        self._world.barrier()
        return self._read()

    def end(self, contender: str, start: float) -> None:
        self._world.barrier()
        self.seconds.setdefault(contender, []).append(self._read() - start)

    def figures(self) -> dict[str, float]:
        """Median seconds of one of our turns; of each other contender the median of its turns over ours beside them."""
        ours = self.seconds["ours"][SETTLING_ROUNDS:]
        ratios = {
            name: statistics.median(theirs / own for theirs, own in zip(each[SETTLING_ROUNDS:], ours, strict=True))
            for name, each in self.seconds.items()
        }
        return {**ratios, "ours": statistics.median(ours)}


class InTurns:
    """What our loop reads: while it asks for a batch, the others take a step with the same one."""

    def __init__(self, batch: StepBatch, clock: Clock, others: dict[str, Callable[[], object]]) -> None:
        self._batch = batch
        self._clock = clock
        self._others = others
        self.counters = Counters()

    def steps(self, first: int, count: int) -> Iterator[StepBatch]:
        for _ in range(count):
            for contender, work in self._others.items():
                start = self._clock.begin()
                work()
                self._clock.end(contender, start)
            start = self._clock.begin()
            yield self._batch
            self._clock.end("ours", start)


class Writer:
    """Of checkpoints, none of which is due."""

    busy = False
    overdue = False
    step = None
    committed_step = 0

    def save(self, *arguments: Any) -> None:
        self.step = None

    wait = save


class Validation:
    """Rows in memory, as an evaluation reads them."""

    def __init__(self, rows: np.ndarray) -> None:
        self._rows = rows
        self.num_samples = len(rows)

    def read_range(self, start: int, stop: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        return {"tokens": self._rows[start:stop]}, np.arange(start, stop)

    def group_of(self, samples: np.ndarray) -> np.ndarray:
        return samples

    def place_of(self, sample: int) -> str:
        return str(sample)


def tokens(seed: int, num_rows: int, length: int = LENGTH) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, NUM_TOKENS, size=(num_rows, length + 1)).astype(np.uint16)


def build_engine(resolved: config.Config, task: Any, batch: StepBatch, mesh: Mesh) -> Any:
    """Our engine, where all that is read is one batch."""
    reads: Any = argparse.Namespace(steps=lambda first, count: (each for each in [batch]), send_nothing=lambda: None)
    return session.build(resolved, task, reads, mesh)[0]


def measure(world: World, arguments: argparse.Namespace) -> dict[str, float]:
    """See `Clock.figures`."""
    kind, num_layers, rounds = arguments.kind, arguments.layers, arguments.rounds
    settings = [
        f"model.num_layers={num_layers}",
        STRATEGIES[kind],
        f"train.steps={rounds + SETTLING_ROUNDS}",
        *([f"task.sequence_length={LONG_LENGTH}"] if kind == "context" else []),
    ]
    sizes = {"context": (LONG_ROWS, LONG_LENGTH, 1), "pipeline": (PIPELINE_ROWS, LENGTH, NUM_MICRO_BATCHES)}
    num_rows, length, num_micro_batches = sizes.get(kind, (ROWS, LENGTH, 1))
    if kind == "pipeline":
        settings += [f"train.global_batch_size={num_rows}", f"train.micro_batch_size={num_rows // num_micro_batches}"]
    resolved = config.parse(TEXT, settings)
    task, mesh = build_task(resolved.task), Mesh(resolved.parallel.shape(world.size), world)
    rows = tokens(mesh.data_rank, num_rows, length)
    batch = sent(task, rows, num_micro_batches)
    clock = Clock(world, time.process_time if arguments.cpu else time.perf_counter)
    engine = build_engine(resolved, task, batch, mesh)
    if kind == "evaluation":
        return evaluated(engine, task, clock, rounds)
    model = new_model(task, num_layers)
    inputs, targets = (torch.from_numpy(part.astype(np.int64)) for part in (rows[:, :-1], rows[:, 1:]))
    contenders = {"bare": bare_step(kind, copy.deepcopy(model))}
    if arguments.free:
        contenders["free"] = bare_step("free", model)
    if arguments.free and kind == "fsdp":
        contenders["exchanges"] = exchanges_alone(model)
    others = {name: (lambda step=step: step(inputs, targets)) for name, step in contenders.items()}
    recorder, liveness = Recorder([], None, resolved.train.steps), Liveness(lambda: None, 600.0)
    unused: Any = None
    loader: Any = InTurns(batch, clock, others)
    writer: Any = Writer()
    loop = Quiet(resolved, world, engine, loader, unused, writer, recorder, StopRequest(), liveness)
    loop.run(0)
    return clock.figures()


class Quiet(Loop):
    """Saves nothing."""

    def _save(self, done: int, last: bool, busy: bool) -> None:
        pass


def sent(task: Any, rows: np.ndarray, num_micro_batches: int = 1) -> StepBatch:
    """As the loader's thread hands them over."""
    carrier = Carrier.to(torch.device("cpu"), task)
    micro_batches = [
        MicroBatch({"tokens": part}, np.ones(len(part), np.float32)) for part in np.split(rows, num_micro_batches)
    ]
    micro_batches = [replace(micro, sent=carrier.send(micro, count_loss_terms(task, micro))) for micro in micro_batches]
    return StepBatch(0, micro_batches, rows[:, 1:].size)


def new_model(task: Any, num_layers: int) -> Any:
    return Transformer(**task.model_arguments(), dim=384, num_layers=num_layers, num_heads=6)


def evaluated(engine: Any, task: Any, clock: Clock, rounds: int) -> dict[str, float]:
    """Ours over rows of all processes, and a bare loop over this process's share with the same wrapped model."""
    mesh = engine.mesh
    rows = tokens(0, EVALUATED_BATCHES * mesh.num_data_ranks * ROWS)
    mine = [rows[place * ROWS : (place + 1) * ROWS] for place in range(len(rows) // ROWS)]
    mine = mine[mesh.data_rank :: mesh.num_data_ranks]
    dataset = Validation(rows)
    for _ in range(rounds + SETTLING_ROUNDS):
        start = clock.begin()
        engine.evaluate(dataset, ROWS, 0, lambda: None)
        clock.end("ours", start)
        start = clock.begin()
        bare_forward(engine.model, task, mine)
        clock.end("bare", start)
    return clock.figures()


def bare_forward(model: torch.nn.Module, task: Any, batches: list[np.ndarray]) -> float:
    """Forward passes and the task's statistics."""
    total = 0.0
    model.eval()
    with torch.no_grad():
        for rows in batches:
            batch = task.batch({"tokens": rows})
            found = task.statistics(model(*task.inputs(batch)), batch)
            total += sum(float(value.double().sum()) for value in found.values())
    model.train()
    return total


Measure = Callable[[World, argparse.Namespace], dict[str, float]]


def measure_as(rank: int, size: int, address: str, port: int, measure: Measure, arguments: argparse.Namespace) -> None:
    """Measure as one of several processes, of which the first prints the figures."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": address, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    torch.set_num_threads(1)
    with join_world(600.0) as world:
        figures = measure(world, arguments)
        if world.is_main:
            print(json.dumps(figures), flush=True)


def measure_on_processes(measure: Measure, arguments: argparse.Namespace) -> None:
    """Measure on `arguments.processes` processes of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    options = (arguments.processes, "127.0.0.1", port, measure, arguments)
    torch.multiprocessing.spawn(measure_as, options, arguments.processes)  # type: ignore[no-untyped-call]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=STRATEGIES)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--layers", type=int, default=12, help="fewer for a look")
    parser.add_argument("--free", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="CPU seconds of all threads, whatever else the machine does")
    measure_on_processes(measure, parser.parse_args())


if __name__ == "__main__":
    main()
