"""One split for people's own loops: by number, in the training order as torch's `IterableDataset`, or as WebDataset.

Importing it imports no torch; only who asks for the training order gets torch's class.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kftrain.data.dataset import ShardedDataset
from kftrain.data.decoding import at_place
from kftrain.data.expanded import Expanded, expanded
from kftrain.data.schema import Arrays
from kftrain.data.shards.manifest import Manifest
from kftrain.data.windows import windowed
from kftrain.errors import ConfigError, DataError

if TYPE_CHECKING:
    from kftrain.data.torch_dataset import InTrainingOrder
    from kftrain.tasks.base import Batch, Task

Sample = dict[str, Any]
"""Field name -> a number or an array of the field's shape; of an encoded field, as it is stored, bytes."""

READ_SAMPLES = 256
"""Read at once where samples follow each other."""


class _ByNumber(Protocol):
    @property
    def num_samples(self) -> int: ...

    def read(self, samples: np.ndarray) -> Arrays: ...

    def place_of(self, sample: int) -> str: ...


class OpenedDataset(ShardedDataset):
    """The samples of one split: `len(dataset)`, `dataset[i]`, `for sample in dataset`; a `Dataset` for torch's loaders.

    Without a task samples are as they are stored. With one they are as the task uses them: images decoded, a stream of
    tokens cut into sequences; nothing is random about `dataset[i]`. `read`, `read_range` and `num_samples` are always
    those of what is stored.
    """

    def __init__(self, manifest_uri: str, manifest: Manifest, split: str, task: Task | None = None) -> None:
        super().__init__(manifest_uri, manifest, split)
        self.task = task
        self._opened = (manifest_uri, manifest, split, task)
        self._view = _view(self, split, task)

    def __reduce__(self) -> tuple[Any, ...]:
        """A process of a `DataLoader` opens the shards itself."""
        return OpenedDataset, self._opened

    def __len__(self) -> int:
        return self._view.num_samples

    def __getitem__(self, number: int) -> Sample:
        if not -len(self) <= number < len(self):
            raise IndexError(number)
        return self.__getitems__([number % len(self)])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Sample]:
        """Several samples, read at once: what a `DataLoader` asks for where a dataset has it."""
        return list(self.samples(np.asarray(numbers, np.int64), [None] * len(numbers)))

    def __iter__(self) -> Iterator[Sample]:
        for start in range(0, len(self), READ_SAMPLES):
            yield from self.__getitems__(range(start, min(start + READ_SAMPLES, len(self))))

    def samples(
        self,
        numbers: np.ndarray,
        generators: Sequence[np.random.Generator | None] | Iterator[np.random.Generator | None],
    ) -> Iterator[Sample]:
        """Samples by number, int64 `[k]`, each decoded with its generator; None decodes as evaluation does.

        Raises DataError that names shard and key.
        """
        rows = self._view.read(numbers)
        for row, (number, generator) in enumerate(zip(numbers.tolist(), generators, strict=False)):
            stored = {name: array[row] for name, array in rows.items()}
            try:
                decoded = self.task.decode(stored, generator) if self.task and self.task.decodes else stored
            except DataError as error:
                raise at_place(error, self._view.place_of(number)) from error
            yield {name: bytes(value) if isinstance(value, memoryview) else value for name, value in decoded.items()}

    def collate(self, samples: Sequence[Mapping[str, Any]]) -> Batch:
        """A batch of tensors, as the task makes it, for `DataLoader(collate_fn=…)`. Raises ConfigError without one."""
        if self.task is None:
            raise ConfigError("nobody says what a batch is", where="open_dataset", fix="open it with task=")
        return self.task.batch({name: np.stack([sample[name] for sample in samples]) for name in samples[0]})

    def in_training_order(
        self,
        *,
        seed: int = 0,
        batch_size: int = 1,
        epochs: int | None = 1,
        rank: int | None = None,
        world_size: int | None = None,
        shuffle: bool = True,
        range_samples: int = 1024,
        window_ranges: int = 64,
    ) -> InTrainingOrder:
        """Torch's `IterableDataset` of the samples in the order of training, each once an epoch over all ranks.

        See `torch_dataset.InTrainingOrder` for the arguments.
        """
        from kftrain.data.torch_dataset import InTrainingOrder

        return InTrainingOrder(
            self,
            seed=seed,
            batch_size=batch_size,
            epochs=epochs,
            rank=rank,
            world_size=world_size,
            shuffle=shuffle,
            range_samples=range_samples,
            window_ranges=window_ranges,
        )

    def as_webdataset(self) -> Iterator[Sample]:
        """The stored samples as the stock reader gives them, to begin a `webdataset.DataPipeline` with.

            wds.DataPipeline(dataset.as_webdataset, wds.decode("pil"), wds.to_tuple("jpg", "label.npy"))

        Extension -> bytes: a file as it came, an array as a `.npy`. `__key__` numbers the sample in its split.
        """
        for start in range(0, self.num_samples, READ_SAMPLES):
            numbers = np.arange(start, min(start + READ_SAMPLES, self.num_samples), dtype=np.int64)
            rows, extensions = self.read(numbers), self.extensions_of(numbers)
            for row, number in enumerate(numbers.tolist()):
                sample: Sample = {"__key__": f"{self._opened[2]}-{number:09d}"}
                for field in self.schema.fields:
                    value = rows[field.name][row]
                    if field.is_encoded:
                        sample[extensions[field.name][row]] = bytes(value)
                    else:
                        sample[f"{field.name}.npy"] = _npy(value)
                yield sample


class _Rows:
    """Expanded rows, by number."""

    def __init__(self, rows: Expanded) -> None:
        self._rows = rows
        self.num_samples = rows.num_samples

    def read(self, samples: np.ndarray) -> Arrays:
        parts = [self._rows.read_range(number, number + 1)[0] for number in samples.tolist()]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def place_of(self, sample: int) -> str:
        return self._rows.place_of(sample)


def _view(dataset: ShardedDataset, split: str, task: Task | None) -> _ByNumber:
    """What counts as a sample."""
    if task is None:
        return dataset
    if split == "train":
        return windowed(dataset, task.window)
    found = expanded(dataset, task)
    return _Rows(found) if isinstance(found, Expanded) else found


def _npy(value: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.asarray(value), allow_pickle=False)
    return stream.getvalue()
