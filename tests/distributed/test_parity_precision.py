"""Training in fp16 in each layout against a bare loop with torch's `GradScaler`: numbers, scales, skipped steps."""

import contextlib
import functools
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from helpers.parity import experts, models, optimizers, precision
from helpers.parity import rank as parity_rank
from helpers.parity import table as parity
from helpers.parity.oracle import STEPS
from helpers.parity.precision import LIMIT, OVERFLOWING, Scaling, fp16
from helpers.parity.table import Refused, Row, keep_quick
from helpers.pool import Pools

DDP, ZERO1, ZERO2 = ((f"parallel.strategy={name}",) for name in ("ddp", "zero1", "zero2"))
HYBRID = ("parallel.replicate=2",)
TENSOR, CONTEXT, EXPERT = ((f"parallel.{axis}=2",) for axis in ("tensor", "context", "expert"))
MICRO = ("train.micro_batch_size=1",)
PIPELINE = ("parallel.pipeline=2", *MICRO)
HALVES = (0, 1, 2), (3, 4, 5)
THIRDS = (0, 1), (2, 3), (4, 5)
ONE_BY_ONE = tuple((place,) for place in range(6))

FP16 = ("precision.compute=fp16",)
PLAIN = fp16()
OVERFLOWS = fp16("overflows in fp16", scaling=Scaling(2.0**22, 3))
"""Begins with a scale that is far too large, and grows so often that it is so again and again."""
INJECTED = fp16("an overflow in fp16", scaling=Scaling(injected=(OVERFLOWING,)))
SUMS = fp16("sums in fp16", scaling=Scaling(sums_in_fp16=True))
EXPERTS = fp16(
    "auxiliary loss in fp16",
    functools.partial(experts.same_mixture, balance_loss=10.0),
    ("model.balance_loss=10.0", "run.seed=4"),
    loss=experts.same_balanced_loss,
    base=experts.TEXT,
)
INJECTED_AMONG_EXPERTS = replace(
    EXPERTS,
    name="an overflow among experts in fp16",
    loop=functools.partial(precision.loop, scaling=Scaling(injected=(1,))),
)
"""Early, so that it is compared what comes after it: later a rounding sends a token to another expert."""
LIMITED = replace(
    models.case_of(precision.Limited),
    name="hooks in fp16",
    overrides=(*models.case_of(precision.Limited).overrides, *Scaling().overrides),
    loop=functools.partial(precision.loop, scaling=Scaling(injected=(OVERFLOWING,), limit=LIMIT)),
    loop_follows=True,
)

LAYOUTS = {
    "one process": (1, (), None),
    "one process, micro batches": (1, ("train.micro_batch_size=2",), THIRDS),
    "ddp": (2, DDP, HALVES),
    "ddp, micro batches": (2, (*DDP, *MICRO), ONE_BY_ONE),
    "zero1": (2, ZERO1, HALVES),
    "zero2, micro batches": (2, (*ZERO2, *MICRO), ONE_BY_ONE),
    "fsdp": (2, (), HALVES),
    "fsdp, recomputed": (2, ("train.activation_checkpointing=blocks",), HALVES),
    "hsdp, micro batches": (4, (*HYBRID, *MICRO), ONE_BY_ONE),
    "tensor": (2, TENSOR, None),
    "pipeline": (2, PIPELINE, ONE_BY_ONE),
    "pipeline, interleaved": (2, (*PIPELINE, "parallel.schedule=interleaved"), ONE_BY_ONE),
    "fsdp x tensor": (4, TENSOR, HALVES),
    "fsdp x pipeline": (4, PIPELINE, ONE_BY_ONE),
    "context": (2, CONTEXT, None),
    "fsdp x context": (4, CONTEXT, HALVES),
    "expert": (2, EXPERT, HALVES),
    "fsdp x expert": (4, EXPERT, THIRDS),
}
SPLIT = ("tensor", "context")
"""Within a row: sums of its parts are rounded once more than on one process, from the first step on."""

QUICK = {
    "one process, fp16",
    "one process, overflows in fp16",
    "ddp, micro batches, overflows in fp16",
    "zero2, micro batches, fp16",
    "fsdp, overflows in fp16",
    "fsdp, sums in fp16",
    "tensor, overflows in fp16",
    "pipeline, overflows in fp16",
    "context, fp16",
    "expert, auxiliary loss in fp16",
    "pipeline, auxiliary loss in fp16",
    "fsdp, hooks in fp16",
    "one process, muon in fp16",
}


