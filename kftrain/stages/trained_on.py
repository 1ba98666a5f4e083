"""Counts how much of the validation data the champion was trained on."""

from __future__ import annotations

import numpy as np

from kftrain import registry
from kftrain.config import Config
from kftrain.data.schema import SPLITS
from kftrain.data.shards.manifest import Manifest, shard_uri
from kftrain.errors import DataError, KftrainError
from kftrain.run.config import read_config
from kftrain.run.documents import GateReason, RunShards
from kftrain.run.paths import RunPaths
from kftrain.sharding.parts.content import UNKNOWN
from kftrain.sharding.parts.records import read_table
from kftrain.stages.dataset import read_dataset
from kftrain.trust import Trust


def gate_reason(config: Config, shards: RunShards, manifest: Manifest) -> GateReason | None:
    """Count the validation records of a dataset that the champion, or weights that it began with, were trained on.

    Reads the 24 bytes that parts remember of each record. The count decides nothing: a challenger that is better
    although the champion has seen the data is better. None without a champion. Raises KftrainError if storage or MLflow
    is away.
    """
    champion = registry.champion(config)
    if champion is None:
        return None
    subject, export_uri, trained = f"the champion, version {champion.version}, was trained on", champion.export_uri, []
    try:
        while export_uri:
            paths = RunPaths(export_uri.rpartition("/export/")[0])
            Trust.of(config).require_place(paths.uri)
            trained.append(_read_hashes(*read_dataset(paths), "train"))
            export_uri = read_config(paths).train.initial_weights.export_uri
        held_out = _read_hashes(shards, manifest, "validation")
    except KftrainError as error:
        if error.retryable:
            raise
        text = f"how many of the validation records {subject} is not known: {error.what}"
        return GateReason(code="trained_on_unknown", verdict="for", text=text)
    count, total = int(np.isin(held_out, np.concatenate(trained)).sum()), len(held_out)
    text = f"{subject} {count:,} of {total:,} validation records"
    return GateReason(code="trained_on", verdict="for", text=text, figures={"value": count, "total": total})


def _read_hashes(shards: RunShards, manifest: Manifest, split: str) -> np.ndarray:
    """Read the hashes of a split's records, `[records]`. Raises DataError if its shards remember none."""
    listed = [shard for content in manifest.splits.values() for shard in content.shards]
    if not all(shard.folder.startswith("../parts/") for shard in listed):
        raise DataError("adopted shards, and those of release 0.1, remember no records", where=shards.manifest_uri)
    folders = {shard_uri(shards.manifest_uri, shard).rpartition("/")[0] for shard in listed}
    tables = np.concatenate([read_table(folder) for folder in folders])
    hashes: np.ndarray = tables[(tables[:, 2] == SPLITS.index(split)) & (tables[:, 1] != UNKNOWN), 1]
    return hashes
