"""The report of a dataset's shards. Reads the manifest as plain JSON and leaves out what it does not hold."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kftrain.report import content, wording
from kftrain.report import drift as drifts
from kftrain.report.content import Fact, Gallery, ReportSection, Sample, Table
from kftrain.run.drift import Drift

Manifest = Mapping[str, Any]


PURPOSES = {"train": "training", "validation": "validation"}
"""Of the splits."""

LEAKS = ("content in both splits", "key in both splits")
"""Findings that make metrics better than they are."""

MAX_CLASSES = 24
"""Classes that are named; the rarer ones are counted together."""

_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")


def section(manifest: Manifest, overview: Manifest | None = None, drift: Drift | None = None) -> ReportSection:
    """The section of a dataset: what is in each split, what was found in it, and what samples look like.

    `overview`: some of its samples, see `tasks/overview.py`. `drift`: what has changed since the dataset before.
    """
    splits = {str(name): _shards(split) for name, split in _mapping(manifest.get("splits")).items()}
    everything = [shard for shards in splits.values() for shard in shards]
    tables = [_splits_table(manifest, splits)] if splits else []
    counted = ", ".join(f"{amount(manifest, split)} for {purpose}" for split, purpose in PURPOSES.items())
    return ReportSection(
        title="Data",
        headline=f"{wording.plural(len(everything), 'shard')}: {counted}, {wording.size(_total(everything, 'bytes'))}.",
        sentences=[*_leaks(manifest), *(drifts.sentences(drift) if drift else [])],
        tables=[
            *tables,
            *_components_table(manifest, splits),
            *(drifts.tables(drift) if drift else []),
            *_records_table(manifest),
            *_classes_tables(manifest),
            *_sizes_table(manifest),
            *_findings_table(manifest),
            *_fields_table(manifest),
            *_baselines_tables(manifest),
        ],
        galleries=_galleries(overview),
        facts=_facts(manifest),
    )


def num_samples(manifest: Manifest, split: str) -> int:
    """Samples of a split; 0 where the manifest does not know it."""
    return _total(_shards(_mapping(manifest.get("splits")).get(split)), "num_samples")


def amount(manifest: Manifest, split: str) -> str:
    """`329,735 samples`; of a stream `3,785,551 tokens` for training and `35 documents` for validation."""
    is_stream = [(field.get("name"), field.get("shape")) for field in _fields(manifest)] == [("tokens", [])]
    unit = {"train": "token"}.get(split, "document") if is_stream else "sample"
    return wording.plural(num_samples(manifest, split), unit)


def _splits_table(manifest: Manifest, splits: Mapping[str, Sequence[Manifest]]) -> Table:
    rows = [
        [
            wording.clean(name),
            wording.count(len(shards)),
            amount(manifest, name).removesuffix(" samples"),
            wording.count(_total(shards, "num_blocks")),
            wording.size(_total(shards, "bytes")),
        ]
        for name, shards in splits.items()
    ]
    return Table("Splits", ["split", "shards", "samples", "blocks", "size"], rows)


def _components_table(manifest: Manifest, splits: Mapping[str, Sequence[Manifest]]) -> list[Table]:
    """The datasets of a mixture: in each split the shards of one follow those of the one before."""
    components = [each for each in _sequence(manifest.get("components")) if isinstance(each, Mapping)]
    starts, rows = dict.fromkeys(splits, 0), []
    for component in components:
        counts = {split: int(_mapping(component.get("num_shards")).get(split, 0)) for split in splits}
        own = {split: shards[starts[split] : starts[split] + counts[split]] for split, shards in splits.items()}
        starts = {split: starts[split] + counts[split] for split in splits}
        samples = [wording.count(_total(shards, "num_samples")) for shards in own.values()]
        rows.append([wording.clean(component.get("name", "")), wording.clean(component.get("source", "")), *samples])
    named = [f"{wording.clean(split)} samples" for split in splits]
    return [Table("Components", ["component", "source", *named], rows)] if rows else []


def _leaks(manifest: Manifest) -> list[str]:
    found = _mapping(manifest.get("findings"))
    counts = {kind: int(wording.finite(_mapping(found.get(kind)).get("count")) or 0) for kind in LEAKS}
    return [
        f"{wording.plural(count, 'validation record')} of the training split's own ({kind}): metrics look too good."
        for kind, count in counts.items()
        if count
    ]


def _records_table(manifest: Manifest) -> list[Table]:
    """What the source held, before it was encoded."""
    rows = []
    for name, found in _mapping(manifest.get("statistics")).items():
        records, num_bytes = (wording.finite(_mapping(found).get(key)) for key in ("num_records", "content_bytes"))
        samples = num_samples(manifest, str(name))
        if records and num_bytes is not None:
            each = [wording.size(num_bytes / records), wording.number(samples / records)]
            per_sample = wording.size(num_bytes / samples) if samples else ""
            rows.append([wording.clean(name), wording.count(int(records)), wording.size(num_bytes), *each, per_sample])
    columns = ["split", "records", "content", "of a record", "samples of a record", "content of a sample"]
    return [Table("Records of the source", columns, rows)] if rows else []


def _classes_tables(manifest: Manifest) -> list[Table]:
    """How many samples each class has, the largest first."""
    statistics = _mapping(manifest.get("statistics"))
    by_split = {str(split): _mapping(_mapping(found).get("classes")) for split, found in statistics.items()}
    fields = dict.fromkeys(str(field) for classes in by_split.values() for field in classes)
    return [
        _classes_table(field, {split: _counts(classes.get(field)) for split, classes in by_split.items()})
        for field in fields
    ]


def _classes_table(field: str, counts: Mapping[str, Mapping[str, int]]) -> Table:
    totals = {split: sum(found.values()) for split, found in counts.items()}
    values = dict.fromkeys(value for found in counts.values() for value in found)
    ordered = sorted(values, key=lambda value: -sum(found.get(value, 0) for found in counts.values()))
    named, others = ordered[:MAX_CLASSES], ordered[MAX_CLASSES:]
    lines = [(wording.clean(value), [value]) for value in named]
    lines += [(f"{wording.count(len(others))} others", others)] if others else []
    rows = [
        [name, *(_share(sum(counts[split].get(value, 0) for value in of), totals[split]) for split in counts)]
        for name, of in lines
    ]
    return Table(f"Samples by {wording.clean(field)}", [wording.clean(field), *map(wording.clean, counts)], rows)


def _share(count: int, total: int) -> str:
    return f"{wording.count(count)} ({100 * count / total:.1f} %)" if total else wording.count(count)


def _sizes_table(manifest: Manifest) -> list[Table]:
    """Records by their size, in powers of two."""
    statistics = _mapping(manifest.get("statistics"))
    counts = {str(split): _counts(_mapping(found).get("size_counts")) for split, found in statistics.items()}
    bits = sorted({int(key) for found in counts.values() for key in found if key.isdecimal() and len(key) < 3})
    rows = [
        [
            f"below {wording.size(1 << number)}" if number else "empty",
            *(wording.count(sizes.get(str(number), 0)) for sizes in counts.values()),
        ]
        for number in bits
    ]
    return [Table("Records by size", ["size", *map(wording.clean, counts)], rows)] if rows else []


def _findings_table(manifest: Manifest) -> list[Table]:
    rows = []
    for kind, found in _mapping(manifest.get("findings")).items():
        count = wording.finite(_mapping(found).get("count"))
        first = ", ".join(wording.clean(name) for name in _sequence(_mapping(found).get("first")))
        if count:
            rows.append([wording.clean(kind), wording.count(int(count)), first])
    return [Table("Findings", ["records", "count", "the first ones"], rows)] if rows else []


def _galleries(overview: Manifest | None) -> list[Gallery]:
    """Samples as they are stored, by split."""
    by_split: dict[str, list[Sample]] = {}
    for example in _sequence(_mapping(overview).get("examples")):
        if isinstance(example, Mapping):
            by_split.setdefault(wording.clean(example.get("split", "")), []).append(_sample(example))
    return [Gallery(f"Samples of the {split} split", samples) for split, samples in by_split.items()]


def _sample(example: Manifest) -> Sample:
    texts = {str(name): str(text) for name, text in _mapping(example.get("shown")).items()}
    shown = content.sample_facts(texts, [str(name) for name in _sequence(example.get("names"))])
    picture = example.get("picture")
    is_picture = isinstance(picture, str) and _BASE64.fullmatch(picture) is not None
    return Sample(wording.clean(example.get("key", "")), shown, str(picture) if is_picture else "")


def _counts(found: Any) -> dict[str, int]:
    counts = {str(key): wording.finite(value) for key, value in _mapping(found).items()}
    return {key: int(count) for key, count in counts.items() if count is not None}


def _fields(manifest: Manifest) -> list[Manifest]:
    schema = _mapping(manifest.get("sample_schema", manifest.get("schema")))
    return [field for field in _sequence(schema.get("fields")) if isinstance(field, Mapping)]


def _fields_table(manifest: Manifest) -> list[Table]:
    rows = [
        [
            wording.clean(field.get("name", "")),
            wording.clean(field.get("dtype", "")),
            " \u00d7 ".join(wording.clean(length) for length in _sequence(field.get("shape"))) or "scalar",
        ]
        for field in _fields(manifest)
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