def row_of(layout, case):
    size, overrides, parts = LAYOUTS[layout]
    name = f"{layout}, {case.name}"
    if any(axis in layout for axis in SPLIT) or (case is TIED and "pipeline" in layout):
        return Row(name, size, overrides, case, 0.01, 0.02, parts)
    if "expert" in layout:  # their rows come from several processes, and are summed in fp16 in another order
        return Row(name, size, overrides, case, 1e-4, 1e-3, parts)
    # Muon's own iterations are in bf16: on several processes a weight is off by 1.4e-4 after eight steps.
    return Row(name, size, overrides, case, 1e-5, 1e-3 if case is MUON else 2e-5, parts)


MUON = fp16("muon in fp16", overrides=optimizers.MUON.overrides, optimizer=precision.Two)
TIED = fp16("tied in fp16", precision.tied_transformer, ("model.tie_embeddings=true",))
ROWS = [
    *(row_of(name, PLAIN) for name in LAYOUTS if "expert" not in name),
    # Where a row is cut, an overflow in the sum of its parts is none in a part.
    *(row_of(name, OVERFLOWS) for name in LAYOUTS if "expert" not in name and "context" not in name),
    *(row_of(name, EXPERTS) for name in ("one process", "expert", "fsdp x expert", "pipeline", "fsdp x pipeline")),
    *(row_of(name, SUMS) for name in ("one process, micro batches", "ddp", "fsdp", "tensor")),
    *(row_of(name, LIMITED) for name in ("one process", "fsdp")),
    row_of("one process", TIED),
    row_of("fsdp", TIED),
    row_of("pipeline", TIED),
    row_of("one process", MUON),
    row_of("fsdp", MUON),
]
TABLE = keep_quick(ROWS, QUICK)

REFUSED = [
    Refused("sums in fp16 of what is computed in fp32", 1, ("precision.reduce=fp16",), "would be lost"),
    Refused(
        "sums in bf16 of what is computed in fp16", 1, ("precision.compute=fp16", "precision.reduce=bf16"), "fewer"
    ),
    Refused(
        "a scale of the loss in bf16", 1, ("precision.compute=bf16", "precision.loss_scale.initial=2"), "is of comp"
    ),
    Refused(
        "a first scale below the least",
        1,
        (*FP16, "precision.loss_scale.initial=0.5"),
        "at least minimum",
    ),
    Refused(
        "fp16 with a backward pass in two parts",
        2,
        (*PIPELINE, "parallel.schedule=zbv"),
        "adds up the gradients of weights in fp16",
        PLAIN,
    ),
]


@pytest.mark.parametrize("row", [row.param() for row in TABLE])
def test_a_row_is_the_bare_loop(pools, row):
    defect = functools.partial(precision.overflow_in_a_part, row.processes - 1) if row.case is LIMITED else None
    job = replace(row.job, defect=defect) if defect else row.job
    precision.check(row, pools.run(row.processes, precision.train, job))


PART_OF_ONE = [name for name in LAYOUTS if not {"one", "ddp", "micro"} & set(re.split("[ ,]+", name))]
"""Layouts in which a process alone has a part of the first gradient."""


INJECTIONS = [
    pytest.param(layout, defect, id=f"{layout}-{name}", marks=[] if layout in quick else [pytest.mark.slow])
    for name, defect, layouts, quick in (
        ("loss", precision.overflow_in_a_loss, LAYOUTS, ("ddp", "tensor")),
        ("part", precision.overflow_in_a_part, PART_OF_ONE, ("fsdp", "pipeline", "expert")),
    )
    for layout in layouts
]


@pytest.mark.parametrize(("layout", "defect"), INJECTIONS)
def test_an_overflow_on_one_process_is_skipped_by_all_of_them_and_halves_the_scale_of_all(pools, layout, defect):
    row, steps = row_of(layout, INJECTED), (OVERFLOWING,)
    if "expert" in layout:
        # Its last weights are not compared, because of that token.
        row, steps = replace(row_of(layout, INJECTED_AMONG_EXPERTS), weight_tolerance=100.0), (1,)
    job = replace(row.job, defect=functools.partial(defect, row.processes - 1, steps))
    precision.check(row, pools.run(row.processes, precision.train, job))


@pytest.mark.parametrize(
    "layout", ["fsdp", *(pytest.param(axis, marks=pytest.mark.slow) for axis in SPLIT), "pipeline"]
)
def test_an_overflow_that_only_one_process_sees_fails_its_row(pools, layout):
    row = row_of(layout, INJECTED)
    job = replace(row.job, defect=functools.partial(precision.skipped_by_one_process, row.processes - 1))
    with pytest.raises(AssertionError, match=r"scales and skips of process|before step"):
        precision.check(row, pools.run(row.processes, precision.train, job))


@pytest.mark.parametrize("layout", ["one process", "pipeline"])
def test_an_auxiliary_loss_that_is_not_scaled_fails_its_row(pools, layout):
    row = row_of(layout, EXPERTS)
    job = replace(row.job, defect=precision.auxiliary_loss_without_scale)
    with pytest.raises(AssertionError, match=r"scales and skips|Not equal to tolerance"):
        precision.check(row, pools.run(row.processes, precision.train, job))


