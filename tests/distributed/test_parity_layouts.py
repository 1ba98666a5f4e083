"""A run that is saved after seven steps in one layout goes on in any other, on the curve of the bare loop."""

import itertools
import shutil

import pytest
from helpers.parity import models, optimizers
from helpers.parity import resume as parity_resume
from helpers.parity import table as parity
from helpers.parity.oracle import STEPS, Case, one_word_more, tied_llama
from helpers.parity.table import Row
from helpers.pool import Pools

STEPS_BEFORE = 7

LAYOUTS = {
    "one process": (1, ()),
    "fsdp": (2, ()),
    "uneven fsdp": (3, ()),
    "ddp": (2, ("parallel.strategy=ddp",)),
    "zero1": (2, ("parallel.strategy=zero1", "train.micro_batch_size=1")),
    "zero2": (4, ("parallel.strategy=zero2", "train.micro_batch_size=1")),
    "hybrid": (4, ("parallel.replicate=2", "train.activation_checkpointing=blocks")),
    "tensor": (2, ("parallel.tensor=2",)),
    "fsdp x tensor": (4, ("parallel.tensor=2",)),
}

TEXT = [Case(), Case("tied", ("model.tie_embeddings=true",), tied_llama)]
OTHERS = [*TEXT, models.CHOOSY, optimizers.MUON, optimizers.SGD]
"""Where no matrix is split: parameters without a gradient, and state of other forms than AdamW's."""


def covering():
    """Every ordered pair of layouts, once; the cases take turns, so that each layout is left and entered with each."""
    found = []
    for number, (first, second) in enumerate(itertools.permutations(LAYOUTS, 2)):
        cases = TEXT if "tensor" in first + second else OTHERS
        is_neighbour = list(LAYOUTS).index(second) == (list(LAYOUTS).index(first) + 1) % len(LAYOUTS)
        marks = [] if is_neighbour else [pytest.mark.slow]
        case = cases[number % len(cases)]
        found.append(pytest.param(first, second, case, marks=marks, id=f"{first} - {second}, {case.name}"))
    return found


@pytest.fixture(scope="module")
def pools():
    found = Pools()
    yield found
    found.close()


@pytest.fixture(scope="module")
def saved(pools, tmp_path_factory):
    """Gives the folder of a run that has stopped after seven steps in a layout."""
    folders = {}

    def folder_of(layout, case):
        if (layout, case) not in folders:
            folder = folders[layout, case] = tmp_path_factory.mktemp("saved")
            size, overrides = LAYOUTS[layout]
            row = Row(layout, size, overrides, case)
            answers = pools.run(size, parity_resume.attempt, row.job, str(folder), STEPS_BEFORE)
            assert [answer.kind for answer in answers] == ["done"] * size, answers
            assert len(answers[0].value.history) == STEPS_BEFORE
        return folders[layout, case]

    return folder_of


UNEVEN = Case("uneven vocabulary", ("model.kind=helpers.models.tensor:one_word_more",), one_word_more)


@pytest.mark.parametrize(
    ("first", "second", "case"),
    [
        *covering(),
        pytest.param("fsdp x tensor", "uneven fsdp", UNEVEN, id="fsdp x tensor - uneven fsdp, uneven vocabulary"),
        pytest.param("uneven fsdp", "tensor", UNEVEN, id="uneven fsdp - tensor, uneven vocabulary"),
        pytest.param("tensor", "fsdp x tensor", UNEVEN, id="tensor - fsdp x tensor, uneven vocabulary"),
    ],
)
def test_a_run_goes_on_in_another_layout(pools, saved, tmp_path, first, second, case):
    shutil.copytree(saved(first, case), tmp_path, dirs_exist_ok=True)
    size, overrides = LAYOUTS[second]
    row = Row(f"{first} - {second}", size, overrides, case)
    parity.check(row, pools.run(size, parity_resume.attempt, row.job, str(tmp_path), STEPS))
