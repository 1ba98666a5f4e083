"""The report of a dataset's shards. Reads the manifest as plain JSON and leaves out what it does not hold."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kftrain.reports import content, wording
from kftrain.reports.content import Fact, Gallery, ReportSection, Sample, Table
from kftrain.run.drift import Drift, DriftedDistribution

Manifest = Mapping[str, Any]

PURPOSES = {"train": "training", "validation": "validation"}
"""Split -> what its samples are for, as the report says it."""

LEAKS = ("content in both splits", "key in both splits")
"""Findings that make metrics better than they are."""

MAX_CLASSES = 24
"""Number of classes that are named; rarer ones are counted together."""

DRIFT_LEVELS = {"none": "\u2013", "some": "some", "large": "large"}

_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")


def describe_shards(manifest: Manifest, overview: Manifest | None = None, drift: Drift | None = None) -> ReportSection:
    """Return the section of a dataset: its splits, findings, drift and some samples.

    `overview`: samples, see `tasks/overview.py`. `drift`: changes since the dataset before.
    """
    splits = {str(name): _read_shards(split) for name, split in _as_mapping(manifest.get("splits")).items()}
    everything = [shard for shards in splits.values() for shard in shards]
    tables = [_tabulate_splits(manifest, splits)] if splits else []
    counted = ", ".join(f"{format_amount(manifest, split)} for {purpose}" for split, purpose in PURPOSES.items())
    size = wording.format_size(_add_up(everything, "bytes"))
    return ReportSection(
        title="Data",
        headline=f"{wording.format_plural(len(everything), 'shard')}: {counted}, {size}.",
        sentences=[*_list_leaks(manifest), *(_describe_drift(drift) if drift else [])],
        tables=[
            *tables,
            *_tabulate_components(manifest, splits),
            *(_tabulate_drift(drift) if drift else []),
            *_tabulate_records(manifest),
            *_tabulate_classes(manifest),
            *_tabulate_sizes(manifest),
            *_tabulate_findings(manifest),
            *_tabulate_fields(manifest),
            *_tabulate_baselines(manifest),
        ],
        galleries=_make_galleries(overview),
        facts=_list_facts(manifest),
    )


def count_samples(manifest: Manifest, split: str) -> int:
    """Count the samples of a split; 0 if the manifest does not name it."""
    return _add_up(_read_shards(_as_mapping(manifest.get("splits")).get(split)), "num_samples")


def format_amount(manifest: Manifest, split: str) -> str:
    """Return the size of a split: `329,735 samples`, or `3,785,551 tokens` and `35 documents` for a token stream."""
    is_stream = [(field.get("name"), field.get("shape")) for field in _read_fields(manifest)] == [("tokens", [])]
    unit = {"train": "token"}.get(split, "document") if is_stream else "sample"
    return wording.format_plural(count_samples(manifest, split), unit)


def _tabulate_splits(manifest: Manifest, splits: Mapping[str, Sequence[Manifest]]) -> Table:
    rows = [
        [
            wording.clean(name),
            wording.format_count(len(shards)),
            format_amount(manifest, name).removesuffix(" samples"),
            wording.format_count(_add_up(shards, "num_blocks")),
            wording.format_size(_add_up(shards, "bytes")),
        ]
        for name, shards in splits.items()
    ]
    return Table("Splits", ["split", "shards", "samples", "blocks", "size"], rows)


def _tabulate_components(manifest: Manifest, splits: Mapping[str, Sequence[Manifest]]) -> list[Table]:
    """Tabulate the datasets of a mixture; in a split, the shards of one component follow those of the one before."""
    components = [component for component in _as_sequence(manifest.get("components")) if isinstance(component, Mapping)]
    starts, rows = dict.fromkeys(splits, 0), []
    for component in components:
        counts = {split: int(_as_mapping(component.get("num_shards")).get(split, 0)) for split in splits}
        own = {split: shards[starts[split] : starts[split] + counts[split]] for split, shards in splits.items()}
        starts = {split: starts[split] + counts[split] for split in splits}
        samples = [wording.format_count(_add_up(shards, "num_samples")) for shards in own.values()]
        rows.append([wording.clean(component.get("name", "")), wording.clean(component.get("source", "")), *samples])
    named = [f"{wording.clean(split)} samples" for split in splits]
    return [Table("Components", ["component", "source", *named], rows)] if rows else []


def _list_leaks(manifest: Manifest) -> list[str]:
    findings = _as_mapping(manifest.get("findings"))
    counts = {kind: int(wording.to_finite(_as_mapping(findings.get(kind)).get("count")) or 0) for kind in LEAKS}
    return [
        f"{wording.format_plural(count, 'validation record')} of the training split's own ({kind}): "
        "metrics look too good."
        for kind, count in counts.items()
        if count
    ]


def _tabulate_records(manifest: Manifest) -> list[Table]:
    """Tabulate the source's records as they were before encoding."""
    rows = []
    for name, statistics in _as_mapping(manifest.get("statistics")).items():
        records, num_bytes = (
            wording.to_finite(_as_mapping(statistics).get(key)) for key in ("num_records", "content_bytes")
        )
        samples = count_samples(manifest, str(name))
        if records and num_bytes is not None:
            cells = [wording.format_size(num_bytes / records), wording.format_number(samples / records)]
            per_sample = wording.format_size(num_bytes / samples) if samples else ""
            rows.append(
                [
                    wording.clean(name),
                    wording.format_count(int(records)),
                    wording.format_size(num_bytes),
                    *cells,
                    per_sample,
                ]
            )
    columns = ["split", "records", "content", "of a record", "samples of a record", "content of a sample"]
    return [Table("Records of the source", columns, rows)] if rows else []


