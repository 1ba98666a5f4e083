"""Averages of the weights for the table of parity: torch's own, beside a bare loop on one process."""

import contextlib
import math
from dataclasses import replace

import numpy as np
import torch
from helpers.parity import models, optimizers, pipeline, precision, rounding
from helpers.parity import oracle as parity_oracle
from helpers.parity.defects import patched
from helpers.parity.oracle import STEPS, Case, Path
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from kftrain.train import averages
from kftrain.train.averages import Averages

DECAY, START, INTERVAL = 0.7, 3, 4
AVERAGED = (f"train.average_decay={DECAY}", f"train.average_start_steps={START}")
EVALUATED = (f"evaluate.interval_steps={INTERVAL}", "evaluate.batch_size=5")

CASES = [
    replace(
        case,
        name="averages" if case == Case() else f"{case.name} with averages",
        overrides=(*case.overrides, *AVERAGED),
    )
    for case in (Case(), models.TIED, models.CLAMPED, models.FROZEN, models.NORMED, optimizers.MUON)
]
TEXT, TIED, CLAMPED, FROZEN, NORMED, MUON = CASES
STAGED = [
    replace(case, name=f"{case.name} with averages", overrides=(*case.overrides, *AVERAGED))
    for case in (pipeline.FROZEN_START, pipeline.FROZEN_END)
]
FP16 = precision.fp16("averages in fp16", overrides=AVERAGED, scaling=precision.Scaling(2.0**22, 3))
"""Its first steps are skipped, and one of three or four later ones."""
ROUNDED = replace(rounding.ROUNDED, name="averages of weights in bf16", overrides=(*rounding.OVERRIDES, *AVERAGED))
SCORED = replace(TEXT, name="evaluated averages", overrides=(*TEXT.overrides, *EVALUATED))


class Averaging:
    """An optimizer after each of whose steps torch averages, from some step on; and which scores the average."""

    def __init__(self, case, network):
        self.case = case
        self.network = network
        self.optimizer = case.optimizer(network)
        self.param_groups = self.optimizer.param_groups
        self.averaged = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        self.num_steps = 0
        self.is_skipped = True
        self.perplexities = []

    def step(self):
        self.is_skipped = False
        self.optimizer.step()

    def zero_grad(self):
        """The last thing that the loop asks for: the network's own `after_step` comes before it."""
        self.num_steps += not self.is_skipped
        if self.num_steps > START and not self.is_skipped:
            self.averaged.update_parameters(self.network)
        if self.case is SCORED and (self.num_steps % INTERVAL == 0 or self.num_steps == STEPS):
            rows = self.case.data()
            network = self.averaged.module if self.num_steps > START else self.network
            with torch.no_grad():
                loss = float(self.case.loss(network, rows))
            self.perplexities.append(math.exp(loss / self.case.terms(rows)))
        self.is_skipped = True
        self.optimizer.zero_grad()


def check(row, answers):
    """Raises AssertionError where the last averages, or what was scored with them, are not torch's."""
    trained, made = answers[0].value, []

    def optimizer(network):
        made.append(Averaging(row.case, network))
        return made[-1]

    weights = {name: np.array(value) for name, value in trained.first_weights.items()}
    path = Path(trained.path, row.weight_tolerance) if row.case.is_followed else None
    parity_oracle.run(replace(row.case, optimizer=optimizer), weights, row.parts, path=path)
    expected = dict(made[0].averaged.module.state_dict())
    assert trained.averages.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(trained.averages[name], value.numpy(), rtol=0, atol=row.weight_tolerance)
    assert any(not np.array_equal(trained.averages[name], trained.weights[name]) for name in expected)
    key = "validation/perplexity"
    found = [point[key] for point in trained.history if key in point]
    np.testing.assert_allclose(found, made[0].perplexities, rtol=row.tolerance)


def check_rounded(row, trained):
    """The same of weights that are kept in bf16, by hand: in evaluations the model has fp32 averages in bf16."""
    steps = []
    rounding.loop(row.case, trained.first_weights, row.parts, row.processes, after_step=steps.append)
    for name, value in trained.averages.items():
        average = steps[START][name].float()
        for weights in steps[START + 1 :]:
            average = average * DECAY + weights[name].float() * (1 - DECAY)
        nearest = average.bfloat16().float().numpy()
        np.testing.assert_allclose(value, nearest, rtol=2.0**-7, atol=row.weight_tolerance, err_msg=name)
        assert (value == nearest).mean() > 0.99 or row.weight_tolerance


def counts_of_frozen_stages_stand_still():
    """A stage that has nothing to average does not count the steps."""

    def update(averages, found_inf, before=Averages.update):
        if averages._averages:
            before(averages, found_inf)

    return patched(Averages, "update", update)


def gathered_weights_stay():
    """After an evaluation units keep what they have gathered, which is averages."""
    return patched(averages, "FSDPModule", type("Nothing", (), {}))


def averages_of_one_part_follow():
    """The averages are those of the first steps."""
    return patched(Averages, "update", lambda self, found_inf: None)


@contextlib.contextmanager
def weights_stay_replaced():
    """After an evaluation the model keeps the averages."""
    copies = []

    def copy_once(into, values):
        copies.append(len(copies))
        if len(copies) % 2:
            sharded_copy(into, values)

    sharded_copy = averages._copy
    with patched(averages, "_copy", copy_once):
        yield
