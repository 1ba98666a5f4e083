"""The table of parity: a row is a case in a layout, and how near it comes to the bare loop."""

import functools
import re
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from helpers.parity import oracle as parity_oracle
from helpers.parity import rank as parity_rank
from helpers.parity.oracle import STEPS, Case, Path


@dataclass(frozen=True)
class Row:
    """One row. Whatever it sets it must come to the same curve as the bare loop of its case."""

    name: str
    processes: int
    layout: tuple[str, ...] = ()
    """Overrides of the configuration that change no number: `parallel.strategy=ddp`."""
    case: Case = field(default_factory=Case)
    tolerance: float = 1e-5
    """Relative, of each step's loss and gradient norm."""
    weight_tolerance: float = 2e-5
    """Absolute, of each of the last weights; learning rates of 0.02 have moved them by 0.2."""
    parts: tuple[tuple[int, ...], ...] | None = None
    """Places in a batch that the bare loop computes at a time, where that matters; None: all at once."""
    parts_of_stacks: tuple[tuple[int, ...], ...] | None = None
    """The same for the gradients of experts, whose rows come from several processes; None: those of `parts`."""
    compared_steps: int = STEPS
    """In bf16 an error of 1e-8 in a weight flips a rounding sooner or later, and the curves part; what of the last
    weights then still is equal, `weight_tolerance` says."""
    slow: bool = False

    @property
    def job(self):
        overrides = (*self.case.overrides, *self.layout)
        return parity_rank.Job(self.case.base, overrides, self.case.data, follows=self.case.is_followed)

    def param(self):
        """For `pytest.mark.parametrize`."""
        return pytest.param(self, id=f"{self.processes}-{self.name}", marks=[pytest.mark.slow] if self.slow else [])


@dataclass(frozen=True)
class Refused:
    """What all processes must refuse before the first step, in one line."""

    name: str
    processes: int
    layout: tuple[str, ...]
    message: str
    """A part of that line, as a regular expression."""
    case: Case = field(default_factory=Case)

    @property
    def job(self):
        return parity_rank.Job(self.case.base, (*self.case.overrides, *self.layout), self.case.data)


def keep_quick(rows, quick):
    """The rows, of which `make test` runs those of these names; the others are long proofs."""
    unknown = quick - {row.name for row in rows}
    assert not unknown, unknown
    return [replace(row, slow=row.processes > 4 or row.name not in quick) for row in rows]


FIRST_WEIGHTS = {}
"""Of each case, those of the row that came first."""


def check_row(pools, row):
    """Trains a row, which must come to the curve of the bare loop."""
    check(row, pools.run(row.processes, parity_rank.train, row.job))


def check_refusal(pools, row):
    """Asks all processes for a row, which each of them must refuse in one line."""
    for answer in pools.run(row.processes, parity_rank.train, row.job):
        assert answer.kind == "refused", answer
        assert re.search(row.message, answer.value) and "\n" not in answer.value


def check_defect(pools, row, defect):
    """Trains a row with an engine that is broken on purpose: it must come to its end, and fail by its numbers."""
    answers = pools.run(row.processes, parity_rank.train, replace(row.job, defect=defect))
    assert [answer.kind for answer in answers] == ["done"] * row.processes, answers
    with pytest.raises(AssertionError, match=r"Not equal to tolerance|changes the first weights"):
        check(row, answers)


def check(row, answers):
    """Raises AssertionError where the processes' answers are not what the bare loop of the row gives."""
    for rank, answer in enumerate(answers):
        assert answer.kind == "done", f"{row.name}: process {rank} {answer.kind}: {answer.value}"
    trained = answers[0].value
    first = Weights(trained.first_weights)
    assert FIRST_WEIGHTS.setdefault(row.case, first) == first, f"{row.name}: the layout changes the first weights"
    compare(row, trained, follow(row, trained) or curve_of(row.case, row.parts, row.parts_of_stacks, first))


def follow(row, trained):
    """The curve of a case that is followed, which is of this training alone; None of others."""
    if row.case.is_followed:
        path = Path(trained.path, row.weight_tolerance)
        return parity_oracle.run(row.case, trained.first_weights, row.parts, row.parts_of_stacks, path)
    return None


def compare(row, trained, curve):
    """Every recorded number of the steps, and every weight at the end."""
    assert [point["step"] for point in trained.history] == list(range(1, STEPS + 1))
    num_steps = STEPS if row.case.is_followed else row.compared_steps
    for name, expected, tolerance in (
        ("loss", curve.losses, row.tolerance),
        ("gradient_norm", curve.norms, row.tolerance),
        ("learning_rate", curve.rates, 1e-12),
    ):
        found = [point[name] for point in trained.history]
        np.testing.assert_allclose(
            found[:num_steps], expected[:num_steps], rtol=tolerance, err_msg=f"{row.name}: {name}"
        )
    assert trained.weights.keys() == curve.weights.keys()
    for name, expected in curve.weights.items():
        np.testing.assert_allclose(
            trained.weights[name], expected.numpy(), rtol=0, atol=row.weight_tolerance, err_msg=f"{row.name}: {name}"
        )


class Weights(dict):
    """First weights, which are the same ones where every number is: so that a case is computed once."""

    def __hash__(self):
        return hash(tuple((name, value.tobytes()) for name, value in self.items()))

    def __eq__(self, other):
        return hash(self) == hash(other)


@functools.cache
def curve_of(case, parts, parts_of_stacks, weights):
    return parity_oracle.run(case, weights, parts, parts_of_stacks)
