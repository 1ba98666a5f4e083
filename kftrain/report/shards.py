"""The report of a dataset's shards. Reads the manifest as plain JSON and leaves out what it does not hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kftrain.report import content, wording
from kftrain.report.content import Fact, ReportSection, Table

Manifest = Mapping[str, Any]


def section(manifest: Manifest) -> ReportSection:
    """The section of a dataset: what is in each split and what a sample looks like."""
    splits = {str(name): _shards(split) for name, split in _mapping(manifest.get("splits")).items()}
    everything = [shard for shards in splits.values() for shard in shards]
    tables = [_splits_table(splits)] if splits else []
    shards, samples = len(everything), wording.plural(_total(everything, "num_samples"), "sample")
    return ReportSection(
        title="Data",
        headline=f"{wording.plural(shards, 'shard')} with {samples}, {wording.size(_total(everything, 'bytes'))}.",
        tables=[*tables, *_fields_table(manifest), *_baselines_tables(manifest)],
        facts=_facts(manifest),
    )


def num_samples(manifest: Manifest, split: str) -> int:
    """Samples of a split; 0 where the manifest does not know it."""
    return _total(_shards(_mapping(manifest.get("splits")).get(split)), "num_samples")


def _splits_table(splits: Mapping[str, Sequence[Manifest]]) -> Table:
    rows = [
        [
            wording.clean(name),
            wording.count(len(shards)),
            wording.count(_total(shards, "num_samples")),
            wording.count(_total(shards, "num_blocks")),
            wording.size(_total(shards, "bytes")),
        ]
        for name, shards in splits.items()
    ]
    return Table("Splits", ["split", "shards", "samples", "blocks", "size"], rows)


def _fields_table(manifest: Manifest) -> list[Table]:
    schema = _mapping(manifest.get("sample_schema", manifest.get("schema")))
    fields = [field for field in _sequence(schema.get("fields")) if isinstance(field, Mapping)]
    rows = [
        [
            wording.clean(field.get("name", "")),
            wording.clean(field.get("dtype", "")),
            " \u00d7 ".join(wording.clean(length) for length in _sequence(field.get("shape"))) or "scalar",
        ]
        for field in fields
    ]
    return [Table("Fields of a sample", ["field", "type", "shape"], rows)] if rows else []


def _baselines_tables(manifest: Manifest) -> list[Table]:
    """One table per metric: what a model must beat on the validation split."""
    return [
        Table(
            f"{wording.label(str(metric))} of baselines",
            ["baseline", "value"],
            [[wording.clean(name), wording.number(value)] for name, value in _mapping(values).items()],
        )
        for metric, values in _mapping(manifest.get("baselines")).items()
        if _mapping(values)
    ]


def _facts(manifest: Manifest) -> list[Fact]:
    facts = []
    if manifest.get("dataset_digest"):
        facts.append(content.digest("Dataset digest", str(manifest["dataset_digest"])))
    if manifest.get("source"):
        facts.append(Fact("Source", str(manifest["source"]), code=True))
    return facts


def _shards(split: Any) -> list[Manifest]:
    return [shard for shard in _sequence(_mapping(split).get("shards")) if isinstance(shard, Mapping)]


def _total(shards: Sequence[Manifest], key: str) -> int:
    values = (wording.finite(shard.get(key)) for shard in shards)
    return int(sum(value for value in values if value is not None))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else ()