def _tabulate_classes(manifest: Manifest) -> list[Table]:
    """Tabulate samples per class, the largest class first, for every field that has classes."""
    statistics = _as_mapping(manifest.get("statistics"))
    by_split = {str(split): _as_mapping(_as_mapping(values).get("classes")) for split, values in statistics.items()}
    fields = dict.fromkeys(str(field) for classes in by_split.values() for field in classes)
    return [
        _tabulate_class_field(field, {split: _read_counts(classes.get(field)) for split, classes in by_split.items()})
        for field in fields
    ]


def _tabulate_class_field(field: str, counts: Mapping[str, Mapping[str, int]]) -> Table:
    totals = {split: sum(of_split.values()) for split, of_split in counts.items()}
    values = dict.fromkeys(value for of_split in counts.values() for value in of_split)
    ordered = sorted(values, key=lambda value: -sum(of_split.get(value, 0) for of_split in counts.values()))
    named, others = ordered[:MAX_CLASSES], ordered[MAX_CLASSES:]
    lines = [(wording.clean(value), [value]) for value in named]
    lines += [(f"{wording.format_count(len(others))} others", others)] if others else []
    rows = [
        [name, *(_format_share(sum(counts[split].get(value, 0) for value in of), totals[split]) for split in counts)]
        for name, of in lines
    ]
    return Table(f"Samples by {wording.clean(field)}", [wording.clean(field), *map(wording.clean, counts)], rows)


def _format_share(count: int, total: int) -> str:
    return f"{wording.format_count(count)} ({100 * count / total:.1f} %)" if total else wording.format_count(count)


def _tabulate_sizes(manifest: Manifest) -> list[Table]:
    """Tabulate records by size, in powers of two."""
    statistics = _as_mapping(manifest.get("statistics"))
    counts = {str(split): _read_counts(_as_mapping(values).get("size_counts")) for split, values in statistics.items()}
    bits = sorted({int(key) for values in counts.values() for key in values if key.isdecimal() and len(key) < 3})
    rows = [
        [
            f"below {wording.format_size(1 << number)}" if number else "empty",
            *(wording.format_count(sizes.get(str(number), 0)) for sizes in counts.values()),
        ]
        for number in bits
    ]
    return [Table("Records by size", ["size", *map(wording.clean, counts)], rows)] if rows else []


def _tabulate_findings(manifest: Manifest) -> list[Table]:
    rows = []
    for kind, finding in _as_mapping(manifest.get("findings")).items():
        count = wording.to_finite(_as_mapping(finding).get("count"))
        first = ", ".join(wording.clean(name) for name in _as_sequence(_as_mapping(finding).get("first")))
        if count:
            rows.append([wording.clean(kind), wording.format_count(int(count)), first])
    return [Table("Findings", ["records", "count", "the first ones"], rows)] if rows else []


def _make_galleries(overview: Manifest | None) -> list[Gallery]:
    """Return stored samples by split."""
    by_split: dict[str, list[Sample]] = {}
    for example in _as_sequence(_as_mapping(overview).get("examples")):
        if isinstance(example, Mapping):
            by_split.setdefault(wording.clean(example.get("split", "")), []).append(_make_sample(example))
    return [Gallery(f"Samples of the {split} split", samples) for split, samples in by_split.items()]


def _make_sample(example: Manifest) -> Sample:
    texts = {str(name): str(text) for name, text in _as_mapping(example.get("shown")).items()}
    facts = content.make_sample_facts(texts, [str(name) for name in _as_sequence(example.get("names"))])
    picture = example.get("picture")
    is_picture = isinstance(picture, str) and _BASE64.fullmatch(picture) is not None
    return Sample(wording.clean(example.get("key", "")), facts, str(picture) if is_picture else "")


def _read_counts(values: Any) -> dict[str, int]:
    counts = {str(key): wording.to_finite(value) for key, value in _as_mapping(values).items()}
    return {key: int(count) for key, count in counts.items() if count is not None}


