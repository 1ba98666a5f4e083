"""The section `evaluate`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kftrain.core.plain import MAX_INTEGER
from kftrain.settings.section import Amount, Count, KeepsTraining, Section


class EvaluateConfig(Section):
    """How the trained model is measured."""

    interval_steps: KeepsTraining[Amount] = 200
    """Steps between quick evaluations on the first validation samples while training; 0: none."""
    max_interval_samples: KeepsTraining[Count] = 256
    """Samples of a quick evaluation."""
    batch_size: KeepsTraining[Count] = 32
    """Samples per forward pass.

    Batches are cut from the data, not from the number of processes: results are the same on any number.
    """
    layout: KeepsTraining[Literal["auto", "training", "copies"]] = "auto"
    """How the model is spread over the processes: `training` as the section `parallel` says, `copies` not at all;
    `auto` copies weights of up to 1 GiB, which is faster, and spreads larger ones. A model that cannot be spread so is
    sharded over all processes, or copied, and a line says so."""
    num_bootstrap: KeepsTraining[Annotated[int, Field(ge=100, le=MAX_INTEGER)]] = 1000
    """Resamples behind each confidence interval."""
    num_examples: KeepsTraining[Annotated[int, Field(ge=0, le=12)]] = 6
    """Samples that reports show: so many spread over the data, so many of the largest loss; 0: nothing of the data."""
    reference: KeepsTraining[str] = ""
    """A second dataset, always the same: its manifest.json, its folder of shards, or a run that has it. Champion and
    challenger are measured on its validation split, too, and the gate asks for no regression there. Empty: none."""
    metrics: KeepsTraining[tuple[str, ...]] = ()
    """Further metrics, `module:attr` each: a function from the task's sums to metrics, as `Task.metrics`."""
    num_latency_passes: KeepsTraining[Annotated[int, Field(ge=0, le=10000)]] = 30
    """Forward passes by which latency and memory are measured, each once with one sample and once with a batch; 0: none
    are."""
    cpu_threads: KeepsTraining[Count] = 1
    """Threads of one process on a CPU; fixed, because the order of floating-point sums depends on it."""
