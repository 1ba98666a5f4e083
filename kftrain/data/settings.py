"""The section `data`."""

from __future__ import annotations

from datetime import tzinfo
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from kftrain.core.plain import MAX_INTEGER
from kftrain.data.shares import slots_by_weight
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
"""The table of a window takes 8 bytes for each, and is sorted within a second or two."""

DEFAULT_SOURCE = "stdlib"

CONTENT_KEY = "*"
"""As `data.key`: a record is known by all that it holds."""

Weight = Annotated[float, Field(ge=0.0)]

ChangesMixture = Annotated[Value, Effect(changes_training=True, counted_as="data.mixture_weights")]
"""Type of a key that the names and weights of a mixture's components stand for in the training identity."""


class WindowConfig(Section):
    """Which part of a source is read: what lies between two instants. A schedule fills in `start` and `end`."""

    by: ChangesDataset[Literal["none", "path", "modified", "column"]] = "none"
    """What says the time: dates in paths (`date=2026-11-21/`, `hour=05/`, or `year=2026/month=11/day=21/`), when a file
    was changed, or a field of each record; `none`: everything is read."""
    start: ChangesDataset[str] = ""
    """The first instant, as in RFC 3339: `2026-11-14T00:00:00Z`."""
    end: ChangesDataset[str] = ""
    """The first instant after it. A day or an hour belongs to the window in which it ends."""
    column: ChangesDataset[str] = ""
    """The field of a record that holds its time; of paths the name of the date, where it is not `date`."""
    number_unit: ChangesDataset[Literal["", "seconds", "milliseconds", "microseconds", "nanoseconds"]] = ""
    """Of times that are numbers, counted from 1970; empty: they are refused."""
    time_zone: ChangesDataset[str] = ""
    """Of dates and times that name none, as `Europe/Berlin`. Empty: UTC in paths; in a column they are refused."""
    watermark: ChangesDataset[Annotated[str, Field(pattern=r"^$|/\d{1,12}\.json$")]] = ""
    """Filled in by a schedule whose windows follow each other: what says what was trained on before this one."""
    late_from: ChangesDataset[str] = ""
    """Filled in with it: files from here on that are not named there are read, too, though they lie before `start`."""

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
        """Whether there is a window at all."""
        return self.by != "none"

    def window(self) -> TimeWindow:
        """Its instants. Raises ConfigError where nobody has filled them in."""
        if not self.start:
            fix = "a schedule sets both; without one, set data.window.start and data.window.end"
            raise ConfigError("the window has no start and no end", where="data.window", value=self.by, fix=fix)
        return TimeWindow.parse(self.start, self.end)

    def placed(self, window: TimeWindow) -> WindowConfig:
        """The same, for another window and nothing beside it."""
        ends = {"start": utc_text(window.start), "end": utc_text(window.end)}
        return self.model_copy(update={**ends, "watermark": "", "late_from": ""})

    def zone(self) -> tzinfo | None:
        """Of times that name none."""
        return zone_of(self.time_zone) if self.time_zone else UTC if self.by == "path" else None


class ComponentConfig(Section):
    """One dataset of a mixture."""

    name: ChangesMixture[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,39}$")]]
    """In reports and metrics."""
    source: ChangesDataset[str]
    """As `data.source`."""
    weight: ChangesMixture[Weight] = 1.0
    """Its share of the samples of training is this over the sum of all weights."""
    text_field: ChangesDataset[str] = ""
    """As `data.text_field`, where it is another one."""
    windowed: ChangesDataset[bool] = True
    """Whether `data.window` holds for it, if there is one; else all of it is read."""


NEW, REPLAYED = "new", "replay"
"""Names of the components where data from before the window is seen again."""


class ReplayConfig(Section):
    """Data from before the window, seen again beside it: a mixture of the components `new` and `replay`."""

    windows: ChangesMixture[Amount] = 0
    """So many windows as long as the one that is read, right before it; 0: nothing is seen again."""
    weight: ChangesMixture[Annotated[float, Field(gt=0.0)]] = 1.0
    """Of the samples from before, where the new ones have 1: their share is this over 1 + this."""
    is_empty: ChangesMixture[bool] = False
    """Filled in when the run is opened: there is nothing before the window, so all samples are new."""