def _read_fields(manifest: Manifest) -> list[Manifest]:
    schema = _as_mapping(manifest.get("sample_schema", manifest.get("schema")))
    return [field for field in _as_sequence(schema.get("fields")) if isinstance(field, Mapping)]


def _tabulate_fields(manifest: Manifest) -> list[Table]:
    rows = [
        [
            wording.clean(field.get("name", "")),
            wording.clean(field.get("dtype", "")),
            " \u00d7 ".join(wording.clean(length) for length in _as_sequence(field.get("shape"))) or "scalar",
        ]
        for field in _read_fields(manifest)
    ]
    return [Table("Fields of a sample", ["field", "type", "shape"], rows)] if rows else []


def _tabulate_baselines(manifest: Manifest) -> list[Table]:
    """Return a table per metric of the baselines that a model must beat on the validation split."""
    return [
        Table(
            f"{wording.format_label(str(metric))} of baselines",
            ["baseline", "value"],
            [[wording.clean(name), wording.format_number(value)] for name, value in _as_mapping(values).items()],
        )
        for metric, values in _as_mapping(manifest.get("baselines")).items()
        if _as_mapping(values)
    ]


def _list_facts(manifest: Manifest) -> list[Fact]:
    facts = []
    if manifest.get("dataset_digest"):
        facts.append(content.make_digest_fact("Dataset digest", str(manifest["dataset_digest"])))
    if manifest.get("source"):
        facts.append(Fact("Source", str(manifest["source"]), code=True))
    return facts


def _read_shards(split: Any) -> list[Manifest]:
    return [shard for shard in _as_sequence(_as_mapping(split).get("shards")) if isinstance(shard, Mapping)]


def _add_up(shards: Sequence[Manifest], key: str) -> int:
    values = (wording.to_finite(shard.get(key)) for shard in shards)
    return int(sum(value for value in values if value is not None))


def _as_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _as_sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else ()


def _describe_drift(drift: Drift) -> list[str]:
    """Say in one sentence which distributions changed since the dataset before."""
    thresholds = f"from a population stability index of {drift.some:g} (some) or "
    thresholds += f"{drift.large:g} (large) on, where it is more than chance alone would give"
    if not drift.drifted:
        count = len(drift.distributions)
        return [f"No drift against the dataset before: none of {count} distributions changed {thresholds}."]
    named = ", ".join(f"{wording.clean(distribution.name)} ({distribution.level})" for distribution in drift.drifted)
    return [f"Drift against the dataset before: {named}. A change counts {thresholds}."]


def _tabulate_drift(drift: Drift) -> list[Table]:
    """Return tables of sizes, of drift per distribution, and of the largest changes in drifted ones."""
    return [
        _tabulate_drift_sizes(drift),
        *_tabulate_drift_measures(drift),
        *(_tabulate_shifts(distribution) for distribution in drift.drifted),
    ]


def _tabulate_drift_sizes(drift: Drift) -> Table:
    before, now = drift.before, drift.now
    rows = [
        _make_size_row("training records", before.num_records, now.num_records, wording.format_count),
        _make_size_row("training samples", before.num_samples, now.num_samples, wording.format_count),
        _make_size_row("content", before.content_bytes, now.content_bytes, wording.format_size),
    ]
    return Table("Size against the dataset before", ["", "before", "now", "change"], rows)


def _make_size_row(name: str, before: int, now: int, format_value: Callable[[Any], str]) -> list[str]:
    change = f"{wording.format_decimals(100 * (now - before) / before, 1, signed=True)} %" if before else ""
    return [name, format_value(before), format_value(now), change]


def _tabulate_drift_measures(drift: Drift) -> list[Table]:
    rows = [
        [
            wording.clean(distribution.name),
            wording.format_decimals(distribution.psi, 3),
            wording.format_decimals(distribution.chance_psi, 3),
            wording.format_decimals(distribution.js_distance, 3),
            _format_moments(distribution.before),
            _format_moments(distribution.now),
            DRIFT_LEVELS[distribution.level],
        ]
        for distribution in drift.distributions
    ]
    columns = ["distribution", "PSI", "by chance below", "JS distance", "before: mean (deviation)", "now", "drift"]
    return [Table("Drift", columns, rows)] if rows else []


def _format_moments(moments: tuple[float, float] | None) -> str:
    return "" if moments is None else f"{wording.format_number(moments[0])} ({wording.format_number(moments[1])})"


def _tabulate_shifts(distribution: DriftedDistribution) -> Table:
    rows = [
        [
            wording.clean(shift.bin),
            f"{wording.format_decimals(100 * shift.before, 2)} %",
            f"{wording.format_decimals(100 * shift.now, 2)} %",
        ]
        for shift in distribution.shifts
    ]
    return Table(f"Largest changes in {wording.clean(distribution.name)}", ["value", "before", "now"], rows)
