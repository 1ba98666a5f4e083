"""One split for people's own loops: by number, in the training order as torch's `IterableDataset`, or as WebDataset.

Importing it imports no torch; only who asks for the training order gets torch's class.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from kftrain.data.dataset import ShardedDataset
from kftrain.data.decoding import Samples, at_place
from kftrain.data.expanded import expand_rows
from kftrain.data.shards.cache import NodeCache
from kftrain.data.shards.manifest import Manifest
from kftrain.data.shards.verified import AtOnce, Memory
from kftrain.data.windows import cut_windows
from kftrain.errors import ConfigError, DataError

if TYPE_CHECKING:
    from kftrain.data.torch_dataset import InTrainingOrder
    from kftrain.tasks.base import Batch, Task

Sample = dict[str, Any]
"""Field name -> a number or an array of the field's shape; of an encoded field, as it is stored, bytes."""

READ_SAMPLES = 256
"""Read at once where samples follow each other."""


class OpenedDataset(ShardedDataset):
    """The samples of one split: `len(dataset)`, `dataset[i]`, `for sample in dataset`; a `Dataset` for torch's loaders.

    Without a task samples are as they are stored. With one they are as the task uses them: images decoded, a stream of
    tokens cut into sequences; nothing is random about `dataset[i]`. `read`, `read_range` and `num_samples` are always
    those of what is stored.
    """

    def __init__(
        self, manifest_uri: str, manifest: Manifest, split: str, task: Task | None = None, is_hashed: bool = True
    ) -> None:
        """`is_hashed`: whether each shard is, before it is read."""
        memory = Memory.of_node("", manifest.dataset_digest)
        super().__init__(manifest_uri, manifest, split, AtOnce(memory, is_hashed, NodeCache.of_node("", "auto")))
        self.task = task
        self._opened = (manifest_uri, manifest, split, task, is_hashed)
        self._process = (0, 1)

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave out open shards: a process of a `DataLoader` opens its own, and belongs to the rank that started it."""
        return OpenedDataset, self._opened, {"_process": own_process(None, None)}

    @cached_property
    def _view(self) -> Samples:
        """Samples as they are counted and read."""
        if self.task is None:
            return self
        if self._opened[2] == "train":
            return cut_windows(self, self.task.window)
        return expand_rows(self, self.task)

    def __len__(self) -> int:
        return self._view.num_samples

    def __getitem__(self, number: int) -> Sample:
        if not -len(self) <= number < len(self):
            raise IndexError(number)
        return self.__getitems__([number % len(self)])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Sample]:
        """Return several samples, read at once: what a `DataLoader` asks for where a dataset has it."""
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
        """Return a batch of tensors, as the task makes it, for `DataLoader(collate_fn=…)`.

        Raises ConfigError without one.
        """
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
        lanes: int = 64,
    ) -> InTrainingOrder:
        """Return torch's `IterableDataset` of the samples in the order of training, each once an epoch.

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
            lanes=lanes,
        )

    def as_webdataset(self, *, rank: int | None = None, world_size: int | None = None) -> Iterator[Sample]:
        """Yield the stored samples as the stock reader gives them, to begin a `webdataset.DataPipeline` with.

            wds.DataPipeline(dataset.as_webdataset, wds.decode("pil"), wds.to_tuple("jpg", "label.npy"))

        Extension -> bytes: a file as it came, an array as a `.npy`. `__key__` numbers the sample in its split. Each
        comes once over the ranks (as in `in_training_order`) and the workers of their loaders: each reads a part of its
        own, and the parts differ by one sample at most. Raises ConfigError for a rank that is not below `world_size`.
        """
        loader = sys.modules.get("torch.utils.data")
        info = loader.get_worker_info() if loader else None
        rank, world_size = own_process(rank, world_size, self._process if info else (0, 1))
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        part, num_parts = rank * num_workers + worker, world_size * num_workers
        first, end = (number * self.num_samples // num_parts for number in (part, part + 1))
        for start in range(first, end, READ_SAMPLES):
            numbers = np.arange(start, min(start + READ_SAMPLES, end), dtype=np.int64)
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


def own_process(rank: int | None, world_size: int | None, unknown: tuple[int, int] = (0, 1)) -> tuple[int, int]:
    """Return rank and number of the processes that share samples: those of `torch.distributed` where it runs.

    Where that is not initialised they are `unknown`. Raises ConfigError for a rank that is not below their number.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        unknown = distributed.get_rank(), distributed.get_world_size()
    rank, world_size = unknown[0] if rank is None else rank, unknown[1] if world_size is None else world_size
    if not 0 <= rank < world_size:
        raise ConfigError(f"must be below {world_size}", where="rank", value=rank)
    return rank, world_size


def _npy(value: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.asarray(value), allow_pickle=False)
    return stream.getvalue()
