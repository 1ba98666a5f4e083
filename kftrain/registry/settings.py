"""The section `registry`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from kftrain.errors import ConfigError
from kftrain.settings.section import Count, KeepsTraining, Section


class RegistryConfig(Section):
    """Registration of models, and the gate that a challenger passes to become champion."""

    model_name: KeepsTraining[str] = ""
    """Name of the registered model; empty: the run's name."""
    promotion: KeepsTraining[Literal["auto", "manual", "never"]] = "auto"
    """Effect of a passed gate. `auto`: the challenger becomes champion; `manual`: it gets the alias `challenger`, and a
    person decides; `never`: the gate only reports."""
    metric: KeepsTraining[str] = "bits_per_byte"
    """Metric that the gate compares."""
    goal: KeepsTraining[Literal["minimize", "maximize", ""]] = ""
    """Better direction of the metric; empty: the direction that the task gives. Required if the task gives none."""
    min_effect: KeepsTraining[Annotated[float, Field(ge=0.0)]] = 0.0
    """Improvement that a challenger must exceed, in the metric's unit."""
    confidence: KeepsTraining[Annotated[float, Field(gt=0.5, lt=1.0)]] = 0.95
    """Confidence of the gate's two-sided interval: 0.95 promotes an equal model with a probability of 2.5 %."""
    correct_repeated_tries: KeepsTraining[bool] = True
    """Hold that confidence for all tries against one champion together: later tries get wider intervals.

    With false each try has it alone, and among many equal models one is promoted in the end.
    """
    max_slice_regression: KeepsTraining[Annotated[float, Field(ge=0.0)] | None] = None
    """Regression on a slice, in the metric's unit, that bars a challenger if it is shown to be worse than the champion
    by more. Empty: slices are only reported."""
    max_calibration_error: KeepsTraining[Annotated[float, Field(ge=0.0, le=1.0)] | None] = None
    """Largest expected calibration error with which a challenger is promoted."""
    max_latency_seconds: KeepsTraining[Annotated[float, Field(gt=0.0)] | None] = None
    """Longest forward pass with one sample, as the median where it is evaluated, with which a challenger is
    promoted."""
    max_memory_bytes: KeepsTraining[Count | None] = None
    """Most memory for a forward pass with a batch of the evaluation with which a challenger is promoted."""
    max_export_bytes: KeepsTraining[Count | None] = None
    """Largest export with which a challenger is promoted."""
    reference_margin: KeepsTraining[Annotated[float, Field(ge=0.0)] | None] = None
    """Distance to the champion on the reference set (`evaluate.reference`), in the metric's unit, within which a
    challenger must be shown to be. Empty: it must only not be shown to be worse there."""
    slice_min_groups: KeepsTraining[Count] = 20
    """Fewest groups in a slice for which the gate looks at it."""
    min_groups: KeepsTraining[Count] = 20
    """Fewest groups (documents, images) in the validation split with which the gate decides; with fewer a person does,
    whatever `promotion` says."""
    trusted_kinds: KeepsTraining[tuple[str, ...]] = ()
    """Kinds (`module:attr`) of a champion's model and task that may be built, besides those of this configuration."""
    trusted_roots: KeepsTraining[tuple[str, ...]] = ()
    """Storage roots below which champions may be read, besides `run.storage_root`."""

    def require_metric(self, known: Iterable[str]) -> None:
        """Raise ConfigError if the task does not have the metric that the gate is to compare.

        The metric does not change training, so the run may go on from where it was with another one.
        """
        names = sorted(known)
        if self.metric in names:
            return
        near = (difflib.get_close_matches(self.metric, names, n=1, cutoff=0.0) or ["METRIC"])[0]
        fix = f"known: {', '.join(names) or 'none'}; go on with --resume RUN --set registry.metric={near}"
        raise ConfigError("the task has no such metric", where="registry.metric", value=self.metric, fix=fix)
