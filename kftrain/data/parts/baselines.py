"""What a metric must be read against: measured on the validation split as it is stored."""

from __future__ import annotations

import itertools
import math

from kftrain.data.adopted.conversion import conversion_of
from kftrain.data.parts.blocks import stored_blocks
from kftrain.data.parts.encoder import Encoding
from kftrain.data.shards.manifest import Manifest
from kftrain.errors import DataError


def measured_baselines(encoding: Encoding, manifest_uri: str, manifest: Manifest) -> dict[str, dict[str, float]]:
    """The task's baselines on the validation split. Raises DataError where one is not finite, and UserCodeError.

    Of adopted shards one sample is read in any case: whether the task can read them is seen here.
    """
    with encoding.task_code():
        samples = stored_blocks(manifest_uri, manifest, "validation", conversion_of(manifest, encoding.task))
        first = [next(samples)] if manifest.is_adopted else []
        found = encoding.task.baselines(itertools.chain(first, samples))
    baselines = {metric: {name: float(value) for name, value in of.items()} for metric, of in found.items()}
    if not all(math.isfinite(value) for of in baselines.values() for value in of.values()):
        raise DataError("a baseline is not finite", where="task.baselines()", value=baselines)
    return baselines
