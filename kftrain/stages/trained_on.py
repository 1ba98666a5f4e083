"""Whether the champion was trained on what it is now compared on."""

from __future__ import annotations

from collections.abc import Iterator

from kftrain import registry
from kftrain.config import Config
from kftrain.data.parts import findings
from kftrain.data.schema import SPLITS
from kftrain.data.shards.manifest import Manifest, shard_uri
from kftrain.errors import DataError, KftrainError
from kftrain.run.config import read_config
from kftrain.run.documents import GateReason, RunShards
from kftrain.run.paths import RunPaths
from kftrain.stages.dataset import read_dataset
from kftrain.trust import Trust


def gate_reason(config: Config, shards: RunShards, manifest: Manifest) -> GateReason | None:
    """How many validation records of a dataset the champion, or weights that it began with, were trained on.

    Parts remember their records, so no data is read. It decides nothing: who is better all the same is better. None
    without a champion. Raises KftrainError where storage or MLflow is away.
    """
    champion = registry.champion(config)
    if champion is None:
        return None
    subject = f"the champion, version {champion.version}, was trained on"
    try:
        trained = [uri for each in _lineage(config, champion.export_uri) for uri in _part_uris(*read_dataset(each))]
        count, total = findings.count_trained_on(_part_uris(shards, manifest), trained)
    except KftrainError as error:
        if error.retryable:
            raise
        text = f"how many of the validation records {subject} is not known: {error.what}"
        return GateReason(code="trained_on_unknown", verdict="for", text=text)
    text = f"{subject} {count:,} of {total:,} validation records"
    return GateReason(code="trained_on", verdict="for", text=text, figures={"value": count, "total": total})


def _lineage(config: Config, export_uri: str) -> Iterator[RunPaths]:
    """The run of an export, the one with whose weights it began, and so on. Raises KftrainError for an unknown one."""
    while export_uri:
        paths = RunPaths(export_uri.rpartition("/export/")[0])
        Trust.of(config).require_place(paths.uri)
        yield paths
        export_uri = read_config(paths).train.initial_weights.export_uri


def _part_uris(shards: RunShards, manifest: Manifest) -> list[str]:
    """The folders of a dataset's parts. Raises DataError where it is of none: adopted, or of release 0.1."""
    found = [shard for split in SPLITS for shard in manifest.splits[split].shards]
    if not all(shard.folder.startswith("../parts/") for shard in found):
        raise DataError("its shards remember no records", where=shards.manifest_uri)
    return list(dict.fromkeys(shard_uri(shards.manifest_uri, shard).rpartition("/")[0] for shard in found))
