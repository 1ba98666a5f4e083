"""Islands with a quorum: who is late holds nobody up, no gradient is lost, and all meet where the run is saved."""

from dataclasses import replace

import numpy as np
import pytest
from helpers.parity import apart, islands
from helpers.parity import resume as parity_resume
from helpers.parity.compression import fused_adamw
from helpers.parity.oracle import STEPS, Case, same_llama
from helpers.parity.table import Row

pytestmark = pytest.mark.timeout(300, func_only=True)

QUORUM = ("train.outer.quorum=1", "train.outer.grace_seconds=0", "train.outer.max_rounds_ahead=3")
INTERVALS = ("train.log_interval_steps", "checkpoint.interval_steps")
HOW = {"servers": 2, "steps": 2}
CASE = islands.case_of(Case(network=same_llama, optimizer=fused_adamw), **HOW)  # by kernels that round as the engine's


def train(pools, folder, processes, layout, num_steps=STEPS, stops=None):
    """Train with a meeting in the middle; where somebody is to stop, with none but that which this one asks for."""
    intervals = [f"{key}={10 if stops is None else STEPS}" for key in INTERVALS]
    job = Row("", processes, (*layout, *intervals, *QUORUM), CASE).job
    job = replace(job, defect=apart.noting(folder, holds=stops is None))
    answers = pools.run(processes, parity_resume.attempt, job, str(folder), num_steps, stops)
    assert [answer.kind for answer in answers] == ["done"] * processes, answers
    return answers[0].value


LAYOUTS = [
    (2, ("parallel.strategy=ddp",)),
    (4, ()),
    pytest.param(4, ("parallel.strategy=ddp",), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("processes", "layout"), LAYOUTS)
def test_an_island_that_is_held_up_holds_nobody_up_and_loses_nothing(pools, tmp_path, processes, layout):
    trained = train(pools, tmp_path, processes, layout)
    told = [apart.read_told(tmp_path, island) for island in range(2)]
    updates = [[found for line in lines for found in line["updates"]] for lines in told]
    assert updates[0] == updates[1] and [number % 1000 for number, _ in updates[0]] == list(range(len(updates[0])))
    members = [part for _, found in updates[0] for part in zip(found[::2], found[1::2], strict=True)]
    assert sorted(members) == [(island, number) for island in range(2) for number in range(1, 11)]
    # The first island has gone through its third round before the second one's second; at step 10 and 20 they met.
    order = [members.index((island, number)) for island, number in [(0, apart.FREED), (1, apart.HELD)]]
    assert order[0] < order[1]
    for lines in told:
        assert {5, 10} <= {line["round"] for line in lines if line["has_met"]}
    missed = [max(len(line["updates"]) - 1 for line in lines) for lines in (told[0][:5], told[0][5:])]
    assert apart.read_lines(tmp_path, "metrics") == [{"missed_updates": most} for most in missed]
    outers = apart.replay(CASE, islands.How(**HOW, copies=processes // 2), trained.first_weights, told)
    assert np.array_equal(*outers)
    ours = np.concatenate([trained.weights[name].reshape(-1) for name, _ in CASE.network().named_parameters()])
    np.testing.assert_allclose(ours, outers[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("stops", [(0,), (1,)])
def test_all_stop_at_one_step_where_one_is_asked_to_and_go_on_from_there(pools, tmp_path, stops):
    layout = ("parallel.strategy=ddp",)
    train(pools, tmp_path, 2, layout, 3, stops=stops)
    told = [apart.read_told(tmp_path, island) for island in range(2)]
    last = {lines[-1]["round"] for lines in told}
    assert len(last) == 1 and all(lines[-1]["has_met"] for lines in told) and 2 <= last.pop() < 10
    trained = train(pools, tmp_path, 2, layout, stops=())
    told = [apart.read_told(tmp_path, island) for island in range(2)]
    assert [line["round"] for line in told[0]] == list(range(1, 11)), "a round was done twice"
    outers = apart.replay(CASE, islands.How(**HOW), trained.first_weights, told)
    ours = np.concatenate([trained.weights[name].reshape(-1) for name, _ in CASE.network().named_parameters()])
    np.testing.assert_allclose(ours, outers[1], rtol=0, atol=2e-5)
