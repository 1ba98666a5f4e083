"""The section `evaluate`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kftrain.core.plain import MAX_INTEGER
from kftrain.settings.section import Amount, Count, KeepsTraining, Section


class EvaluateConfig(Section):
    """Evaluation of the model: quick ones while training, and the full one of the trained model."""

    interval_steps: KeepsTraining[Amount] = 200
    """Steps between quick evaluations on the first validation samples while training; 0 disables them."""
    max_interval_samples: KeepsTraining[Count] = 256
    """Maximum number of samples in a quick evaluation."""
    batch_size: KeepsTraining[Count] = 32
    """Samples per forward pass.

    Batches are cut from the data, not from the number of processes: results are the same on any number.
    """
    layout: KeepsTraining[Literal["auto", "training", "copies"]] = "auto"
    """Layout of the model over the processes. `training` uses the section `parallel`; `copies` gives each process the
    whole model; `auto` copies weights of up to 1 GiB, which is faster, and shards larger ones. A model that does not
    allow its layout is sharded over all processes, or copied, and a line of the log says so."""
    num_bootstrap: KeepsTraining[Annotated[int, Field(ge=100, le=MAX_INTEGER)]] = 1000
    """Number of bootstrap resamples for each confidence interval."""
    num_examples: KeepsTraining[Annotated[int, Field(ge=0, le=12)]] = 6
    """Number of samples that reports show: this many spread over the data, and this many with the largest loss; 0 shows
    no data."""
    reference: KeepsTraining[str] = ""
    """A second, fixed dataset: its manifest.json, its folder of shards, or a run that has it. Champion and challenger
    are also measured on its validation split, and the gate requires that there is no regression. Empty: none."""
    metrics: KeepsTraining[tuple[str, ...]] = ()
    """Additional metrics, each a `module:attr`: a function from the task's sums to metrics, like `Task.metrics`."""
    num_latency_passes: KeepsTraining[Annotated[int, Field(ge=0, le=10000)]] = 30
    """Forward passes that measure latency and memory, with one sample and again with a batch; 0 measures neither."""
    cpu_threads: KeepsTraining[Count] = 1
    """CPU threads per process; fixed, because the order of floating-point sums depends on it."""
