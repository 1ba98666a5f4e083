"""A task says what is learned, apart from how it is distributed: three protocols and the base class that joins them.

`EncodingTask` (`settings`, `encode`, `baselines`) runs where there is no torch. `TrainingTask` may import torch inside
its methods; `metrics`, `slice_names` and `confusion` are numpy only, since the gate calls them where there is no torch.
`ServingTask` answers the rows of a data frame. None of them knows processes: training sums what a task returns over all
of them.

Everything is a sum, so that any number of processes gives the same answer: the loss is a sum of terms over a count of
terms; a metric is a function of sums over samples (accuracy = correct / samples), which is also what makes
bootstrapping it cheap.

The forward pass is not the task's: rows become `batch`, `inputs` are the model's arguments, and `loss` and `statistics`
are given what the model has returned. So the parts of a model may stand on several processes in between.

`Task` has a default for everything that can have one. What every task says itself: `schema`, `loss`, `statistics`,
`metrics`. `Regression` and `Classification` leave only the first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

import numpy as np

from kftrain.data.schema import CLUSTER, Arrays, Block, Field, Record, SampleSchema, Window
from kftrain.tasks.fields import as_field, extensions_of
from kftrain.tasks.shown import show_fields

if TYPE_CHECKING:
    import pandas
    import torch

    Batch = dict[str, torch.Tensor]

PREDICT_BATCH_ROWS = 256
"""Rows of one forward pass in `predict`, unless a task says otherwise."""


class SampleTask(ABC):
    """Samples that a task reads, and the options that it was built with: common to its three parts."""

    targets: ClassVar[tuple[str, ...]] = ()
    """Fields of a sample that the model is not given: the defaults of `inputs` and `predict` leave them out."""

    built_from: Any = None
    """Section `task` of the configuration that the task was built from: another process can build it again."""

    options: Mapping[str, Any] = MappingProxyType({})
    """Options of the constructor, given ones and defaults; set when the task is built from a configuration."""

    @abstractmethod
    def schema(self) -> SampleSchema:
        """Return the fields of one sample."""


class EncodingTask(SampleTask):
    """Sharding's part of a task: records become samples. Nothing of it imports torch."""

    def validation_schema(self) -> SampleSchema:
        """Return the fields of a validation sample that `rows` makes rows of. By default those of `schema`."""
        return self.schema()

    def learn(self, records: Iterable[Record]) -> None:
        """Learn what encoding needs to know of the training split; called before anything is encoded.

        Afterwards `settings` tells of it and `assets` has it. `records`: the training split's, in order; as many are
        read as are taken. By default nothing is learned.
        """

    @property
    def asset_names(self) -> tuple[str, ...]:
        """Names of the files of `assets`, as far as the options tell. By default none."""
        return ()

    def assets(self) -> dict[str, bytes]:
        """Return the files that encoding depends on (a tokenizer): name -> content. By default none.

        They are kept below the storage root by their digests, which are part of the dataset, and lie in each export.
        """
        return {}

    def restore(self, assets: Mapping[str, bytes]) -> None:
        """Take over the `assets` of an equal task, instead of learning or reading anything. By default do nothing."""

    def cluster(self, record: Record) -> str:
        """Name what this record has in common with others that are like it: a patient, a page, a speaker.

        Records of one cluster are in the same split, and the bootstrap takes a cluster as one unit: ten copies of an
        item tell no more than one, but as ten units they let a quarter of equal models pass for better ones. By default
        each block is by itself.
        """
        return record.key

    def settings(self) -> dict[str, Any]:
        """Return as JSON what changes the encoded bytes (tokenizer digest, lengths); it enters the source digest.

        By default all options: any other one shards the data again.
        """
        return dict(self.options)

    def encode(self, records: Iterable[Record], split: str) -> Iterator[Block]:
        """Yield the blocks of a split, from its records in order. Keys are unique within the split.

        Validation blocks hold whole records, one record per block, so that a block is an independent unit. By default
        each record is a block of one row, made by `encode_field`.
        """
        fields = self.schema().fields
        for record in records:
            arrays = {field.name: self.encode_field(record, field)[np.newaxis] for field in fields}
            yield Block(record.key, arrays, extensions_of(record, fields))

    def encode_field(self, record: Record, field: Field) -> np.ndarray:
        """Make one field of a record's sample, `field.shape` of `field.dtype`; also for the rows of `predict`.

        By default it is what the record has under that name; for an encoded field, an array of `object` that holds the
        file with one of the field's extensions, or the bytes under that name. Raises DataError if that is missing, of
        another shape, not finite, or would be changed by the format (beyond rounding).
        """
        return as_field(record, field)

    def content_fields(self) -> tuple[str, ...]:
        """Name the fields that make a record what it is: records that are equal in these are copies of each other.

        Sharding counts copies, and names those that are in both splits. By default the fields of the schema that the
        model is given; a record that has none of these is compared as a whole.
        """
        return tuple(field.name for field in self.schema().fields if field.name not in self.targets)

    def baselines(self, samples: Iterable[Arrays]) -> dict[str, dict[str, float]]:
        """Compute what trivial predictors reach on the validation split: metric -> baseline -> value. By default none.

        Args:
            samples: Blocks of the validation split as they are stored, in order, read as they are asked for. Each maps
                a field's name to `[rows, *field shape]`; an encoded field to `[1]` of `object`, holding bytes.
        """
        return {}

    def show(self, block: Arrays) -> Mapping[str, Any]:
        """Choose what the report of a dataset shows of a stored block, of which it is given the first rows.

        Name -> text, a number, or a picture as uint8 `[h, w]` or `[h, w, 3]`. By default its first row: files of images
        and arrays that look like one as a picture, files of text as text, single numbers.
        """
        schema = (
            self.schema() if all(field.name in block for field in self.schema().fields) else self.validation_schema()
        )
        return show_fields(schema, block)

    @property
    def names_clusters(self) -> bool:
        """True if the class has a `cluster` of its own."""
        return type(self).cluster is not Task.cluster

    def sample_schema(self, split: str = "train", is_grouped: bool = False) -> SampleSchema:
        """Return the fields of a split's samples as shards hold them: with the cluster, if there is one.

        Where the splits have different fields, training samples have no cluster: nothing asks for it.
        """
        own, validation = self.schema(), self.validation_schema()
        chosen = validation if split == "validation" else own
        if not (self.names_clusters or is_grouped) or (chosen is own and own != validation):
            return chosen
        return SampleSchema((*chosen.fields, Field(CLUSTER, "int64")))


