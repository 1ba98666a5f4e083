"""A stream of rows cut into samples when it is read: so the length of a sample is no property of the shards.

Sample i is the rows from i * stride on, `length` of them; where they end, fill stands. Samples that lie within a block,
nearly all of them, are gathered as one item each, and no row is handled by itself.
"""

from __future__ import annotations

import numpy as np

from kftrain.data.dataset import ShardedDataset
from kftrain.data.schema import Arrays, SampleSchema, Window
from kftrain.data.shards.remote_bytes import Fetch


class TokenWindows:
    """The samples of a split whose rows have no shape. All methods may be called from any thread."""

    def __init__(self, dataset: ShardedDataset, window: Window) -> None:
        assert 1 <= window.stride <= window.length, window
        self._dataset = dataset
        self._window = window

    @property
    def num_samples(self) -> int:
        """So many that every row which begins no sample of its own is behind the first row of one."""
        return count_windows(self._dataset.num_samples, self._window)

    def expect_window(self, num_ranges: int, range_samples: int) -> None:
        """Expect that samples of so many ranges are read in turns, as the split does."""
        self._dataset.expect_window(num_ranges, range_samples * self._window.stride)

    def read(self, samples: np.ndarray) -> Arrays:
        """Read samples by number, int64 `[k]`: field name -> new array `[k, length]`. Raises DataError."""
        starts, length = np.asarray(samples, np.int64) * self._window.stride, self._window.length
        cut = starts + length > self._dataset.num_samples
        if not cut.any():
            return self._dataset.read_runs(starts, length)
        whole = self._dataset.read_runs(starts[~cut], length)
        windows = {name: np.empty((len(starts), length), array.dtype) for name, array in whole.items()}
        for name, array in whole.items():
            windows[name][~cut] = array
            windows[name][cut] = self._window.fill[name]
        for number in np.flatnonzero(cut).tolist():
            rows = self._dataset.read_runs(starts[number : number + 1], self._dataset.num_samples - int(starts[number]))
            for name, array in rows.items():
                windows[name][number, : array.shape[1]] = array[0]
        return windows

    def plan_fetches(self, samples: np.ndarray) -> list[Fetch]:
        """Return the requests for what the node lacks of these samples, int64 `[k]`. Raises DataError."""
        starts = np.asarray(samples, np.int64) * self._window.stride
        stops = np.minimum(starts + self._window.length, self._dataset.num_samples)
        return self._dataset.plan_fetches(np.concatenate([starts, stops - 1]))

    def place_of(self, sample: int) -> str:
        """Tell people where a sample begins: the shard and the key. Slow."""
        return self._dataset.place_of(sample * self._window.stride)

    def sample_bytes(self, samples: np.ndarray) -> np.ndarray:
        """Return the bytes of each sample over all fields, int64 `[k]`."""
        rows = self._dataset.sample_bytes(np.zeros(1, np.int64))
        return np.full(len(samples), int(rows[0]) * self._window.length, np.int64)


def cut_windows(dataset: ShardedDataset, window: Window | None) -> ShardedDataset | TokenWindows:
    """Return a training split as its samples: a stream cut into windows, any other split as it is."""
    return TokenWindows(dataset, window) if window is not None and is_stream(dataset.schema) else dataset


def is_stream(schema: SampleSchema) -> bool:
    """Tell whether rows have no shape, so that many of them are a sample."""
    return all(not field.shape and not field.is_encoded for field in schema.fields)


def count_windows(num_rows: int, window: Window) -> int:
    """Count the samples of a stream of so many rows; none where no row follows the first of one."""
    return max(0, -(-(num_rows - (window.length - window.stride)) // window.stride))
