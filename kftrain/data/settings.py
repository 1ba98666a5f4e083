"""The section `data`."""

from __future__ import annotations

from datetime import tzinfo
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from kftrain.core.plain import MAX_INTEGER
from kftrain.data.shares import compute_slots
from kftrain.data.time_window import UTC, TimeWindow, instant, utc_text, zone_of
from kftrain.errors import ConfigError
from kftrain.settings.section import (
    Amount,
    ChangesDataset,
    ChangesTraining,
    Count,
    Effect,
    KeepsTraining,
    Section,
    Value,
)

MAX_WINDOW_SAMPLES = 1 << 22
"""Most samples to shuffle at a time: the table takes 8 bytes for each, and is sorted within a second or two."""

ORDER: Literal[3] = 3
"""Number of the order of samples in which a new training sees them."""

DEFAULT_SOURCE = "stdlib"

CONTENT_KEY = "*"
"""Value of `data.key`: a record's content identifies it."""

Weight = Annotated[float, Field(ge=0.0)]

ChangesMixture = Annotated[Value, Effect(changes_training=True, counted_as="data.mixture_weights")]
"""Type of a key that the names and weights of a mixture's components stand for in the training identity."""


class WindowConfig(Section):
    """Part of a source to read: what lies between two instants. A schedule fills in `start` and `end`."""

    by: ChangesDataset[Literal["none", "path", "modified", "column"]] = "none"
    """Origin of the time of a record: `path`, dates in paths (`date=2026-11-21/`, `hour=05/`, or
    `year=2026/month=11/day=21/`); `modified`, the change of its file; `column`, a field of it; `none` reads
    everything."""
    start: ChangesDataset[str] = ""
    """First instant of the window, as in RFC 3339: `2026-11-14T00:00:00Z`."""
    end: ChangesDataset[str] = ""
    """First instant after the window. A day or an hour belongs to the window in which it ends."""
    column: ChangesDataset[str] = ""
    """Field of a record that holds its time; for paths the name of the date, if it is not `date`."""
    number_unit: ChangesDataset[Literal["", "seconds", "milliseconds", "microseconds", "nanoseconds"]] = ""
    """Unit of times that are numbers, counted from 1970; empty refuses numbers."""
    time_zone: ChangesDataset[str] = ""
    """Zone of dates and times that name none, such as `Europe/Berlin`. Empty: UTC in paths; refused in a column."""
    watermark: ChangesDataset[Annotated[str, Field(pattern=r"^$|/\d{1,12}\.json$")]] = ""
    """File that lists what was trained on before this window. A schedule whose windows follow each other fills it
    in."""
    late_from: ChangesDataset[str] = ""
    """Instant from which files before `start` are also read if `watermark` does not list them. Filled in with it."""

    @field_validator("start", "end", "late_from")
    @classmethod
    def _in_utc(cls, value: str) -> str:
        return utc_text(instant(value)) if value else ""

    @field_validator("time_zone")
    @classmethod
    def _is_known(cls, value: str) -> str:
        if value:
            zone_of(value)
        return value

    @model_validator(mode="after")
    def _check(self) -> WindowConfig:
        if self.by == "none" and (self.start or self.end):
            raise ValueError("a window needs by: path, modified or column")
        if self.by == "column" and not self.column:
            raise ValueError("by: column needs the name of a column")
        if bool(self.start) != bool(self.end):
            raise ValueError("a window has a start and an end")
        if self.start:
            TimeWindow.parse(self.start, self.end)
        return self

    @property
    def is_set(self) -> bool:
        """True if there is a window at all."""
        return self.by != "none"

    def window(self) -> TimeWindow:
        """Return the window's instants. Raises ConfigError if nobody has filled them in."""
        if not self.start:
            fix = "a schedule sets both; without one, set data.window.start and data.window.end"
            raise ConfigError("the window has no start and no end", where="data.window", value=self.by, fix=fix)
        return TimeWindow.parse(self.start, self.end)

    def placed(self, window: TimeWindow) -> WindowConfig:
        """Return a copy for another window, without a watermark."""
        ends = {"start": utc_text(window.start), "end": utc_text(window.end)}
        return self.model_copy(update={**ends, "watermark": "", "late_from": ""})

    def zone(self) -> tzinfo | None:
        """Return the zone of times that name none; None if such times are refused."""
        return zone_of(self.time_zone) if self.time_zone else UTC if self.by == "path" else None