@pytest.mark.parametrize(
    ("first", "second"),
    [("pipeline", "pipeline"), ("one process", "fsdp"), pytest.param("pipeline", "ddp", marks=pytest.mark.slow)],
)
def test_a_run_that_is_stopped_goes_on_with_the_scale_that_it_had(pools, tmp_path, first, second):
    history = resumed(pools, tmp_path, first, second)
    row = row_of(second, OVERFLOWS)
    whole = pools.run(row.processes, precision.train, row.job)[0].value[0].history
    names = ("loss_scale", "skipped_steps")
    assert [[point[name] for name in names] for point in history] == [
        [point[name] for name in names] for point in whole
    ]
    np.testing.assert_allclose(history[-1]["loss"], whole[-1]["loss"], rtol=0.01)


def test_a_scale_that_is_not_restored_is_seen(pools, tmp_path):
    with pytest.raises(AssertionError):
        test_a_run_that_is_stopped_goes_on_with_the_scale_that_it_had(
            FirstHealthy(pools, precision.scale_not_restored), tmp_path, "one process", "one process"
        )


def test_without_a_scale_in_the_checkpoint_a_run_begins_with_a_new_one_and_says_so(pools, tmp_path):
    job = row_of("one process", OVERFLOWS).job
    defect = replace(job, defect=precision.scale_not_saved)
    assert pools.run(1, precision.attempt, defect, str(tmp_path), 8)[0].kind == "done"
    trained, lines = pools.run(1, precision.attempt, job, str(tmp_path), STEPS)[0].value
    assert "the checkpoint has no loss_scale, which begins anew" in lines
    assert [trained.history[place]["loss_scale"] for place in (7, 8)] == [2.0**17, 2.0**22]
    assert len(trained.history) == STEPS


def resumed(pools, folder, first, second):
    """The history of a run that was stopped after seven steps of one layout and went on in another."""
    for layout, num_steps in ((first, 7), (second, STEPS)):
        row = row_of(layout, OVERFLOWS)
        answers = pools.run(row.processes, precision.attempt, row.job, str(folder), num_steps)
        assert {answer.kind for answer in answers} == {"done"}, answers
    return answers[0].value[0].history


@dataclass(frozen=True)
class FirstHealthy:
    """Pools whose second and later jobs are broken on purpose."""

    pools: Pools
    defect: object

    def run(self, size, function, job, *arguments):
        goes_on = bool(arguments) and bool(list(Path(arguments[0]).rglob("COMMITTED")))
        return self.pools.run(size, function, replace(job, defect=self.defect) if goes_on else job, *arguments)


@pytest.mark.parametrize("allowed", [0, 2])
def test_a_run_whose_gradients_overflow_at_the_least_scale_has_diverged(pools, allowed):
    scaling = Scaling(minimum=2.0**14)
    case = fp16("overflowing for good", overrides=(f"train.max_nonfinite_steps={allowed}",), scaling=scaling)
    job = replace(Row("", 2, (), case).job, defect=functools.partial(precision.overflow_in_a_part, 1, range(5, 20)))
    for answer in pools.run(2, precision.train, job):
        assert answer.kind == "refused", answer
        # Steps 6 and 7 have scales of 2**16 and 2**15.
        assert f"step {8 + allowed} at the least loss scale, 16384, is not finite" in answer.value


FAINT = replace(models.case_of(precision.Faint), data=precision.faint_rows)
EPSILON = ("train.steps=100", "optimizer.epsilon=1e-12", "optimizer.weight_decay=0", "train.gradient_clip_norm=0")


def test_a_model_whose_gradients_are_too_small_for_fp16_trains_with_a_scale_and_not_without(pools):
    scales = {"fp32": ("precision.compute=fp32",), "scaled": Scaling().overrides}
    scales["unscaled"] = Scaling(initial=1.0).overrides
    curves = {}
    for name, overrides in scales.items():
        job = replace(Row("", 1, (*EPSILON, *overrides), FAINT).job, defect=contextlib.nullcontext)
        (answer,) = pools.run(1, parity_rank.train, job)
        assert answer.kind == "done", answer
        curves[name] = answer.value
    first, last = (curves["fp32"].history[place]["loss"] for place in (0, -1))
    assert last < first / 3
    np.testing.assert_allclose(curves["scaled"].history[-1]["loss"], last, rtol=0.1)
    stands = curves["unscaled"]
    assert all(np.array_equal(stands.first_weights[name], value) for name, value in stands.weights.items())


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.name)
def test_what_is_not_offered_is_refused_in_one_line(pools, row):
    parity.check_refusal(pools, row)
