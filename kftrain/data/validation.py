"""The validation split as evaluations read it: without the samples that its task cannot decode.

Each is decoded once before a training begins, so that a bad one ends no run after it. What was found stands beside the
manifest, by the options of the task: the dataset itself does not follow from how it is decoded.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from kftrain.config import Config
from kftrain.core import storage
from kftrain.core.progress import Progress
from kftrain.data.conversion import Conversion, find_conversion
from kftrain.data.dataset import ShardedDataset
from kftrain.data.decoding import Decoder, Decoding, Layout, wrap_decode
from kftrain.data.shards.manifest import Manifest
from kftrain.data.shards.verified import Uses
from kftrain.errors import DataError, UserCodeError
from kftrain.process.machine import num_cpus

if TYPE_CHECKING:
    from kftrain.tasks.base import Task

READ_SAMPLES = 64
"""Read at once by each thread."""


def open_validation(
    manifest_uri: str, manifest: Manifest, config: Config, uses: Uses | None, conversion: Conversion | None
) -> ShardedDataset:
    """Return the samples of the validation split but those that were found to be bad. Raises DataError."""
    left_out = [int(number) for number in storage.read_json_if_exists(_build_uri(manifest_uri, config)) or ()]
    return ShardedDataset(manifest_uri, manifest, "validation", uses, conversion, left_out)


def require_decodable(config: Config, task: Task, manifest_uri: str, manifest: Manifest, progress: Progress) -> None:
    """Decode the validation split, unless that was done, and say which samples are left out of it.

    Raises DataError, or UserCodeError, where more of them are bad than `data.max_bad_samples`.
    """
    uri, limit = _build_uri(manifest_uri, config), config.data.max_bad_samples
    bad = storage.read_json_if_exists(uri) if task.decodes else {}
    if bad is None:
        progress("decoding the validation split, once")
        dataset = ShardedDataset(manifest_uri, manifest, "validation", None, find_conversion(manifest, task))
        decoding = Decoding(wrap_decode(task, is_random=False), 0, limit)
        try:
            layout = Decoder(dataset, decoding).find_layout(lambda positions: positions)
        except UserCodeError as error:  # the image of the steps may lack what a user's code needs
            return progress(f"warning: it cannot be decoded here: {error.line}")
        bad = _find_undecodable(dataset, decoding, layout)
        storage.publish_json(uri, bad)
    if len(lines := list(bad.values())) > limit:
        what = f"{len(lines)} validation samples cannot be decoded, more than may be left out; the first: {lines[0]}"
        raise DataError(what, where="data.max_bad_samples", value=limit, fix="mend the data, or allow more")
    for line in lines:
        progress(f"warning: left out of validation, {len(lines)} of at most {limit}: {line}")


def _find_undecodable(dataset: ShardedDataset, decoding: Decoding, layout: Layout) -> dict[str, str]:
    """Find the samples that cannot be decoded: number -> what is wrong."""

    def look(start: int) -> dict[str, str]:
        numbers = np.arange(start, min(start + READ_SAMPLES, dataset.num_samples))
        filled = Decoder(dataset, decoding).fill(layout.make_arrays(len(numbers)), numbers, numbers)
        return {str(sample.number): sample.error.line for sample in filled.bad.values()}

    with ThreadPoolExecutor(num_cpus()) as threads:
        parts = threads.map(look, range(0, dataset.num_samples, READ_SAMPLES))
        return {number: line for part in parts for number, line in part.items()}


def _build_uri(manifest_uri: str, config: Config) -> str:
    """Return the URI of the list of bad samples: number in stored order -> what is wrong, with shard and key."""
    options = storage.digest_json(config.task.model_dump(mode="json"))
    return storage.join(manifest_uri.rsplit("/", 1)[0], f"decoded-{options[:16]}.json")
