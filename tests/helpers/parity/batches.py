"""Batches that grow, and learning rates that follow them, for the table of parity."""

import contextlib
from dataclasses import replace

from helpers.parity.defects import patched
from helpers.parity.oracle import Case, warmup_cosine

from kftrain.train.loop import Loop

SIZES = (2,) * 3 + (4,) * 5 + (6,) * 12
GROWING = ("train.batch_warmup=[{steps: 3, batch_size: 2}, {steps: 5, batch_size: 4}]",)


def scaled(rule, reference):
    return (f"optimizer.scale_learning_rate={rule}", f"optimizer.reference_batch_size={reference}")


def linear(step):
    return warmup_cosine(step) * SIZES[step] / 12


def square_root(step):
    return warmup_cosine(step) * (6 / 24) ** 0.5


def square_roots(step):
    return warmup_cosine(step) * (SIZES[step] / 3) ** 0.5


LINEAR = Case("linear rate", scaled("linear", 3), rate=lambda step: 2 * warmup_cosine(step))
SQUARE_ROOT = Case("square root rate", scaled("square_root", 24), rate=square_root)
GROWN = Case("growing batches", GROWING, batches=SIZES)
GROWN_LINEAR = Case("growing batches with a linear rate", (*GROWING, *scaled("linear", 12)), rate=linear, batches=SIZES)
GROWN_ROOT = replace(
    GROWN_LINEAR,
    name="growing batches with a square root rate",
    overrides=(*GROWING, *scaled("square_root", 3)),
    rate=square_roots,
)
CASES = [LINEAR, SQUARE_ROOT, GROWN, GROWN_LINEAR, GROWN_ROOT]


def resumed(loop, loaded, resume=Loop.resume):
    """Scales the learning rate of the configuration, which is scaled in each step."""
    if loaded is not None:
        optimizer = loop._config.optimizer
        factor = loop._find_rate(0) * optimizer.warmup_steps / optimizer.learning_rate
        scaled = optimizer.model_copy(update={"learning_rate": factor * optimizer.learning_rate})
        loop._config = loop._config.model_copy(update={"optimizer": scaled})
    return resume(loop, loaded)


def rate_scaled_twice_on_resume():
    return patched(Loop, "resume", resumed)


@contextlib.contextmanager
def positions_of_equal_steps():
    """A resume takes all steps for as large as the last ones."""
    from kftrain.data.batch_sizes import BatchSizes

    with patched(BatchSizes, "count_samples", lambda sizes, num_steps: num_steps * sizes.sizes[-1]):
        yield