class ComponentConfig(Section):
    """One dataset of a mixture."""

    name: ChangesMixture[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,39}$")]]
    """Name in reports and metrics."""
    source: ChangesDataset[str]
    """Source of the dataset, like `data.source`."""
    weight: ChangesMixture[Weight] = 1.0
    """Weight: the share in the training samples is this over the sum of all weights."""
    text_field: ChangesDataset[str] = ""
    """Field that holds the text, if it differs from `data.text_field`."""
    windowed: ChangesDataset[bool] = True
    """Read only `data.window` of it, if there is a window; false reads all of it."""


NEW, REPLAYED = "new", "replay"
"""Names of the two components of a replay: data of the window, and data from before it."""


class ReplayConfig(Section):
    """Data from before the window, seen again beside it: a mixture of the components `new` and `replay`."""

    windows: ChangesMixture[Amount] = 0
    """Number of windows to see again, as long as the one that is read and right before it; 0 disables the replay."""
    weight: ChangesMixture[Annotated[float, Field(gt=0.0)]] = 1.0
    """Weight of the replayed samples, where new ones have 1: their share is this over 1 + this."""
    is_empty: ChangesMixture[bool] = False
    """True if there is nothing before the window, so that all samples are new. Filled in when the run is opened."""


class DriftConfig(Section):
    """Comparison of the new data with earlier data in the shard step, and the bounds of what counts as a change."""

    against: KeepsTraining[str] = "previous"
    """Data to compare with: `previous`, the previous dataset of the same source, or the replayed data beside the
    window; `none`; or the URI of a run or a dataset."""
    some: KeepsTraining[Annotated[float, Field(gt=0.0)]] = 0.1
    """Population stability index from which a distribution has changed to some extent, if chance gives less."""
    large: KeepsTraining[Annotated[float, Field(gt=0.0)]] = 0.25
    """Population stability index from which a distribution has changed largely."""

    @model_validator(mode="after")
    def _check(self) -> DriftConfig:
        if self.large < self.some:
            raise ValueError("large is at least as much as some")
        return self


class PhaseConfig(Section):
    """Other weights of a mixture, from a step on."""

    first_step: ChangesMixture[Count]
    """First step with these weights."""
    weights: ChangesMixture[dict[str, Weight]]
    """Weight of each component, by name; 0 pauses it."""


