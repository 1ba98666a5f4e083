"""The section `registry`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from kftrain.errors import ConfigError
from kftrain.settings.section import Count, KeepsTraining, Section


class RegistryConfig(Section):
    """How a model is registered and when it becomes champion."""

    model_name: KeepsTraining[str] = ""
    """Name of the registered model; empty: the run's name."""
    promotion: KeepsTraining[Literal["auto", "manual", "never"]] = "auto"
    """`auto`: a challenger that passes the gate becomes champion; `manual`: it gets the alias `challenger`, and a
    person decides; `never`: the gate only reports."""
    metric: KeepsTraining[str] = "bits_per_byte"
    """The metric that the gate compares."""
    goal: KeepsTraining[Literal["minimize", "maximize", ""]] = ""
    """Which direction of the metric is better; empty: what the task says of it. Of other metrics it must be given."""
    min_effect: KeepsTraining[Annotated[float, Field(ge=0.0)]] = 0.0
    """The improvement must exceed this, in the metric's unit."""
    confidence: KeepsTraining[Annotated[float, Field(gt=0.5, lt=1.0)]] = 0.95
    """Confidence of the two-sided interval that the gate looks at: 0.95 promotes an equal model at 2.5 %."""
    correct_repeated_tries: KeepsTraining[bool] = True
    """Whether all tries against one champion together have that confidence: the k-th has a wider interval.

    Without it each try has it, and of many equal models one is promoted in the end.
    """
    max_slice_regression: KeepsTraining[Annotated[float, Field(ge=0.0)] | None] = None
    """A challenger that is shown to be worse than the champion by more than this on a slice is not promoted; in the
    metric's unit. Empty: slices are only reported."""
    max_calibration_error: KeepsTraining[Annotated[float, Field(ge=0.0, le=1.0)] | None] = None
    """A challenger with a larger expected calibration error is not promoted."""
    max_latency_seconds: KeepsTraining[Annotated[float, Field(gt=0.0)] | None] = None
    """Nor one whose forward pass with one sample takes longer, in the median, where it is evaluated."""
    max_memory_bytes: KeepsTraining[Count | None] = None
    """Nor one that takes more memory for a pass with a batch of the evaluation."""
    max_export_bytes: KeepsTraining[Count | None] = None
    """Nor one whose export is larger."""
    reference_margin: KeepsTraining[Annotated[float, Field(ge=0.0)] | None] = None
    """A challenger must be shown to be within so much of the champion on the reference set (`evaluate.reference`), in
    the metric's unit. Empty: it must not be shown to be worse there."""
    slice_min_groups: KeepsTraining[Count] = 20
    """Slices of fewer groups are not looked at by the gate."""
    min_groups: KeepsTraining[Count] = 20
    """With fewer groups (documents, images) in the validation split, a person decides, whatever `promotion` says."""
    trusted_kinds: KeepsTraining[tuple[str, ...]] = ()
    """Kinds (`module:attr`) of a champion's model and task that may be built, beside those of this configuration."""
    trusted_roots: KeepsTraining[tuple[str, ...]] = ()
    """Storage roots below which champions are read, beside `run.storage_root`."""

    def require_metric(self, known: Iterable[str]) -> None:
        """Raises ConfigError where the task has other metrics than the one that the gate is to compare.

        The metric is no part of what is trained, so a run goes on with another one from where it was.
        """
        names = sorted(known)
        if self.metric in names:
            return
        near = (difflib.get_close_matches(self.metric, names, n=1, cutoff=0.0) or ["METRIC"])[0]
        fix = f"known: {', '.join(names) or 'none'}; go on with --resume RUN --set registry.metric={near}"
        raise ConfigError("the task has no such metric", where="registry.metric", value=self.metric, fix=fix)