class DriftConfig(Section):
    """What the shard step compares the new data with, and what it calls a change."""

    against: KeepsTraining[str] = "previous"
    """`previous`: the dataset before of the same source, or what is seen again beside the window; `none`; or the URI of
    a run or a dataset."""
    some: KeepsTraining[Annotated[float, Field(gt=0.0)]] = 0.1
    """Population stability index from which on a distribution has changed to some extent, if chance gives less."""
    large: KeepsTraining[Annotated[float, Field(gt=0.0)]] = 0.25
    """The index from which on it has changed largely."""

    @model_validator(mode="after")
    def _check(self) -> DriftConfig:
        if self.large < self.some:
            raise ValueError("large is at least as much as some")
        return self


class PhaseConfig(Section):
    """Other weights of a mixture, from a step on."""

    first_step: ChangesMixture[Count]
    """The first step with these weights."""
    weights: ChangesMixture[dict[str, Weight]]
    """Of each component, by name; 0 pauses it."""


class DataConfig(Section):
    """Where samples come from and how they are sharded and read."""

    source: ChangesDataset[str] = DEFAULT_SOURCE
    """`stdlib`, `digits`, `module:attr`, or text, .jsonl, .parquet, .tar, class folders of images, a saved dataset."""
    mixture: ChangesMixture[tuple[ComponentConfig, ...]] = ()
    """Instead of a source, several of them: each with a `name`, a `source`, a `weight` and, if it has another one, its
    `text_field`. Each is sharded by itself and seen exactly once in each epoch of its own."""
    mixture_phases: ChangesMixture[tuple[PhaseConfig, ...]] = ()
    """Other weights from a step on: each with `first_step` and `weights`, by name."""
    window: WindowConfig = WindowConfig()
    """Which part of the source is read."""
    replay: ReplayConfig = ReplayConfig()
    """What is seen again of the time before."""
    drift: DriftConfig = DriftConfig()
    """What the new data is compared with."""
    shards: ChangesDataset[Literal["write", "adopt"]] = "write"
    """`adopt`: WebDataset shards are read where they are, nothing is copied, and the task decodes what it reads."""
    fields: ChangesDataset[dict[str, Annotated[tuple[str, ...], Field(min_length=1)]]] = Field(default_factory=dict)
    """Of adopted shards: field -> the extensions that it may have; empty: one field for each kind of file."""
    max_incomplete_samples: ChangesDataset[Amount] = 0
    """Of adopted shards: so many samples that lack a file of a field are left out; one more is an error."""
    text_field: ChangesDataset[str] = "text"
    """Of records with fields (JSON lines, tables): the one that holds the text."""
    key: ChangesDataset[str] = ""
    """Column that says which record it is; `*`: its content. Empty: of lines and rows it is the content, or the number
    where a release before has begun the dataset."""
    group: ChangesDataset[str] = ""
    """Column of which all records of one value are on one side of the split, and one unit of the bootstrap."""
    stratify: ChangesDataset[str] = ""
    """Column of whose values each has the same share held out, as counted when the source is sharded first."""
    shard_size_bytes: ChangesDataset[Annotated[int, Field(ge=1 << 16, le=MAX_INTEGER)]] = 64_000_000
    """Target size of one shard."""
    part_size_bytes: ChangesDataset[Annotated[int, Field(ge=1 << 16, le=MAX_INTEGER)]] = 64_000_000
    """Target size of the parts of the source that are encoded by themselves: data that is added changes one of them."""
    processes: KeepsTraining[Amount] = 0
    """Processes that encode parts at the same time; 0: one for each CPU of the machine. The result is the same."""
    validation_fraction: ChangesDataset[Annotated[float, Field(gt=0.0, lt=1.0)]] = 0.05
    """Share of the records that is held out, chosen by a hash of each record's key: it stays when data is added."""
    verify: KeepsTraining[Literal["first_use", "everything", "size"]] = "first_use"
    """When a shard is hashed: in the background from its first use, before the first step, or never. Sizes always are
    checked before the first step. `sha256`, as releases before called it, reads as `everything`."""
    cache_dir: KeepsTraining[str] = ""
    """Folder of a node for what it remembers and keeps of shards; empty: one for temporary files."""
    cache_bytes: KeepsTraining[Amount] = 0
    """Of shards of an object store that a node keeps, fetched in the background while they are read in ranges; what
    was not read for the longest time goes. 0: none, they are read in ranges only."""
    shuffle_range_samples: ChangesTraining[Count] = 1024
    """So many samples that follow each other in the dataset stay near each other; these ranges are shuffled over the
    whole epoch. Smaller ones shuffle better and are read from more places."""
    shuffle_window_ranges: ChangesTraining[Count] = 64
    """Samples are mixed over this many ranges at a time."""
    length_group_batches: Annotated[Amount, Effect(changes_training=True, added="0.2")] = 0
    """So many batches at a time are sorted by the bytes of their samples, so that those of a batch are of near length:
    for a task whose `batch` cuts padding off. 0: not."""
    shuffle_window_shards: Annotated[
        Count | None, Effect(changes_training=True, counted_as="data.shuffle_window_shards")
    ] = None
    """Of a run that release 0.1 began, whose order followed the shards: that release finishes it. Refused elsewhere."""
    prefetch_batches: KeepsTraining[Literal["auto"] | Amount] = 2
    """Steps whose samples are read ahead in the background; 0 reads in the training thread; `auto`: 2 at first, and one
    more each time that the training has waited for data, up to 16 and 1 GiB of rows in each process."""
    workers: KeepsTraining[Literal["auto"] | Amount] = "auto"
    """Who reads and decodes, for each training process; `auto`: the CPUs that it has beside its own where the task
    decodes, else 0, the thread that makes the batches."""
    worker_kind: KeepsTraining[Literal["threads", "processes"]] = "threads"
    """`processes`: for a task whose `decode` holds Python's lock (GIL); samples that are not decoded need none."""
    max_bad_samples: KeepsTraining[Amount] = 0
    """Samples of each split that may be left out because they cannot be decoded; with one more the run fails (11)."""

    @field_validator("verify", mode="before")
    @classmethod
    def _read_old_name(cls, value: Any) -> Any:
        return "everything" if value == "sha256" else value

    @property
    def sources(self) -> dict[str, str]:
        """Key of the configuration -> source, of all that there are."""
        if not self.mixture:
            return {"data.source": self.source}
        return {f"data.mixture[{number}].source": each.source for number, each in enumerate(self.mixture)}

    def of_component(self, component: ComponentConfig) -> DataConfig:
        """The same for one dataset of the mixture alone."""
        text_field = component.text_field or self.text_field
        window = self.window if component.windowed else WindowConfig()
        if component.name == REPLAYED and self._has_replay:
            window = window.placed(window.window().before(self.replay.windows))
        changes = {"source": component.source, "text_field": text_field, "window": window}
        return self.model_copy(update={**changes, "mixture": (), "mixture_phases": (), "replay": ReplayConfig()})

    @property
    def columns(self) -> dict[str, str]:
        """Setting -> column, of those that say which record it is and how it is split."""
        return {name: value for name in ("key", "group", "stratify") if (value := getattr(self, name))}

    @property
    def windowed_sources(self) -> list[str]:
        """The sources that the window is of."""
        own = [each.source for each in self.mixture if each.windowed] if self.mixture else [self.source]
        return list(dict.fromkeys(own))

    @property
    def components(self) -> tuple[ComponentConfig, ...]:
        """The datasets of the mixture, or the window and what is seen again beside it; empty for one dataset."""
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
            slots_by_weight(weights)
        return self

    def identity(self) -> dict[str, Any]:
        """Return the keys that count when trainings are compared, and of a mixture the names and weights."""
        if not self.components:
            return super().identity()
        first_steps = [0, *(phase.first_step for phase in self.mixture_phases)]
        names = [component.name for component in self.components]
        phases = zip(first_steps, self.mixture_weights(), strict=True)
        return {**super().identity(), "mixture": names, "mixture_weights": [[step, *row] for step, row in phases]}

    def mixture_weights(self) -> list[tuple[float, ...]]:
        """Weights of the components, in their order, of each phase."""
        components = self.components
        later = [tuple(phase.weights[each.name] for each in components) for phase in self.mixture_phases]
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