class DataConfig(Section):
    """Data: where samples come from, and how they are sharded, shuffled and read."""

    source: ChangesDataset[str] = DEFAULT_SOURCE
    """Source of the records: `stdlib`, `digits`, a `module:attr` of your own, or files: text, .jsonl, .parquet, .tar,
    class folders of images, a saved dataset."""
    mixture: ChangesMixture[tuple[ComponentConfig, ...]] = ()
    """Several datasets instead of one source. Each is sharded by itself, and all of it is seen exactly once in each of
    its own epochs."""
    mixture_phases: ChangesMixture[tuple[PhaseConfig, ...]] = ()
    """Changes of the weights of the mixture from a step on."""
    window: WindowConfig = WindowConfig()
    """Part of the source to read."""
    replay: ReplayConfig = ReplayConfig()
    """Data from before the window to see again."""
    drift: DriftConfig = DriftConfig()
    """Comparison of the new data with earlier data."""
    shards: ChangesDataset[Literal["write", "adopt"]] = "write"
    """`write` makes shards from the source; `adopt` reads existing WebDataset shards where they are, without a copy,
    and the task decodes them."""
    fields: ChangesDataset[dict[str, Annotated[tuple[str, ...], Field(min_length=1)]]] = Field(default_factory=dict)
    """Fields of adopted shards: field -> the file extensions that it may have; empty: one field per kind of file."""
    max_incomplete_samples: ChangesDataset[Amount] = 0
    """Samples of adopted shards that may be left out because they lack a file of a field; one more is an error."""
    text_field: ChangesDataset[str] = "text"
    """Field that holds the text, for records with fields (JSON lines, tables)."""
    key: ChangesDataset[str] = ""
    """Column that identifies a record; `*`: its content. Empty: lines and rows are identified by their content, or by
    their number if an earlier release began the dataset."""
    group: ChangesDataset[str] = ""
    """Column whose records of one value stay on one side of the split, and are one unit of the bootstrap."""
    stratify: ChangesDataset[str] = ""
    """Column of whose values each has the same share held out, as counted when the source is first sharded."""
    shard_size_bytes: ChangesDataset[Annotated[int, Field(ge=1 << 16, le=MAX_INTEGER)]] = 64_000_000
    """Target size of one shard."""
    part_size_bytes: ChangesDataset[Annotated[int, Field(ge=1 << 16, le=MAX_INTEGER)]] = 64_000_000
    """Target size of the parts of the source that are encoded independently: added data changes only one of them."""
    processes: KeepsTraining[Amount] = 0
    """Processes that encode parts at the same time; 0: one per CPU. The result does not depend on it."""
    shard_pods: KeepsTraining[Amount] = 0
    """Pods of a job that encodes the parts, each with `processes`; with `launch.backend=local` processes of this
    machine. 0 or 1: the shard step encodes them itself. The result does not depend on it."""
    validation_fraction: ChangesDataset[Annotated[float, Field(gt=0.0, lt=1.0)]] = 0.05
    """Share of the records to hold out, chosen by a hash of each record's key: the choice stays when data is added."""
    verify: KeepsTraining[Literal["first_use", "everything", "size"]] = "first_use"
    """Time at which shards are hashed: `first_use`, in the background; `everything`, before the first step; `size`,
    never. The stage that starts a job checks all sizes. `sha256` is an older name of `everything`."""
    rehash: KeepsTraining[bool] = False
    """Hash all shards that are there before they are reused. Without it they are where the size, times, inode, entity
    tag or version of one has changed since they were found whole."""
    cache_dir: KeepsTraining[str] = ""
    """Folder of a node for kept shards and for which ones were hashed; empty: a folder for temporary files."""
    cache_bytes: KeepsTraining[Literal["auto"] | Amount] = "auto"
    """Size of a node's cache of blocks of shards from an object store, on its disk; those unused for longest go.
    `auto`: 32 GiB, or less: a third of a pod's scratch volume, a quarter of the free space of the disk. 0: blocks stay
    in memory only, 256 MiB for each process."""
    shuffle_range_samples: ChangesTraining[Count] = 1024
    """Consecutive samples of the dataset that stay near each other. These ranges are shuffled over the whole epoch;
    smaller ones shuffle better and are read from more places."""
    shuffle_window_ranges: ChangesTraining[Count] = 64
    """Number of ranges over which samples are mixed at a time."""
    lanes: Annotated[Count, Effect(changes_training=True, added="0.3")] = 64
    """Parts of a global batch, each of which takes its samples from its own ranges. So many nodes share the reading of
    a large dataset, and a number of nodes that divides it is best. At most one per sample of the batch, and per range
    of 2,097,152 samples."""
    order: Annotated[Literal[2, 3], Effect(changes_training=True, counted_as="order")] = ORDER
    """Number of the order of samples; 2, that of release 0.2, has no lanes. A run that was opened in it stays in it."""
    length_group_batches: Annotated[Amount, Effect(changes_training=True, added="0.2")] = 0
    """Batches to sort at a time by the bytes of their samples, so that samples of similar length share a batch; for a
    task whose `batch` cuts padding off. 0 does not sort."""
    prefetch_batches: KeepsTraining[Literal["auto"] | Amount] = "auto"
    """Steps whose samples are read ahead in the background; 0 reads in the training thread. `auto` begins with 2 and
    takes more where training has waited for data, as `data.prefetch_bytes` allows. The log tells every choice."""
    prefetch_bytes: KeepsTraining[Count] = 1 << 30
    """Most bytes of the batches that each process reads ahead where that is left to it, and at most a quarter of the
    memory that is free."""
    workers: KeepsTraining[Literal["auto"] | Amount] = "auto"
    """Workers that read and decode for each training process; 0: the thread that makes the batches. `auto`, if the task
    decodes: begins with 2 and takes more where training has waited, up to one for each further CPU of the process;
    else 0."""
    worker_kind: KeepsTraining[Literal["threads", "processes", "auto"]] = "threads"
    """Kind of these workers; `processes` is for a task whose `decode` holds Python's lock (GIL). `auto` begins with
    threads and changes to processes where training waits for threads that wait for the lock."""
    requests: KeepsTraining[Literal["auto"] | Count] = "auto"
    """Reads of samples under way at once in each process, which pays where storage answers slowly. `auto` begins with 1
    and takes more where training has waited, up to 32; a fixed number of workers begins with as many. Workers that are
    processes read one at a time each."""
    max_bad_samples: KeepsTraining[Amount] = 0
    """Samples of each split that may be left out because they cannot be decoded; one more fails the run (11)."""

    @model_validator(mode="before")
    @classmethod
    def _drop_removed_key(cls, document: Any) -> Any:
        """Leave out a key that runs of release 0.2 have kept as null; another value of it is refused as unknown."""
        if isinstance(document, dict) and document.get("shuffle_window_shards", "") is None:
            return {key: value for key, value in document.items() if key != "shuffle_window_shards"}
        return document

    @field_validator("verify", mode="before")
    @classmethod
    def _read_old_name(cls, value: Any) -> Any:
        return "everything" if value == "sha256" else value

    @property
    def sources(self) -> dict[str, str]:
        """Every source, by its key in the configuration."""
        if not self.mixture:
            return {"data.source": self.source}
        return {f"data.mixture[{number}].source": component.source for number, component in enumerate(self.mixture)}

    def of_component(self, component: ComponentConfig) -> DataConfig:
        """Return a copy for one dataset of the mixture alone."""
        text_field = component.text_field or self.text_field
        window = self.window if component.windowed else WindowConfig()
        if component.name == REPLAYED and self._has_replay:
            window = window.placed(window.window().before(self.replay.windows))
        changes = {"source": component.source, "text_field": text_field, "window": window}
        return self.model_copy(update={**changes, "mixture": (), "mixture_phases": (), "replay": ReplayConfig()})

    @property
    def columns(self) -> dict[str, str]:
        """Columns that identify a record and decide its split, by the name of the setting."""
        return {name: value for name in ("key", "group", "stratify") if (value := getattr(self, name))}

    @property
    def windowed_sources(self) -> list[str]:
        """Sources that the window applies to."""
        own = [part.source for part in self.mixture if part.windowed] if self.mixture else [self.source]
        return list(dict.fromkeys(own))

    @property
    def components(self) -> tuple[ComponentConfig, ...]:
        """Datasets of the mixture, or the window and the data replayed beside it; empty for a single dataset."""
        if not self._has_replay:
            return self.mixture
        replayed = ComponentConfig(name=REPLAYED, source=self.source, weight=self.replay.weight)
        return (ComponentConfig(name=NEW, source=self.source), replayed)

    @property
    def _has_replay(self) -> bool:
        return self.replay.windows > 0 and not self.replay.is_empty

    @model_validator(mode="after")
    def _check_mixture(self) -> DataConfig:
        names = [component.name for component in self.components]
        if len(set(names)) < len(names):
            raise ValueError(f"the components of a mixture need different names: {', '.join(names)}")
        if self.replay.windows and (self.mixture or not self.window.is_set):
            raise ValueError("a replay is of the time before a window of one source: set window.by, and no mixture")
        if self.mixture and self.source != DEFAULT_SOURCE:
            raise ValueError("source and mixture exclude each other: make the source a component")
        if names and self.shards == "adopt":
            raise ValueError("a mixture is of written shards: leave out shards: adopt")
        if names and self.length_group_batches:
            raise ValueError("length_group_batches and mixture exclude each other: its batches are of all components")
        if self.window.is_set and self.shards == "adopt":
            raise ValueError("a window is of written shards: leave out shards: adopt")
        if self.columns and (self.shards == "adopt" or {"group", "stratify"} <= self.columns.keys()):
            raise ValueError("key, group and stratify need written shards, and group and stratify exclude each other")
        steps = [phase.first_step for phase in self.mixture_phases]
        if sorted(set(steps)) != steps:
            raise ValueError("mixture_phases stand in the order of their first_step, each with another one")
        for phase in self.mixture_phases:
            if set(phase.weights) != set(names):
                raise ValueError(f"mixture_phases: the phase of step {phase.first_step} names not the components")
        for weights in self.mixture_weights() if names else ():
            compute_slots(weights)
        return self

    def identity(self) -> dict[str, Any]:
        """Return the keys that count when trainings are compared, with the names and weights of a mixture."""
        if not self.components:
            return super().identity()
        first_steps = [0, *(phase.first_step for phase in self.mixture_phases)]
        names = [component.name for component in self.components]
        phases = zip(first_steps, self.mixture_weights(), strict=True)
        return {**super().identity(), "mixture": names, "mixture_weights": [[step, *row] for step, row in phases]}

    def mixture_weights(self) -> list[tuple[float, ...]]:
        """Return the weights of the components, in their order, for each phase."""
        components = self.components
        later = [tuple(phase.weights[component.name] for component in components) for phase in self.mixture_phases]
        return [tuple(component.weight for component in components), *later]

    @model_validator(mode="after")
    def _check_window(self) -> DataConfig:
        window_samples = self.shuffle_range_samples * self.shuffle_window_ranges
        if window_samples > MAX_WINDOW_SAMPLES:
            raise ValueError(
                f"shuffle_range_samples x shuffle_window_ranges is {window_samples:,}, "
                f"and at most {MAX_WINDOW_SAMPLES:,} samples are shuffled at a time"
            )
        return self
