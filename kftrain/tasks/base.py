"""The protocol of a task: what is learned, apart from how it is distributed.

A task has two halves. The *sharding half* (`schema`, `settings`, `encode`, `baselines`) runs where there is no torch.
The *training half* may import torch, inside its methods; `metrics`, `slice_names` and `confusion` are numpy only, since
the gate calls them where there is no torch. Neither half knows processes: training sums what a task returns over all of
them.

Everything is a sum, so that any number of processes gives the same answer: the loss is a sum of terms over a count of
terms; a metric is a function of sums over samples (accuracy = correct / samples), which is also what makes
bootstrapping it cheap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kftrain.data.schema import Arrays, Block, Record, SampleSchema

if TYPE_CHECKING:
    import pandas
    import torch

    Batch = dict[str, torch.Tensor]


class Task(Protocol):
    """What is learned. Built as `TaskClass(**options)` from the keys of the `task` section other than `kind`.

    A task's constructor raises ConfigError for options it does not accept.
    """

    # -- sharding half: no torch ------------------------------------------------------------------------------------

    def schema(self) -> SampleSchema:
        """Fields of one sample."""
        ...

    def settings(self) -> dict[str, Any]:
        """JSON of everything that changes the encoded bytes (tokenizer digest, lengths): part of the source digest."""
        ...

    def encode(self, records: Iterable[Record], split: str) -> Iterator[Block]:
        """Blocks of a split, from its records in order. Keys are unique within the split.

        Validation blocks hold whole records, one record per block, so that a block is an independent unit.
        """
        ...

    def baselines(self, records: Iterable[Record]) -> dict[str, dict[str, float]]:
        """Metric name -> baseline name -> value on these validation records; may be empty."""
        ...

    # -- training half ----------------------------------------------------------------------------------------------

    def model_arguments(self) -> dict[str, Any]:
        """What the model must know of the task: `vocab_size`, `num_classes`, `image_size` …; JSON."""
        ...

    def count_terms(self, arrays: Arrays) -> np.ndarray:
        """Number of loss terms of each row, `[rows]` int64: the weights of the mean loss."""
        ...

    def batch(self, arrays: Arrays) -> Batch:
        """Tensors on the CPU for `loss` and `statistics`, from rows stacked to `[rows, *shape]`."""
        ...

    def loss(self, model: torch.nn.Module, batch: Batch, weight: torch.Tensor) -> torch.Tensor:
        """Sum (not mean) of the loss terms, a scalar in fp32. `weight` `[rows]` is 0 for padding rows, else 1."""
        ...

    def statistics(self, model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        """Per-row sums, each `[rows]` float64, from which `metrics` computes every metric."""
        ...

    def metrics(self, sums: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Metrics from sums of `statistics` over rows.

        Elementwise: sums of shape `[...]` give metrics of shape `[...]`.
        """
        ...

    def slice_names(self, keys: list[str], statistics: Mapping[str, np.ndarray]) -> list[str]:
        """Name of the slice that each group belongs to (all equal: no slices).

        `statistics`: sums per group, `[groups]`.
        """
        ...

    def confusion(self, statistics: Mapping[str, np.ndarray]) -> tuple[list[str], np.ndarray] | None:
        """Class labels and counts `[true, predicted]` int64 from sums per group; None where classes make no sense."""
        ...

    def predict(self, model: torch.nn.Module, inputs: pandas.DataFrame) -> pandas.DataFrame:
        """What a registered model answers: one row per input row, equal to what evaluation computes.

        A task with an attribute `input_column` also gets lists, arrays and series of values, as a column of that name.
        """
        ...


class Described(Protocol):
    """What a task may have besides, for people who read reports."""

    loss_unit: str
    """Unit of one loss term: `nats per token`."""

    loss_metric: str
    """The metric that is the mean loss; the samples where it is largest are shown. Without it: the gate's metric."""

    def examples(self, model: torch.nn.Module, arrays: Arrays, batch: Batch) -> list[Mapping[str, Any]]:
        """What to show of each of some rows: name -> text, a number, or a picture as uint8 `[h, w]` or `[h, w, 3]`.

        `batch`: the same rows on the model's device. Called in evaluation mode without gradients, on one process.
        """
        ...
