"""The configuration: one YAML file, one tree, every field with a default that works.

`load` reads a file and applies `--set section.field=value` overrides; unknown keys are refused with the nearest known
one. The resolved tree is what every stage reads and what is saved with every output. Two digests identify it: `digest`
(all of it) and `training_identity` (what makes it another training: not how or where it runs).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError, model_validator

from kftrain.checkpoint.settings import CheckpointConfig
from kftrain.core import storage
from kftrain.data.settings import DataConfig
from kftrain.errors import ConfigError
from kftrain.evaluate.settings import EvaluateConfig
from kftrain.launch.settings import LaunchConfig
from kftrain.models.settings import ModelConfig
from kftrain.parallel.settings import ParallelConfig, PrecisionConfig
from kftrain.registry.settings import RegistryConfig
from kftrain.run.settings import RunConfig
from kftrain.schedule.settings import ScheduleConfig
from kftrain.server.settings import ServerConfig
from kftrain.settings import layers
from kftrain.settings.section import Section
from kftrain.tasks.settings import TaskConfig
from kftrain.tracking.settings import TrackingConfig
from kftrain.train.settings import OptimizerConfig, OuterConfig, TrainConfig
from kftrain.trust import code_of, permit, permit_kinds

ORDERS = (2, 3)
"""Numbers of the orders of samples that a training may have. A checkpoint of another one cannot go on."""

OF_RELEASE_02: layers.Document = {"data": {"order": 2}}
"""Values of keys that a configuration kept by release 0.2 does not name; below all others."""

SECTIONS_WITHOUT_ENTRY = {"run": "", "data": "data."}
"""Section -> prefix of its keys, which stand in a training identity beside the entries of the other sections."""

MEETING_INTERVALS = (
    "train.log_interval_steps",
    "evaluate.interval_steps",
    "checkpoint.interval_steps",
    "checkpoint.keep_every",
)
"""Keys of the intervals at whose ends all processes do something together; 0: they never do."""


class Config(Section):
    """The whole configuration."""

    run: RunConfig = RunConfig()
    data: DataConfig = DataConfig()
    task: TaskConfig = TaskConfig()
    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    precision: PrecisionConfig = PrecisionConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    registry: RegistryConfig = RegistryConfig()
    launch: LaunchConfig = LaunchConfig()
    tracking: TrackingConfig = TrackingConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    server: ServerConfig = ServerConfig()

    @model_validator(mode="after")
    def _check_across_sections(self) -> Config:
        if self.train.most_micro_rows > self.train.global_batch_size:
            raise ValueError(
                f"train.micro_batch_size ({self.train.most_micro_rows}) exceeds "
                f"train.global_batch_size ({self.train.global_batch_size})"
            )
        split = self.parallel.context * self.parallel.tensor * self.parallel.pipeline * self.parallel.expert
        if self.train.micro_batch_size == "auto" and split > 1:
            raise ValueError("train.micro_batch_size: auto measures the whole model, which axes of parallel split")
        if self.train.batch_warmup and self.parallel.pipeline > 1:
            raise ValueError("train.batch_warmup must be empty with parallel.pipeline: a schedule has equal steps")
        if self.train.compile:
            self._require_compilable()
        if self.train.command:
            self._require_left_to_script()
        if self.server.tables:
            self._require_tables_fit()
        elif self.server.num_servers and self.parallel.islands == 1:
            raise ValueError("server.num_servers must be 0 where there are neither server.tables nor parallel.islands")
        if self.parallel.islands > 1:
            self._require_islands_fit()
        elif self.train.outer != OuterConfig():
            raise ValueError("train.outer is of islands: parallel.islands must be 2 or more")
        if self.parallel.compression.kind != "none":
            self.precision.require_fp32_sums(self.parallel.compression.kind)
        self.parallel.compression.require_optimizer(self.optimizer.kind, bool(self.optimizer.nesterov))
        if self.checkpoint.keep_best and not self.evaluate.interval_steps:
            raise ValueError("checkpoint.keep_best needs periodic evaluations: evaluate.interval_steps must not be 0")
        if self.train.stop_after_no_improvement and not self.checkpoint.keep_best:
            raise ValueError("train.stop_after_no_improvement needs a metric: checkpoint.keep_best must not be empty")
        return self

    def _require_left_to_script(self) -> None:
        """Refuse what a script of the user's decides itself."""
        set_here = {"parallel": self.parallel != ParallelConfig(), "checkpoint.keep_best": self.checkpoint.keep_best}
        set_here |= {"train.from": not self.train.from_scratch, "train.average_decay": self.train.average_decay}
        for key in filter(set_here.__getitem__, set_here):
            raise ValueError(f"{key} is of kftrain's own training loop, whose place train.command takes")

    def _require_tables_fit(self) -> None:
        """Refuse what no test has shown to go together with tables on servers."""
        needed: dict[str, Any] = {"parallel.strategy": "ddp", "parallel.pipeline": 1, "parallel.tensor": 1}
        needed |= {"parallel.compression.kind": "none", "precision.compute": "fp32", "train.compile": False}
        needed |= {"train.activation_checkpointing": "none", "train.average_decay": 0.0, "train.noise_scale": False}
        needed |= {"train.start_from": "scratch", "train.command": ()}
        odd = next((key for key, value in needed.items() if attrgetter(key)(self) != value), None)
        if odd is not None:
            key = odd.replace("start_from", "from")
            raise ValueError(f"{key} must be {needed[odd] or 'left out'} with tables on servers (server.tables)")
        if self.server.copies > 1 and self.launch.is_remote:
            raise ValueError("server.copies must be 1 where a cluster ends a job that has lost a node (launch.backend)")
        if self.train.micro_batch_size == "auto":
            raise ValueError("train.micro_batch_size must be a number with tables on servers (server.tables)")

    def _require_islands_fit(self) -> None:
        """Refuse what would be of all islands, or what no test has shown to go together with them."""
        default = Config()
        needed = [f"parallel.{key}" for key in ("tensor", "pipeline", "context", "expert", "offload", "hierarchical")]
        needed += ["parallel.layout", "parallel.compression.kind", "precision.master", "server.tables"]
        needed += [f"server.{key}" for key in ("copies", "consistency", "encoding")]
        needed += [f"train.{key}" for key in ("average_decay", "noise_scale", "batch_warmup")]
        odd = [key for key in needed if attrgetter(key)(self) != attrgetter(key)(default)]
        others = {"parallel.strategy": ("auto",), "precision.compute": ("fp16", "float8")}
        others["train.micro_batch_size"] = ("auto",)
        odd += [key for key, values in others.items() if attrgetter(key)(self) in values]
        if odd:
            value = attrgetter(odd[0])(self)
            raise ValueError(f"{odd[0]} must not be {value} with parallel.islands: no test has shown what comes of it")
        if self.train.outer.num_fragments > 1 and self.server.num_servers:
            raise ValueError("train.outer.num_fragments must be 1 with servers: they keep rounds of all parameters")
        if self.train.outer.quorum:
            self._require_quorum_fits()

    def _require_quorum_fits(self) -> None:
        """Refuse a quorum that cannot come, or a place where islands meet that lies between two exchanges."""
        outer = self.train.outer
        if outer.quorum > self.parallel.islands:
            raise ValueError(f"train.outer.quorum must be at most parallel.islands, {self.parallel.islands}")
        if not self.server.num_servers:
            raise ValueError("train.outer.quorum is kept by servers: server.num_servers must be at least 1")
        for key in MEETING_INTERVALS:
            if attrgetter(key)(self) % outer.steps:
                what = f"a multiple of train.outer.steps, {outer.steps}, with a quorum: all islands meet there"
                raise ValueError(f"{key} must be {what}, not {attrgetter(key)(self)}")

    def is_meeting(self, num_steps: int) -> bool:
        """Return True if all islands meet after so many steps."""
        intervals = [attrgetter(key)(self) for key in MEETING_INTERVALS]
        is_interval = any(interval and num_steps % interval == 0 for interval in intervals)
        return is_interval or num_steps == self.train.steps

    def _require_compilable(self) -> None:
        axes = [f"parallel.{axis}" for axis in ("context", "tensor", "pipeline", "expert")]
        others = {"model.kind": "mixture_of_experts", "precision.compute": "float8", "precision.master": "bf16"}
        odd = [axis for axis in axes if attrgetter(axis)(self) > 1] + ["parallel.offload"] * self.parallel.offload
        odd += [f"{key}: {value}" for key, value in others.items() if attrgetter(key)(self) == value]
        if odd:
            raise ValueError(f"train.compile must be false with {odd[0]}: no test compares what is compiled then")
        method = self.train.activation_checkpointing
        if method in ("blocks", "selective") and self.task.options().get("attention") == "documents":
            what = f"torch compiles nothing of a block that is computed again ({method}) with attention over documents"
            raise ValueError(
                f"train.compile must be false with train.activation_checkpointing: {what}; use none or offload"
            )

    @property
    def model_name(self) -> str:
        """Name of the registered model."""
        return self.registry.model_name or self.run.name

    @property
    def experiment(self) -> str:
        """Name of the MLflow experiment."""
        return self.tracking.experiment or self.run.name

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as plain data, as it is saved and shown."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """Write the resolved configuration as YAML, as it is saved with every output."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    def beyond_defaults(self) -> dict[str, Any]:
        """Return only what differs from the defaults, as plain data: merged over them it is the whole again."""
        return layers.beyond(self.to_dict(), Config().to_dict())

    def digest(self) -> str:
        """Compute the hex digest of the whole configuration."""
        return storage.digest_json(self.to_dict())

    def training_identity(self, dataset_digest: str) -> dict[str, Any]:
        """Return what makes two trainings the same one: a checkpoint resumes only under an equal identity.

        The marks of the keys say what is in it: not launch, layout, tracking, checkpoints and evaluation, so that a run
        may go on with more processes. The dataset and the initial weights count by their digests, wherever they lie.
        """
        identity: dict[str, Any] = {"dataset": dataset_digest, "order": self.data.order}
        for name, own in self:
            section = own.identity()
            if name in SECTIONS_WITHOUT_ENTRY:
                identity |= {f"{SECTIONS_WITHOUT_ENTRY[name]}{key}": value for key, value in section.items()}
            elif section:
                identity[name] = section
        if digest := self.train.initial_weights.export_digest:
            identity["initial_weights"] = digest
        return identity

    def training_digest(self, dataset_digest: str) -> str:
        """Compute the hex digest of `training_identity`."""
        return storage.digest_json(self.training_identity(dataset_digest))

    def anchored(self, base: str | Path) -> Config:
        """Return a copy whose storage roots and path of an sqlite file are made absolute against `base`."""
        changes: dict[str, Any] = {
            "run": self.run.model_copy(update={"storage_root": storage.absolute(self.run.storage_root, base)}),
            "registry": self.registry.model_copy(
                update={"trusted_roots": tuple(storage.absolute(root, base) for root in self.registry.trusted_roots)}
            ),
            "evaluate": self.evaluate.model_copy(
                update={"reference": self.evaluate.reference and storage.absolute(self.evaluate.reference, base)}
            ),
            "tracking": self.tracking.model_copy(update={"uri": _anchored_sqlite(self.tracking.uri, base)}),
        }
        return self.model_copy(update=changes)