class TrainingTask(SampleTask):
    """Part of a task that training and evaluation ask: samples become batches, outputs become sums, sums metrics.

    Methods may import torch; `metrics`, `slice_names` and `confusion` are numpy only.
    """

    sequence_dims: ClassVar[Mapping[str, int]] = MappingProxyType({})
    """Entry of a batch -> which of its dims is the sequence. These dims are equally long, and entry i of each belongs
    to the same place of the sequence, so that it can be cut into parts for several processes. Checked before the first
    step."""

    loss_unit: ClassVar[str] = ""
    """Unit of the loss, for reports: `nats per token`."""

    loss_metric: ClassVar[str] = ""
    """The metric that is the mean loss, or grows with it; with none the gate's metric tells which samples are hard."""

    metric_goals: ClassVar[Mapping[str, Literal["minimize", "maximize"]]] = MappingProxyType({})
    """Metric -> which direction of it is better. The gate needs `registry.goal` for one that is not here."""

    reading_options: ClassVar[frozenset[str]] = frozenset()
    """Options that change how a model sees a validation sample, but not what its metrics count: models that differ in
    these alone are compared."""

    def model_arguments(self) -> dict[str, Any]:
        """Return what the model must know of the task: `vocab_size`, `num_classes` …; JSON. By default nothing."""
        return {}

    @property
    def window(self) -> Window | None:
        """Cut of a training split that is one stream, in rows of no shape, into samples; None (default): no stream."""
        return None

    def rows(self, sample: Mapping[str, Any]) -> Arrays | None:
        """Turn one validation sample into rows `[k, *shape]`, one at least, as `decode` and `batch` get them.

        `sample`: field name -> its one row. By default None: each sample is one row as it is.
        """
        return None

    def decode(self, sample: Arrays, generator: np.random.Generator | None) -> Arrays:
        """Turn one stored row into what `count_terms` and `batch` get: field name -> `[*shape]`.

        Encoded images become pixels here, and are augmented: on the CPU, while an earlier step is computed. By default
        rows are as they are stored, and this is not called.

        Args:
            sample: Field name -> `[*field shape]`, read only.
            generator: In training, for this call only: its numbers are a function of the seed, the epoch and the place
                in the training order, the same for any number of processes and workers and after a restart. None in
                evaluation and `predict`: nothing is random there.

        Returns arrays of numbers, of the same names, types and shapes for each row. Several threads call it at once,
        or processes of their own (`data.workers`, `data.worker_kind`). Raises DataError for a bad sample.
        """
        return sample

    @property
    def decodes(self) -> bool:
        """True if the class has a `decode` of its own."""
        return type(self).decode is not Task.decode

    def count_terms(self, arrays: Arrays) -> np.ndarray:
        """Count the loss terms of each row, `[rows]` int64: the weights of the mean loss. By default one.

        Called where rows are read, on the CPU, while an earlier step is computed.
        """
        return np.ones(len(next(iter(arrays.values()))), dtype=np.int64)

    def batch(self, arrays: Arrays) -> Batch:
        """Make tensors on the CPU for `inputs`, `loss` and `statistics`, from rows stacked to `[rows, *shape]`.

        Called while an earlier step is computed, unless it draws torch's random numbers.

        By default every field of the schema by its name; unsigned integers of more than 8 bits become int64.
        """
        import torch

        wide = ("uint16", "uint32", "uint64")
        return {
            field.name: torch.from_numpy(np.array(arrays[field.name], "int64" if field.dtype in wide else field.dtype))
            for field in self.schema().fields
        }

    def inputs(self, batch: Batch) -> tuple[Any, ...]:
        """Return the arguments of the model. By default all entries of the batch but `targets`, in order."""
        return tuple(tensor for name, tensor in batch.items() if name not in self.targets)

    @abstractmethod
    def loss(self, output: Any, batch: Batch, weight: torch.Tensor) -> torch.Tensor:
        """Return the sum (not the mean) of the loss terms, a scalar in fp32.

        Args:
            output: What the model returned for `inputs(batch)`; if that is a `ModelOutput`, its `output`.
            batch: Tensors of these rows, on the model's device.
            weight: `[rows]` float32, 0 for padding rows, else 1.
        """

    @abstractmethod
    def statistics(self, output: Any, batch: Batch) -> dict[str, torch.Tensor]:
        """Return per-row sums, each `[rows]` float64, from which `metrics` computes every metric."""

    @abstractmethod
    def metrics(self, sums: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Compute metrics from sums of `statistics` over rows.

        Elementwise: sums of shape `[...]` give metrics of shape `[...]`.
        """

    def tallies(self, output: Any, batch: Batch) -> dict[str, torch.Tensor]:
        """Return whole numbers that an evaluation sums over all rows: name -> int64 of any shape. By default none.

        They describe the whole split: no bootstrap resamples them. `tasks.histograms` makes `reliability` and `scores`,
        from which reports draw calibration and curves; others are summed and not shown.
        """
        return {}

    def slice_names(self, keys: list[str], statistics: Mapping[str, np.ndarray]) -> list[str]:
        """Name the slice that each group belongs to. By default all names are equal: no slices.

        `statistics`: sums per group, `[groups]`.
        """
        return ["all"] * len(keys)

    def confusion(self, statistics: Mapping[str, np.ndarray]) -> tuple[list[str], np.ndarray] | None:
        """Return class labels and counts `[true, predicted]` int64 from sums per group; None (default): no classes."""
        return None

    def examples(self, model: torch.nn.Module, arrays: Arrays, batch: Batch) -> list[Mapping[str, Any]]:
        """Choose what reports show of each of some rows. By default nothing but their keys and metrics.

        Name -> text, a number, or a picture as uint8 `[h, w]` or `[h, w, 3]`. `batch`: the same rows on the model's
        device. Called in evaluation mode without gradients, on one process.
        """
        return [{} for _ in next(iter(arrays.values()))]


class ServingTask(SampleTask):
    """Part of a task that an exported or registered model asks: rows of a data frame become answers."""

    input_column: ClassVar[str | None] = None
    """Column that `predict` reads where a registered model is given lists, arrays or series instead of a data frame."""

    predict_batch_rows: ClassVar[int] = PREDICT_BATCH_ROWS
    """Rows of one forward pass in `predict`."""

    def input_example(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row for `predict`, column -> plain value, as people see it beside the registered model.

        `sample`: the first one of the validation split as it is stored, field name -> its one row. MLflow makes its
        signature from numbers and texts, and requires it of requests; lists give no signature, since MLflow would then
        refuse arrays. By default empty: no example.
        """
        return {}

    def answer_types(self) -> dict[str, str]:
        """Map the columns of `predict` to MLflow's names of their types. By default empty: they are not known."""
        return {}

    def answer(self, output: Any) -> dict[str, torch.Tensor]:
        """Make the columns of the answer, each `[rows]`, from the model's output.

        By default an output `[rows]` is the column `output`, and one `[rows, n]` is `output_0` …
        """
        if output.dim() == 1:
            return {"output": output}
        return {f"output_{number}": column for number, column in enumerate(output.flatten(1).T)}

    @abstractmethod
    def predict(self, model: torch.nn.Module, inputs: pandas.DataFrame) -> pandas.DataFrame:
        """Answer each row of a data frame by one row, equal to what evaluation computes."""

    @abstractmethod
    def export_files(self) -> dict[str, bytes]:
        """Return the files for other programs beside an exported model: name -> content."""


class Task(EncodingTask, TrainingTask, ServingTask):
    """Base class of all tasks. Built as `TaskClass(**options)` from the keys of the `task` section other than `kind`.

    A task's constructor raises ConfigError for options it does not accept.
    """

    def export_files(self) -> dict[str, bytes]:
        """Return the files for other programs beside an exported model: name -> content. By default `assets`."""
        return self.assets()

    def predict(self, model: torch.nn.Module, inputs: pandas.DataFrame) -> pandas.DataFrame:
        """Answer each row of a data frame by one row, equal to what evaluation computes.

        By default each row is encoded as a record whose fields are the columns, without `targets`; where there is but
        one such field, the columns may also be its numbers. The answer has the columns of `answer`. Raises DataError.
        """
        from kftrain.tasks.inference import answer

        return answer(self, model, inputs)


_MARK = "_reads_parts"

Method = TypeVar("Method", bound=Callable[..., Any])


class LogitsInParts(Protocol):
    """Questions of a task to logits `[..., classes]` that are not whole.

    Each of several processes has some of the classes, or they are computed for some tokens at a time, or both. All
    processes ask the same, in the same order.
    """

    def cross_entropy(self, targets: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy in nats, fp32, of each of `targets` `[...]`."""

    def sum_cross_entropy(self, targets: torch.Tensor, ignored: int) -> torch.Tensor:
        """Return the sum, fp32, of those terms whose target is not `ignored`: at less cost than the terms."""

    def score(self, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cross-entropy of each of `targets` `[...]`, and the classes of the largest logits, `[...]`."""


def reads_parts(method: Method) -> Method:
    """Mark a method of a task that accepts `LogitsInParts`.

    A task whose `loss`, `statistics` and `tallies` all carry the mark is given logits in parts where the model's
    matrices are split over the classes, and may have `train.loss_chunk_tokens`; any other task is given whole logits.
    """
    setattr(method, _MARK, True)
    return method


def task_reads_parts(task: Task) -> bool:
    """Return True if no method of a task needs whole logits; an overridden one does, unless it is marked again."""
    methods = [getattr(type(task), name) for name in ("loss", "statistics", "tallies")]
    return all(getattr(method, _MARK, False) or method is Task.tallies for method in methods)
