"""Islands against a bare loop: networks trained by turns, and an outer step in numpy or by `torch.optim.SGD`."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.parity import islands, models
from helpers.parity import rank as parity_rank
from helpers.parity import resume as parity_resume
from helpers.parity import table as parity
from helpers.parity.oracle import STEPS
from helpers.parity.table import Refused, Row

pytestmark = pytest.mark.timeout(300, func_only=True)

TESTS = Path(__file__).parents[1]
DDP = ("parallel.strategy=ddp",)
ZERO1 = ("parallel.strategy=zero1",)

DRIFTING = {"compared_steps": 15}
"""First weights that are off by their last bit make the bare loop differ from itself by 1e-5 from step 16 on."""
FLIPPED = {"tolerance": 1e-4, "compared_steps": 12, "weight_tolerance": 2e-3}
"""A number that is off by a bit gets another code of int8 sooner or later, and the curves part: see `Row`."""

ROWS = [
    Row("2 islands x 1", 2, DDP, islands.case_of(), **DRIFTING),
    Row("2 islands x 1, average", 2, (), islands.case_of(optimizer="average"), **DRIFTING),
    Row("2 islands x 1, int8", 2, DDP, islands.case_of(encoding="int8"), **FLIPPED),
    Row("2 islands x 1, bf16", 2, DDP, islands.case_of(encoding="bf16"), **FLIPPED),
    Row("2 islands x ddp 2", 4, DDP, islands.case_of(), **DRIFTING),
    Row("2 islands x ddp 2, int8", 4, DDP, islands.case_of(encoding="int8", copies=2), **FLIPPED),
    Row("2 islands x fsdp 2", 4, (), islands.case_of(), **DRIFTING),
    Row("2 islands x zero1 2", 4, ZERO1, islands.case_of(), **DRIFTING),
    Row("2 islands x fsdp 2, micro batches", 4, ("train.micro_batch_size=1",), islands.case_of(), **DRIFTING),
    Row("4 islands x 1", 4, (), islands.case_of(islands=4), **DRIFTING),
    Row("2 islands x 1, 3 fragments", 2, DDP, islands.case_of(fragments=3), **DRIFTING),
    Row("2 islands x fsdp 2, 2 fragments", 4, (), islands.case_of(steps=4, fragments=2), **DRIFTING),
    Row("2 islands x 1, 3 fragments, int8", 2, DDP, islands.case_of(encoding="int8", fragments=3), **FLIPPED),
    Row("2 islands x ddp 2, empty fragments", 4, DDP, islands.EMPTY, **DRIFTING),
    Row("2 islands x 1, tied", 2, DDP, islands.case_of(models.TIED), **DRIFTING),
    Row("2 islands x fsdp 2, muon", 4, (), islands.case_of(islands.MUON), **DRIFTING),
    Row("2 islands x 1, served", 2, DDP, islands.case_of(servers=1), **DRIFTING),
    Row("4 islands x 1, served by 2", 4, (), islands.case_of(islands=4, servers=2), **DRIFTING),
    Row("2 islands x fsdp 2, served by 2", 4, (), islands.case_of(servers=2), **DRIFTING),
    Row("2 islands x 1, served, int8", 2, DDP, islands.case_of(encoding="int8", servers=1), **FLIPPED),
    Row("2 islands x ddp 2, served, int8", 4, DDP, islands.case_of(encoding="int8", copies=2, servers=2), **FLIPPED),
    Row("2 islands x hybrid", 8, ("parallel.replicate=2",), islands.case_of(), **DRIFTING),
]

QUICK = {
    "2 islands x 1",
    "2 islands x 1, 3 fragments, int8",
    "2 islands x 1, int8",
    "2 islands x ddp 2",
    "2 islands x fsdp 2",
}
QUICK |= {"2 islands x 1, served", "2 islands x fsdp 2, served by 2", "2 islands x 1, served, int8"}
TABLE = parity.keep_quick(ROWS, QUICK)

MODELS = [
    Refused("batch norms", 2, ("parallel.islands=2",), r"parallel\.islands: batch norms", models.NORMED),
    Refused("unequal shares", 4, ("parallel.islands=2",), r"global_batch_size.* has no 4 equal parts"),
]


@pytest.mark.parametrize("row", MODELS, ids=lambda row: row.name)
def test_what_no_island_can_train_is_refused(pools, row):
    parity.check_refusal(pools, row)


@pytest.mark.parametrize("row", [row.param() for row in TABLE])
def test_a_row_is_the_bare_loop(pools, row):
    parity.check_row(pools, row)


ONE = Row("", 2, DDP, islands.case_of())


@pytest.mark.parametrize(
    ("name", "defect"),
    [
        ("2 islands x 1", islands.an_island_is_left_out),
        ("2 islands x 1", islands.gradients_have_the_wrong_sign),
        pytest.param("2 islands x 1", islands.exchanges_come_a_step_late, marks=pytest.mark.slow),
        ("2 islands x 1, int8", islands.feedback_is_not_added),
        ("2 islands x 1, served", islands.an_update_is_made_twice),
        pytest.param("2 islands x 1, served", islands.a_mean_is_not_divided, marks=pytest.mark.slow),
        pytest.param("2 islands x 1, served, int8", islands.feedback_is_not_added, marks=pytest.mark.slow),
    ],
)
def test_an_outer_step_that_is_broken_fails_its_row(pools, name, defect):
    parity.check_defect(pools, next(row for row in ROWS if row.name == name), defect)


RESUMED = {
    "2 x 1, int8": Row("", 2, DDP, islands.case_of(encoding="int8")),
    "2 x 1, 3 fragments, int8": Row("", 2, DDP, islands.case_of(encoding="int8", fragments=3)),
    "2 x ddp 2, empty fragments, int8": Row("", 4, DDP, islands.case_of(encoding="int8", steps=12, fragments=12)),
    "2 x ddp 2, int8": Row("", 4, DDP, islands.case_of(encoding="int8", copies=2)),
    "2 x fsdp 2, bf16": Row("", 4, (), islands.case_of(encoding="bf16")),
    "2 x 1, served, int8": Row("", 2, DDP, islands.case_of(encoding="int8", servers=2)),
}


def go_on(pools, row, folder, stops, defect=None):
    """What the first process tells after an attempt that was stopped after so many steps, and gone on with, each."""
    job = row.job if defect is None else replace(row.job, defect=defect)
    for num_steps in (*stops, STEPS):
        answers = pools.run(row.processes, parity_resume.attempt, job, str(folder), num_steps)
        assert [answer.kind for answer in answers] == ["done"] * row.processes, answers
    return answers[0].value


def are_equal(first, second):
    pairs = zip((first.weights, first.averages), (second.weights, second.averages), strict=True)
    same = all(np.array_equal(one[name], other[name]) for one, other in pairs for name in one)
    return same and [point["loss"] for point in first.history] == [point["loss"] for point in second.history]


@pytest.mark.parametrize(
    "name", ["2 x 1, int8", *(pytest.param(name, marks=pytest.mark.slow) for name in [*RESUMED][1:])]
)
def test_islands_go_on_bit_by_bit_in_the_middle_of_their_steps(pools, tmp_path, name):
    row = RESUMED[name]
    whole = go_on(pools, row, tmp_path / "whole", ())
    assert are_equal(go_on(pools, row, tmp_path / "parts", (7, 12)), whole)


@pytest.mark.parametrize(
    "defect",
    [
        islands.momentum_is_lost_at_resume,
        islands.feedback_is_lost_at_resume,
        pytest.param(islands.weights_of_islands_are_lost_at_resume, marks=pytest.mark.slow),
    ],
)
def test_what_a_resume_loses_is_seen(pools, tmp_path, defect):
    row = RESUMED["2 x 1, int8"]
    whole = go_on(pools, row, tmp_path / "whole", ())
    assert not are_equal(go_on(pools, row, tmp_path / "parts", (7,), defect), whole)


@pytest.mark.slow
def test_islands_go_on_in_another_layout_within_them(pools, tmp_path):
    first, second = Row("", 2, DDP, islands.case_of()), Row("", 4, (), islands.case_of(), **DRIFTING)
    start = pools.run(2, parity_resume.attempt, first.job, str(tmp_path), 7)[0].value
    trained = pools.run(4, parity_resume.attempt, second.job, str(tmp_path), STEPS)[0].value
    curve = parity.curve_of(first.case, None, None, parity.Weights(start.first_weights))
    parity.compare(second, trained, curve)


def test_evaluation_and_checkpoints_take_the_outer_parameters(pools, tmp_path):
    case = islands.case_of()
    trained = pools.run(2, parity_resume.attempt, ONE.job, str(tmp_path), 7)[0].value
    curve = islands.loop(case, trained.first_weights, None, islands.How(stop=6))
    for name, expected in curve.weights.items():
        np.testing.assert_allclose(trained.averages[name], expected.numpy(), rtol=0, atol=1e-5)
    assert any(not np.array_equal(trained.averages[name], trained.weights[name]) for name in curve.weights)


@pytest.mark.slow
def test_islands_are_torchfts(pools, tmp_path):
    python = os.environ.get("KFTRAIN_TORCHFT_PYTHON")
    if not python:
        pytest.skip("KFTRAIN_TORCHFT_PYTHON names no Python with torchft")
    row = Row("torchft", 2, DDP, islands.case_of(steps=5))  # of which 20 is a multiple: torchft exchanges no rest
    trained = pools.run(2, parity_rank.train, row.job)[0].value
    np.savez(tmp_path / "first.npz", **trained.first_weights)
    script, environment = TESTS / "helpers" / "scripts" / "torchft_diloco.py", {"PYTHONPATH": f"{TESTS}:{TESTS.parent}"}
    command = [python, script, tmp_path / "first.npz", tmp_path / "last.npz", "5"]
    subprocess.run(command, env={**os.environ, **environment}, check=True, timeout=200)
    expected = np.load(tmp_path / "last.npz")
    assert set(expected) == set(trained.weights)
    for name in expected:
        np.testing.assert_allclose(trained.weights[name], expected[name], rtol=0, atol=row.weight_tolerance)
