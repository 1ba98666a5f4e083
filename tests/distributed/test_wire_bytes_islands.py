"""Bytes on the wire of islands over 100 steps, by the kernel's own counters, as a share of those of `ddp`.

pytest -s -m slow tests/distributed/test_wire_bytes_islands.py      prints the table
"""

import contextlib
from dataclasses import dataclass

import numpy as np
import pytest
from helpers.parity.rank import COLLECTIVE_SECONDS, NoWriter, new_loader
from helpers.served_islands import connect_islands
from helpers.wire import bytes_of_step, share_of_outer_exchange
from helpers.wire_counts import TOLERANCE, count_step_bytes, measure_table, read_counter

from kftrain import config
from kftrain.data.order import BatchPlan
from kftrain.models import build_model
from kftrain.parallel.mesh import Mesh
from kftrain.process.liveness import Liveness
from kftrain.process.stop_request import StopRequest
from kftrain.tasks import build_task
from kftrain.train import session
from kftrain.train.loop import Loop
from kftrain.train.recorder import Recorder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 100
TEXT = f"""
run: {{seed: 1}}
task: {{kind: language_modeling, sequence_length: 8, tokenizer: bytes}}
model: {{kind: transformer, dim: 384, num_layers: 4, num_heads: 2}}
train: {{steps: {STEPS}, global_batch_size: 8, log_interval_steps: {STEPS}}}
evaluate: {{interval_steps: 0}}
checkpoint: {{asynchronous: false, interval_steps: {STEPS}}}
parallel: {{strategy: ddp}}
"""


@dataclass(frozen=True)
class Islands:
    """An encoding of outer gradients, and the share of the bytes of `ddp` that it may send."""

    processes: int
    islands: int
    encoding: str
    limit: float
    servers: int = 0

    @property
    def overrides(self):
        shape = [f"parallel.islands={self.islands}", f"server.num_servers={self.servers}"]
        return [*shape, f"train.outer.encoding={self.encoding}"]

    def __str__(self):
        return f"{self.islands} islands of {self.processes // self.islands}, {self.encoding}{', served' * self.servers}"


TABLE = [
    Islands(2, 2, "int8", 1 / 380),
    Islands(2, 2, "bf16", 1 / 190),
    Islands(2, 2, "fp32", 1 / 95),
    Islands(4, 4, "int8", 1 / 380),
    Islands(2, 2, "int8", 1 / 380, servers=1),
    Islands(4, 4, "int8", 1 / 500, servers=1),
]


def tokens():
    return {"tokens": np.random.default_rng(0).integers(0, 256, size=(64, 9)).astype(np.uint16)}


def measure(world, row):
    """Bytes that a process sends in 100 steps of islands, with all that the loop sends; those of `ddp`, counted too."""
    resolved = config.parse(TEXT, row.overrides)
    mesh, task = Mesh(resolved.parallel.shape(world.size), world), build_task(resolved.task)
    with contextlib.closing(new_loader(resolved, task, mesh, tokens())) as loader:
        engine, _ = session.build(resolved, task, loader, mesh)
        recorder, liveness = Recorder([], None, STEPS), Liveness(lambda: None, COLLECTIVE_SECONDS)
        loop = Loop(resolved, world, engine, loader, None, NoWriter(), recorder, StopRequest(), liveness)
        with connect_islands(engine, resolved, world):
            before = read_counter(world)
            loop.run(0)
            sent = (read_counter(world) - before) / world.size
    dense, resolved, _, task = count_step_bytes(world, TEXT, [], tokens())
    model, shape = build_model(resolved.model, task.model_arguments()), resolved.parallel.shape(world.size)
    plan = BatchPlan(8, world.size)
    formula = sum(bytes_of_step(shape, resolved.parallel, resolved.precision, model, plan, False).values())
    # A link carries as much into an island as out of it. Of what servers bring there half is sent by them.
    return sent / (2 if row.servers else 1), STEPS * dense, STEPS * formula


@pytest.fixture(scope="module")
def measured():
    return measure_table(TABLE, measure)


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_islands_send_their_share_of_the_bytes(measured, row):
    sent, dense, formula = measured[row]
    share = share_of_outer_exchange(row.encoding, row.islands if row.servers else 0) / STEPS
    print(f"\n| {row} | 1/{dense / sent:.0f} | by the formula 1/{1 / share:.0f} | {sent / formula / share - 1:+.1%} |")
    assert sent / dense <= row.limit
    assert abs(sent / formula / share - 1) <= 2 * TOLERANCE  # so few bytes that what the loop agrees on counts