def load(files: str | Path | Sequence[str] | None = None, overrides: Sequence[str] = ()) -> Config:
    """Load the configuration of one or several files (none: the defaults) with overrides like `train.steps=200`.

    A later file wins over an earlier one, key by key: a cluster's own settings stand in one, the training in another.
    The code that the configuration names may be imported from now on. Raises ConfigError that names the file, the key,
    the value and the fix.
    """
    chosen = [files] if isinstance(files, str | Path) else list(files or ())
    return permit(_validated({str(file): layers.read_layer(file) for file in chosen}, overrides))


def parse(
    text: str, overrides: Sequence[str] = (), where: str = "config", above: dict[str, layers.Document] | None = None
) -> Config:
    """Parse a configuration from a YAML text, with further layers (where from -> values) and then overrides over it.

    The text is the caller's own: the code that it names may be imported from now on. Raises ConfigError that names the
    key, the value and the fix.
    """
    return permit(_validated({where: layers.parse_layer(text, where), **(above or {})}, overrides))


def parse_kept(
    text: str, where: str, overrides: Sequence[str] = (), above: dict[str, layers.Document] | None = None
) -> Config:
    """The same for a text that a run's folder holds, perhaps of an earlier release: only overrides permit code."""
    kept = layers.merged(OF_RELEASE_02, layers.parse_layer(text, where))
    found = _validated({where: kept, **(above or {})}, overrides)
    permit_kinds(code_of(found).intersection(re.findall(r"[\w.:/-]+", " ".join(overrides))))
    return found


