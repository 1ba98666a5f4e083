"""A run that is saved after seven steps in one layout goes on in any other, on the curve of the bare loop."""

import itertools
import shutil
from dataclasses import asdict

import pytest
from helpers.parity import context, experts, models, optimizers
from helpers.parity import resume as parity_resume
from helpers.parity import table as parity
from helpers.parity.oracle import STEPS, Case, one_word_more, tied_llama
from helpers.parity.table import Row

from kftrain import config
from kftrain.parallel.shape import AXES

STEPS_BEFORE = 7

TIED = Case("tied", ("model.tie_embeddings=true",), tied_llama)

PIPELINE = ("parallel.pipeline=2", "train.micro_batch_size=1")
EXPERT, CONTEXT, TENSOR = ("parallel.expert=2",), ("parallel.context=2",), ("parallel.tensor=2",)
HYBRID = ("parallel.replicate=2",)

LAYOUTS = {
    "one process": (1, ()),
    "fsdp": (2, ()),
    "uneven fsdp": (3, ()),
    "ddp": (2, ("parallel.strategy=ddp",)),
    "zero1": (2, ("parallel.strategy=zero1", "train.micro_batch_size=1")),
    "zero2": (4, ("parallel.strategy=zero2", "train.micro_batch_size=1")),
    "hybrid": (4, ("parallel.replicate=2", "train.activation_checkpointing=blocks")),
    "tensor": (2, TENSOR),
    "fsdp x tensor": (4, TENSOR),
}
"""Of these every ordered pair is tried."""

SPLIT = {
    "pipeline": (2, PIPELINE),
    "zbv": (2, (*PIPELINE, "parallel.schedule=zbv")),
    "four stages": (4, ("parallel.pipeline=4", "train.micro_batch_size=1")),
    "fsdp x pipeline": (4, PIPELINE),
    "tensor x pipeline": (4, (*TENSOR, *PIPELINE)),
    "expert": (2, EXPERT),
    "expert of four": (4, ("parallel.expert=4",)),
    "fsdp x expert": (4, EXPERT),
    "hsdp x expert": (4, (*EXPERT, *HYBRID)),
    "pipeline x expert": (4, (*PIPELINE, *EXPERT)),
    "context x expert": (4, (*CONTEXT, *EXPERT)),
    "context": (2, CONTEXT),
    "context of four": (4, ("parallel.context=4",)),
    "fsdp x context": (4, CONTEXT),
    "hsdp x context": (4, (*CONTEXT, *HYBRID)),
    "context x tensor": (4, (*CONTEXT, *TENSOR)),
}
"""Of these so many pairs that each axis is left for each: see `test_each_axis_is_left_for_each`."""

WAYS = [
    ("pipeline", "fsdp", TIED),
    ("one process", "zbv", Case()),
    ("pipeline", "one process", optimizers.MUON),
    ("four stages", "tensor", Case()),
    ("fsdp", "four stages", TIED),
    ("zbv", "pipeline", Case()),
    ("fsdp x pipeline", "tensor", TIED),
    ("fsdp", "pipeline", optimizers.SGD),
    ("pipeline", "fsdp x pipeline", optimizers.ADAFACTOR),
    ("expert of four", "expert", experts.BIASED),
    ("expert", "fsdp", experts.MUON),
    ("fsdp", "one process", experts.BIASED),
    ("one process", "expert of four", experts.ADAFACTOR),
    ("fsdp x expert", "one process", experts.MUON),
    ("fsdp", "fsdp x expert", experts.BIASED),
    ("hsdp x expert", "expert of four", experts.LAMB),
    ("fsdp x expert", "fsdp", experts.SIX_MUON),
    ("pipeline x expert", "fsdp x expert", experts.BIASED),
    ("expert", "pipeline x expert", experts.MUON),
    ("pipeline", "one process", experts.BIASED),
    ("context of four", "fsdp", context.PACKED),
    ("fsdp", "one process", context.PACKED),
    ("one process", "context", context.PACKED),
    ("context", "fsdp x context", context.PACKED),
    ("fsdp x context", "context x tensor", context.PACKED),
    ("context x tensor", "context of four", context.PACKED),
    ("context", "one process", context.PACKED),
    ("context", "pipeline", context.PACKED_ONE),
    ("fsdp x context", "hybrid", optimizers.MUON),
    ("hybrid", "hsdp x context", optimizers.LAMB),
    ("pipeline", "context", TIED),
    ("pipeline", "hybrid", TIED),
    ("hybrid", "fsdp x pipeline", optimizers.MUON),
    ("tensor", "tensor x pipeline", TIED),
    ("context x expert", "expert", experts.BIASED),
    ("expert", "context x expert", experts.MUON),
    ("expert of four", "hsdp x expert", experts.BIASED),
]
QUICK = WAYS[:2]
"""Ways that `make test` runs."""


def find_axes(layout, case):
    """Names of the axes along which a layout has several processes; of one process alone `alone`."""
    size, overrides = {**LAYOUTS, **SPLIT}[layout]
    sizes = asdict(config.parse(case.base, [*case.overrides, *overrides]).parallel.shape(size))
    return [axis for axis, length in sizes.items() if length > 1] or ["alone"]


def test_each_axis_is_left_for_each():
    ways = [*(param.values for param in covering()), *WAYS]
    pairs = {pair for a, b, case in ways for pair in itertools.product(find_axes(a, case), find_axes(b, case))}
    # A run goes on with the same number of islands: they are another training.
    axes = [axis for axis in AXES if axis != "islands"]
    missing = {*itertools.product([*axes, "alone"], repeat=2)} - pairs
    # No model has both experts and a plan of how its matrices are split.
    assert missing == {("tensor", "expert"), ("expert", "tensor"), ("alone", "alone")}


TEXT = [Case(), TIED]
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
def saved(pools, tmp_path_factory):
    """Gives the folder of a run that has stopped after seven steps in a layout."""
    folders = {}

    def folder_of(layout, case):
        if (layout, case) not in folders:
            folder = folders[layout, case] = tmp_path_factory.mktemp("saved")
            size, overrides = {**LAYOUTS, **SPLIT}[layout]
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
        *(
            pytest.param(
                *way, marks=[] if way in QUICK else [pytest.mark.slow], id=f"{way[0]} - {way[1]}, {way[2].name}"
            )
            for way in WAYS
        ),
        pytest.param("fsdp x tensor", "uneven fsdp", UNEVEN, id="fsdp x tensor - uneven fsdp, uneven vocabulary"),
        pytest.param("uneven fsdp", "tensor", UNEVEN, id="uneven fsdp - tensor, uneven vocabulary"),
        pytest.param("tensor", "fsdp x tensor", UNEVEN, id="tensor - fsdp x tensor, uneven vocabulary"),
    ],
)
def test_a_run_goes_on_in_another_layout(pools, saved, tmp_path, first, second, case):
    shutil.copytree(saved(first, case), tmp_path, dirs_exist_ok=True)
    size, overrides = {**LAYOUTS, **SPLIT}[second]
    row = Row(f"{first} - {second}", size, overrides, case)
    parity.check(row, pools.run(size, parity_resume.attempt, row.job, str(tmp_path), STEPS))
