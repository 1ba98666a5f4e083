"""What a dataset is like, so that another one can be compared with it: `profile.json` beside the manifest.

Sizes and classes were counted while the shards were written. What the samples hold is counted in stretches of the
training split, spread evenly over it, as many whatever its size: tokens by their number, pixels by their value. Of
floating point numbers, which hardly ever come twice, quantiles are kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kftrain.core import storage
from kftrain.data.conversion import Conversion
from kftrain.data.dataset import ShardedDataset
from kftrain.data.images import EXTENSIONS, decode_image
from kftrain.data.schema import CLUSTER, Arrays, Field
from kftrain.data.shards.manifest import Manifest
from kftrain.errors import DataError
from kftrain.run import documents
from kftrain.sharding.drift import (
    MAX_NAMED_BINS,
    Distribution,
    compute_decile_edges,
    count_between,
    count_independent_values,
)

PROFILE_NAME = "profile.json"

NUM_STRETCHES = 64
STRETCH_BYTES = 1 << 16
MIN_STRETCH_ROWS = 4

MAX_PIXELS = 256

NUM_QUANTILES = 1000
MAX_COLUMNS = 32
"""A field of more numbers is no row of columns: its numbers are taken together."""

SIZES = "record sizes (bits)"
"""Distribution of the lengths of records: how many bits the number of their bytes has."""


class Profile(documents.Document):
    """`profile.json`: the training split of a dataset."""

    num_records: int
    content_bytes: int
    """Bytes of the records before they were encoded; 0: not known."""
    num_samples: int
    distributions: dict[str, Distribution]


def read_profile(manifest_uri: str) -> Profile | None:
    """Read the profile that was written for a dataset; None where there is none.

    Raises DataError where it is damaged.
    """
    return documents.read_if_exists(Profile, _build_uri(manifest_uri))


def write_profile(
    manifest_uri: str, manifest: Manifest, targets: Sequence[str], conversion: Conversion | None = None
) -> Profile:
    """Write the profile of a dataset, unless it is there, and return it. Raises DataError for damaged shards.

    `targets`: fields that are learned, and counted as classes if at all. `conversion`: of adopted shards.
    """
    try:
        profile = read_profile(manifest_uri)
    except DataError:
        profile = None
    if profile is None:
        profile = build_profile(manifest_uri, manifest, targets, conversion)
        storage.publish_json(_build_uri(manifest_uri), profile.to_dict())
    return profile


def build_profile(
    manifest_uri: str, manifest: Manifest, targets: Sequence[str], conversion: Conversion | None = None
) -> Profile:
    """Build the profile of a dataset of one source. Raises DataError."""
    assert not manifest.components, "each dataset of a mixture has a profile of its own"
    statistics: Mapping[str, Any] = manifest.statistics.get("train", {})
    distributions = {name: Distribution(counts=counts) for name, counts in statistics.get("classes", {}).items()}
    if statistics.get("size_counts"):
        distributions[SIZES] = Distribution(counts=statistics["size_counts"], is_ordered=True)
    dataset = ShardedDataset(manifest_uri, manifest, "train", conversion=conversion)
    others = [field for field in dataset.schema.fields if field.name != CLUSTER]
    fields = [field for field in others if _is_float(field) or field.name not in targets]
    stretches = list(_read_stretches(dataset, fields))
    for field in fields:
        rows = [arrays[field.name] for arrays in stretches]
        if _is_float(field):
            distributions |= _compute_quantiles(field, rows)
            continue
        groups = [_read_values(field, stretch) for stretch in rows]
        if any(len(values) for values in groups):
            distributions |= _count_values(field, groups)
    return Profile(
        num_records=statistics.get("num_records", 0),
        content_bytes=statistics.get("content_bytes", 0),
        num_samples=manifest.splits["train"].num_samples,
        distributions=distributions,
    )


def _build_uri(manifest_uri: str) -> str:
    return storage.join(manifest_uri.rsplit("/", 1)[0], PROFILE_NAME)


def _read_stretches(dataset: ShardedDataset, fields: Sequence[Field]) -> Iterator[Arrays]:
    """Yield rows that follow each other, from places that are spread evenly."""
    row_bytes = sum(
        np.dtype(field.dtype).itemsize * int(np.prod(field.shape)) for field in fields if not field.is_encoded
    )
    length = max(MIN_STRETCH_ROWS, STRETCH_BYTES // max(1, row_bytes) if row_bytes else 0)
    if dataset.num_samples <= NUM_STRETCHES * length:
        length = -(-dataset.num_samples // NUM_STRETCHES)
        starts = list(range(0, dataset.num_samples, length))
    else:
        last = dataset.num_samples - length
        starts = [number * last // (NUM_STRETCHES - 1) for number in range(NUM_STRETCHES)]
    for start in starts:
        yield dataset.read(np.arange(start, min(dataset.num_samples, start + length)))


def _is_float(field: Field) -> bool:
    return not field.is_encoded and np.dtype(field.dtype).kind == "f"


def _compute_quantiles(field: Field, stretches: Sequence[np.ndarray]) -> dict[str, Distribution]:
    """Compute quantiles of a number, of a few columns each, or of a whole field, and count what is not finite."""
    if field.shape and len(field.shape) == 1 and field.shape[0] <= MAX_COLUMNS:
        columns = {f"{field.name}[{number}]": [rows[:, number] for rows in stretches] for number in range(*field.shape)}
    else:
        columns = {field.name: [rows.reshape(-1) for rows in stretches]}
    distributions = {}
    for name, groups in columns.items():
        finite = [values[np.isfinite(values)].astype(np.float64) for values in groups]
        values = np.sort(np.concatenate([np.empty(0), *finite]))
        num_missing = [len(rows) - len(values) for rows, values in zip(groups, finite, strict=True)]
        if num_values := len(values) + sum(num_missing):
            edges = compute_decile_edges(values)
            by_group = np.array(
                [[*count_between(values, edges), num] for values, num in zip(finite, num_missing, strict=True)]
            )
            shares = np.linspace(0, 1, min(len(values), NUM_QUANTILES))
            distributions[f"values of {name}"] = Distribution(
                counts={},
                quantiles=np.quantile(values, shares, method="inverted_cdf").tolist() if len(values) else [],
                num_independent=count_independent_values(by_group),
                missing=sum(num_missing) / num_values,
            )
    return distributions


def _is_picture(field: Field) -> bool:
    if field.is_encoded:
        return any(extension in EXTENSIONS for extension in field.extensions)
    return field.dtype == "uint8" and len(field.shape) in (2, 3)


def _read_values(field: Field, rows: np.ndarray) -> np.ndarray:
    """Return the whole numbers of the rows: pixels, tokens or others; none where the field holds no numbers."""
    nothing = np.empty(0, np.int64)
    if _is_picture(field):
        if not field.is_encoded:
            return rows.reshape(-1)
        return np.concatenate([nothing, *(_decode_pixels(bytes(content), field.name) for content in rows)])
    return nothing if field.is_encoded or np.dtype(field.dtype).kind not in "iub" else rows.reshape(-1)


def _decode_pixels(content: bytes, where: str) -> np.ndarray:
    """Decode an image; no pixels if that fails: whether it may be left out is said where it is trained on."""
    try:
        return decode_image(content, where).reshape(-1)
    except DataError:
        return np.empty(0, np.uint8)


def _count_values(field: Field, groups: Sequence[np.ndarray]) -> dict[str, Distribution]:
    """Count a field's values; those of one stretch are alike."""
    is_picture = _is_picture(field)
    values, places = np.unique(np.concatenate(groups), return_inverse=True)
    counts = np.bincount(places)
    frequent = np.argsort(-counts, kind="stable")[: MAX_PIXELS if is_picture else MAX_NAMED_BINS]
    ends = np.cumsum([len(group) for group in groups])[:-1]
    by_group = np.array([np.bincount(group, minlength=len(counts))[frequent] for group in np.split(places, ends)])
    rest = np.array([len(group) for group in groups]) - by_group.sum(axis=1)
    independent = count_independent_values(np.column_stack([by_group, rest]))
    named = {str(int(value)): int(count) for value, count in zip(values, counts, strict=True)}
    what = "pixels" if is_picture else "values"
    name = field.name if field.name == "tokens" else f"{what} of {field.name}"
    return {name: Distribution(counts=named, is_ordered=is_picture, num_independent=independent)}


def compute_mean_and_deviation(distribution: Distribution) -> tuple[float, float] | None:
    """Return mean and standard deviation of ordered values, or of quantiles; None for others, and without any."""
    if distribution.quantiles:
        return float(np.mean(distribution.quantiles)), float(np.std(distribution.quantiles))
    if not distribution.is_ordered:
        return None
    histogram = Counter({int(value): count for value, count in distribution.counts.items()})
    values, weights = np.array(list(histogram)), np.array(list(histogram.values()))
    mean = float(np.average(values, weights=weights))
    return mean, float(np.sqrt(np.average(np.square(values - mean), weights=weights)))
