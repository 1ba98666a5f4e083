"""An example that two islands train, against `ddp`: bits per byte of held-out text after 1,000 steps of the same batch.

pytest -s -m slow tests/distributed/test_islands_convergence.py      prints the losses
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import jobs

from kftrain.core import storage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

EXAMPLE = (Path(__file__).parents[2] / "examples" / "stdlib-lm.yaml").read_text()
SMALL = ["task.sequence_length=32", "model.dim=64", "model.num_layers=2", "precision.compute=fp32"]
"""A small part of the example, so that a training takes a few seconds of each process."""
COMMON = ["train.steps=1000", "evaluate.interval_steps=1000", "checkpoint.interval_steps=1000", *SMALL]
KEY = "validation/bits_per_byte"
BAR = 0.03
"""What islands may lose to `ddp` at H = 30, both with the example's learning rate."""
SEARCHED = ("train.outer.learning_rate=0.9", "train.outer.momentum=0.6")
"""Found among six pairs of rates at H = 30. Those of the paper, 0.7 and 0.9, are for more than 33 exchanges."""
QUORUM = (
    *("server.num_servers=1", "train.outer.quorum=1", "train.outer.grace_seconds=0", "train.outer.max_rounds_ahead=3"),
    *("train.log_interval_steps=1000", "launch.processes_per_node=2"),
)
"""Neither island waits for the other one but at the end, or where it would be four exchanges ahead."""
LARGE = pytest.mark.skipif("KFTRAIN_LARGE_TESTS" not in os.environ, reason="a minute each: set KFTRAIN_LARGE_TESTS=1")


def train(root, name, settings, shared):
    """Bits per byte of held-out text at the end of a training by two processes."""
    paths, resolved = jobs.prepare(root, EXAMPLE, [*COMMON, *settings], name, data=next(iter(shared), None))
    shared.append(paths)
    if resolved.server.num_servers:  # a launcher starts them
        command = [sys.executable, "-m", "kftrain", "train", paths.uri]
        done = subprocess.run(command, env=jobs.worker_environment({}), capture_output=True, text=True, check=False)
    else:
        done = jobs.run_worker(paths, resolved, processes=2)
    assert done.returncode == 0, done.stdout + done.stderr
    points = [point for point in storage.read_json(paths.history) if KEY in point]
    return points[-1][KEY]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder, the runs so far, and the loss of `ddp`."""
    root, shared = tmp_path_factory.mktemp("islands"), []
    return root, shared, train(root, "ddp", ["parallel.strategy=ddp"], shared)


@pytest.mark.parametrize(
    ("steps", "settings", "limit"),
    [
        pytest.param(30, SEARCHED, BAR, id="30"),
        pytest.param(30, (*SEARCHED, "train.outer.encoding=int8"), BAR, id="30-int8"),
        pytest.param(30, (), 0.06, id="30-paper", marks=LARGE),
        pytest.param(30, (*SEARCHED, "train.outer.num_fragments=3"), BAR, id="30-fragments", marks=LARGE),
        pytest.param(10, SEARCHED, 0.06, id="10", marks=LARGE),
        pytest.param(100, SEARCHED, 0.1, id="100", marks=LARGE),
        pytest.param(25, SEARCHED, BAR, id="25", marks=LARGE),
        pytest.param(25, (*SEARCHED, *QUORUM), 0.05, id="25-quorum", marks=LARGE),
    ],
)
def test_islands_come_near_to_the_loss_of_ddp(runs, steps, settings, limit):
    root, shared, dense = runs
    settings = ["parallel.islands=2", f"train.outer.steps={steps}", *settings]
    loss = train(root, f"h{steps}-{len(settings)}-{settings[-1][-4:]}", settings, shared)
    gap = loss / dense - 1
    print(f"\nH = {steps}, {settings[2:]}: {loss:.4f}, ddp {dense:.4f}, {gap:+.2%}; at 30 the bar is {BAR:.0%}")
    assert gap < limit


@LARGE
def test_islands_gain_less_than_ddp_from_better_rates(runs):
    root, shared, _ = runs
    dense = train(root, "ddp-better", ["parallel.strategy=ddp", "optimizer.learning_rate=0.008"], shared)
    outer = ["train.outer.steps=30", "train.outer.learning_rate=1.0", "train.outer.momentum=0.5"]
    loss = train(root, "h30-better", ["parallel.islands=2", "optimizer.learning_rate=0.006", *outer], shared)
    print(f"\nH = 30, better rates: {loss:.4f}, ddp {dense:.4f}, {loss / dense - 1:+.2%}")
    assert loss / dense - 1 < 0.06
