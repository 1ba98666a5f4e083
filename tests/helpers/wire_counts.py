"""Bytes that the processes of a row send in a step, by the kernel's own counters.

All processes of a row are in a network of their own, whose loopback device counts what they send, headers included.
"""

import contextlib
import functools

import pytest
from helpers import ranks
from helpers.fakes import private_network
from helpers.parity.rank import new_loader

from kftrain import config
from kftrain.parallel.mesh import Mesh
from kftrain.tasks import build_task
from kftrain.train import session

WARM_STEPS, COUNTED_STEPS = 2, 4
TOLERANCE = 0.02


def read_counter(world):
    """What all have sent, at a moment when all are here."""
    world.barrier()
    sent = private_network.sent_bytes()
    world.barrier()
    return sent


def count_step_bytes(world, text, overrides, arrays, watch=contextlib.nullcontext, read=read_counter):
    """Bytes of a step, by a process on average; the configuration, the engine and its task.

    `watch`: a context around the steps that are counted. `read`: what all have sent.
    """
    resolved = config.parse(text, overrides)
    mesh, task = Mesh(resolved.parallel.shape(world.size), world), build_task(resolved.task)
    loader = new_loader(resolved, task, mesh, arrays)
    engine, _ = session.build(resolved, task, loader, mesh)
    batches = list(loader.steps(0, WARM_STEPS + COUNTED_STEPS))
    for batch in batches[:WARM_STEPS]:
        engine.step(batch, 64, world.sum)
    before = read(world)
    with watch():
        for batch in batches[WARM_STEPS:]:
            engine.step(batch, 64, world.sum)
    return (read(world) - before) / COUNTED_STEPS / world.size, resolved, engine, task


def measure_table(table, measure):
    """Row -> what `measure`, called with a world and a row, returns on the first process; skips without a network."""
    problem = private_network.problem()
    if problem:
        pytest.skip(f"needs a network of its own: {problem}")
    answers = {}
    for size in sorted({row.processes for row in table}):
        rows = [row for row in table if row.processes == size]
        measured = private_network.run(functools.partial(measure_on_all, measure), rows)
        assert isinstance(measured, list), measured
        answers.update(zip(rows, measured, strict=True))
    return answers


def measure_on_all(measure, rows):
    return ranks.on(rows[0].processes, measure_rows, measure, rows, seconds=900)[0]


def measure_rows(world, measure, rows):
    return [measure(world, row) for row in rows]