def _validated(documents: dict[str, layers.Document], overrides: Sequence[str]) -> Config:
    merged: layers.Document = {}
    by_hand: layers.Document = {}
    for override in overrides:
        layers.override(by_hand, override)
    for document in documents.values():
        merged = layers.merged(_without_goal(merged, document), document)
    merged = _without_goal(merged, by_hand)
    places = dict(documents)
    for override in overrides:
        layers.override(merged, override)
        layers.override(places.setdefault(f"--set {override}", {}), override)
    layers.require_plain(places, merged)
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        location = error.errors()[0]["loc"]  # empty where settings are at odds with each other
        raise _explain(error, layers.origin(places if location else documents, location)) from error


def _without_goal(below: layers.Document, above: layers.Document) -> layers.Document:
    """Return the layer below, without its goal if the layer above names another metric: the goal is of the old one."""
    old, new = below.get("registry"), above.get("registry")
    if not isinstance(old, dict) or not isinstance(new, dict) or "metric" not in new:
        return below
    is_same = old.get("metric", new["metric"]) == new["metric"]
    return below if is_same else {**below, "registry": {key: old[key] for key in old if key != "goal"}}


def schema() -> dict[str, Any]:
    """Return the JSON schema of the configuration."""
    return Config.model_json_schema()


def _explain(error: ValidationError, where: str) -> ConfigError:
    first = error.errors()[0]
    types = ("constrained-", "literal[", "tuple[")  # which pydantic has tried, where a key may have several
    location = [str(part) for part in first["loc"] if not str(part).startswith(types)]
    key = ".".join(location)
    if first["type"] == "extra_forbidden":
        return ConfigError("unknown key", where=f"{where}: {key}", value=first["input"], fix=_nearest_key(location))
    message = first["msg"].removeprefix("Value error, ")
    shown = {} if not location else {"value": first["input"]}
    known = (
        re.findall(r"'([^']+)'", first.get("ctx", {}).get("expected", "")) if first["type"] == "literal_error" else []
    )
    if near := difflib.get_close_matches(str(first["input"]), known, n=1, cutoff=0.5):
        shown["fix"] = f"did you mean '{near[0]}'?"
    return ConfigError(message[0].lower() + message[1:], where=f"{where}: {key}".rstrip(": "), **shown)


def _nearest_key(location: list[str]) -> str:
    fields: Any = Config.model_fields
    for part in location[:-1]:
        if not part.isdigit():  # which one of a list
            kind = fields[part].annotation
            fields = (get_args(kind) or (kind,))[0].model_fields
    known = [field.alias or name for name, field in fields.items()]
    sections = {name: field.annotation for name, field in Config.model_fields.items()} if len(location) == 2 else {}
    elsewhere = [name for name, kind in sections.items() if location[-1] in getattr(kind, "model_fields", {})]
    if elsewhere:
        return f"did you mean '{elsewhere[0]}.{location[-1]}'?"
    near = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.5)
    return f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(known)}"


def _anchored_sqlite(uri: str, base: str | Path) -> str:
    prefix = "sqlite:///"
    if not uri.startswith(prefix) or uri.startswith(prefix + "/"):
        return uri
    return prefix + storage.absolute(uri.removeprefix(prefix), base)
