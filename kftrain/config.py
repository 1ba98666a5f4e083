"""The configuration: one YAML file, one tree, every field with a default that works.

`load` reads a file and applies `--set section.field=value` overrides; unknown keys are refused with the nearest known
one. The resolved tree is what every stage reads and what is saved with every output. Two digests identify it: `digest`
(all of it) and `training_identity` (what makes it another training: not how or where it runs).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import ConfigDict, Field, ValidationError, model_validator

from kftrain import storage
from kftrain.cluster_config import KubernetesConfig
from kftrain.errors import ConfigError
from kftrain.plain import MAX_INTEGER
from kftrain.settings import layers
from kftrain.settings.section import Amount, Count, Probability, Section

IMPLIED_SHUFFLE_WINDOW_SHARDS = 16
"""A training identity that names no window has this one: it stays, whatever the default becomes."""


class _Plugin(Section):
    """A section whose `kind` names a built-in or a user's `module:attr`; the other keys go to what it names."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    def options(self) -> dict[str, Any]:
        """All keys but `kind`."""
        return dict(self.model_extra or {})


class RunConfig(Section):
    """What the run is called and where its files go."""

    name: Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$")] = "kftrain"
    """Short name, also part of job names: lower-case letters, digits and dashes, at most 40."""
    seed: Amount = 0
    """Seed of the initial weights, the data order and dropout."""
    storage_root: str = "."
    """Folder or object store URI below which shards and runs are kept."""


class DataConfig(Section):
    """Where samples come from and how they are sharded and read."""

    source: str = "stdlib"
    """`stdlib`, `digits`, `module:attr`, or text, .jsonl, .parquet, .tar, class folders of images, a saved dataset."""
    text_field: str = "text"
    """Of records with fields (JSON lines, tables): the one that holds the text."""
    shard_size_bytes: Annotated[int, Field(ge=1 << 16, le=MAX_INTEGER)] = 64_000_000
    """Target size of one shard."""
    validation_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    """Share of the records that is held out, chosen by a hash of each record's key: it stays when data is added."""
    verify: Literal["sha256", "size"] = "sha256"
    """What training checks of every shard before its first step: the whole content, or only the length."""
    shuffle_window_shards: Count = 16
    """Samples are shuffled across this many shards at a time; shards are shuffled over the whole epoch."""
    prefetch_batches: Amount = 2
    """Steps whose samples are read ahead in a background thread; 0 reads in the training thread."""


class TaskConfig(_Plugin):
    """What is learned. Further keys belong to the task."""

    kind: str = "language_modeling"
    """`language_modeling`, `image_classification`, or a user's `module:attr`."""


class ModelConfig(_Plugin):
    """The network. Further keys belong to the model."""

    kind: str = "transformer"
    """`transformer`, `vision_transformer`, or a user's `module:attr`."""


class ParallelConfig(Section):
    """How the model and the batch are spread over processes."""

    strategy: Literal["fsdp", "ddp"] = "fsdp"
    """`fsdp`: parameters, gradients and optimizer state sharded (FSDP2); `ddp`: replicated. Both compute the same."""
    shard: Annotated[int, Field(ge=-1, le=MAX_INTEGER)] = -1
    """Processes that one copy of the state is sharded over; -1: all that `replicate` leaves."""
    replicate: Count = 1
    """Copies of the sharded state (hybrid sharding). `ddp` replicates over all processes whatever stands here."""
    reshard_after_forward: bool = True
    """Free the gathered parameters after the forward pass (ZeRO-3); false keeps them until the backward (ZeRO-2)."""


class PrecisionConfig(Section):
    """Number formats. The master weights are always fp32."""

    compute: Literal["fp32", "bf16"] = "fp32"
    """Format of the forward and backward pass; `bf16` casts weights and what enters the model or a block."""
    reduce: Literal["fp32", "bf16"] = "fp32"
    """Format in which gradients are summed over processes."""


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    kind: Literal["adamw"] = "adamw"
    """The optimizer."""
    learning_rate: Annotated[float, Field(gt=0.0)] = 1.0e-3
    """Peak learning rate."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.1
    """Decoupled weight decay; applied to matrices only, not to norms and biases."""
    beta1: Probability = 0.9
    """Decay of the first moment."""
    beta2: Probability = 0.95
    """Decay of the second moment."""
    epsilon: Annotated[float, Field(gt=0.0)] = 1.0e-8
    """Added to the denominator."""
    schedule: Literal["warmup_cosine", "constant"] = "warmup_cosine"
    """`warmup_cosine`: linear warm-up, then a half cosine down to `final_learning_rate_fraction`."""
    warmup_steps: Amount = 50
    """Steps of linear warm-up; at most all of them."""
    final_learning_rate_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1
    """Learning rate at the last step, as a fraction of the peak."""


class TrainConfig(Section):
    """How long and in what portions."""

    steps: Count = 400
    """Optimizer steps of the whole training."""
    global_batch_size: Count = 32
    """Samples per optimizer step over all processes: the truth from which the rest is derived."""
    micro_batch_size: Amount = 0
    """Samples per forward pass of one process; 0: its whole share. A smaller value accumulates gradients."""
    gradient_clip_norm: Annotated[float, Field(ge=0.0)] = 1.0
    """Gradients are scaled down to this global norm; 0: no clipping."""
    activation_checkpointing: Literal["none", "blocks"] = "none"
    """`blocks`: recompute each block in the backward pass instead of keeping its activations."""
    log_interval_steps: Count = 10
    """Steps between two recorded points of loss, learning rate and speed."""
    max_nonfinite_steps: Amount = 0
    """Steps with a non-finite gradient norm that may be skipped in a row before the run ends as diverged (19)."""


class CheckpointConfig(Section):
    """When state is saved and how much of it is kept."""

    interval_steps: Count = 100
    """Steps between checkpoints; the last step is always saved."""
    keep_last: Count = 2
    """Committed checkpoints that are kept."""
    asynchronous: bool = True
    """Write in the background while training goes on."""
    max_failed_saves: Amount = 3
    """Checkpoints in a row that may fail to be written (a full disk, a storage that is away) while training goes on;
    one more ends the attempt, to be tried again (138). The last one of a training must not fail."""
    timeout_seconds: Annotated[float, Field(gt=0)] = 3600.0
    """How long one checkpoint may take to be written. If it takes longer, storage hangs, and the attempt ends, to be
    tried again (138)."""


class EvaluateConfig(Section):
    """How the trained model is measured."""

    interval_steps: Amount = 200
    """Steps between quick evaluations on the first validation samples while training; 0: none."""
    max_interval_samples: Count = 256
    """Samples of a quick evaluation."""
    batch_size: Count = 32
    """Samples per forward pass.

    Batches are cut from the data, not from the number of processes: results are the same on any number.
    """
    num_bootstrap: Annotated[int, Field(ge=100, le=MAX_INTEGER)] = 1000
    """Resamples behind each confidence interval."""
    num_examples: Annotated[int, Field(ge=0, le=12)] = 6
    """Samples that reports show: so many spread over the data, so many of the largest loss; 0: nothing of the data."""
    cpu_threads: Count = 1
    """Threads of one process on a CPU; fixed, because the order of floating-point sums depends on it."""


class RegistryConfig(Section):
    """How a model is registered and when it becomes champion."""

    model_name: str = ""
    """Name of the registered model; empty: the run's name."""
    promotion: Literal["auto", "manual"] = "auto"
    """`auto`: a challenger that passes the gate becomes champion; `manual`: the gate only reports."""
    metric: str = "bits_per_byte"
    """The metric that the gate compares."""
    goal: Literal["minimize", "maximize"] = "minimize"
    """Which direction of the metric is better."""
    min_effect: Annotated[float, Field(ge=0.0)] = 0.0
    """The improvement must exceed this, in the metric's unit."""
    confidence: Annotated[float, Field(gt=0.5, lt=1.0)] = 0.95
    """Confidence of the two-sided interval that the gate looks at: 0.95 promotes an equal model at 2.5 % a try."""
    min_groups: Count = 20
    """With fewer groups (documents, images) in the validation split, a person decides, whatever `promotion` says."""
    trusted_kinds: tuple[str, ...] = ()
    """Kinds (`module:attr`) of a champion's model and task that may be built, beside those of this configuration."""
    trusted_roots: tuple[str, ...] = ()
    """Storage roots below which champions are read, beside `run.storage_root`."""

    def require_metric(self, known: Iterable[str]) -> None:
        """Raises ConfigError where the task has other metrics than the one that the gate is to compare.

        The metric is no part of what is trained, so a run goes on with another one from where it was.
        """
        names = sorted(known)
        if self.metric in names:
            return
        near = (difflib.get_close_matches(self.metric, names, n=1, cutoff=0.0) or ["METRIC"])[0]
        fix = f"known: {', '.join(names) or 'none'}; go on with --resume RUN --set registry.metric={near}"
        raise ConfigError("the task has no such metric", where="registry.metric", value=self.metric, fix=fix)


class LaunchConfig(Section):
    """Where training and evaluation jobs run."""

    backend: Literal["local", "pytorchjob"] = "local"
    """`local`: processes of this machine; `pytorchjob`: pods of the Kubeflow training operator."""
    kubernetes: KubernetesConfig = KubernetesConfig()
    """The pods of a job; the local backend has none."""
    nodes: Count = 1
    """Machines of one job."""
    processes_per_node: Literal["auto"] | Count = "auto"
    """Processes on each; `auto`: one per GPU, or 2 without any. A cluster's GPUs are `kubernetes.gpus_per_node`."""
    max_restarts_without_progress: Amount = 3
    """Attempts in a row that may fail without a new checkpoint before the job is given up."""
    timeout_seconds: Annotated[float, Field(gt=0)] = 600.0
    """How long a process may wait for another one in a collective operation; one that nobody on its node waits for may
    take twice as long between two. A hang ends the attempt."""

    @property
    def gpus_per_node(self) -> int:
        """GPUs that each machine must have; 0: those that it has are used."""
        return self.kubernetes.gpus_per_node if self.backend == "pytorchjob" else 0


class TrackingConfig(Section):
    """Where runs and models are recorded."""

    uri: str = "sqlite:///mlflow.db"
    """MLflow tracking URI: `sqlite:///…` or `http(s)://…`."""
    experiment: str = ""
    """Experiment name; empty: the run's name."""
    kubeflow_url: str = ""
    """Address of the Kubeflow UI, for a tag that leads from MLflow to a pipeline run; `kftrain submit` fills it in."""
    allow_credentials_over_http: bool = False
    """Send MLflow's password or token over plain http to another machine: only in a network of your own."""


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

    @model_validator(mode="after")
    def _check_across_sections(self) -> Config:
        if self.train.micro_batch_size > self.train.global_batch_size:
            raise ValueError(
                f"train.micro_batch_size ({self.train.micro_batch_size}) exceeds "
                f"train.global_batch_size ({self.train.global_batch_size})"
            )
        return self

    @property
    def model_name(self) -> str:
        """Name of the registered model."""
        return self.registry.model_name or self.run.name

    @property
    def experiment(self) -> str:
        """Name of the MLflow experiment."""
        return self.tracking.experiment or self.run.name

    def to_dict(self) -> dict[str, Any]:
        """Plain data: what is saved and shown."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """The resolved configuration as it is saved with every output."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False)

    def beyond_defaults(self) -> dict[str, Any]:
        """Only what differs from the defaults, as plain data: merged over them it is the whole again."""
        return layers.beyond(self.to_dict(), Config().to_dict())

    def digest(self) -> str:
        """Hex digest of everything in it."""
        return storage.digest_json(self.to_dict())

    def training_identity(self, dataset_digest: str) -> dict[str, Any]:
        """What makes two trainings the same one: a checkpoint resumes only under an equal identity.

        Launch, layout, tracking, checkpoint and evaluation settings are not in it: a run may go on with more processes.
        The shuffle window is in it, because the order of the samples follows from it. A window of
        `IMPLIED_SHUFFLE_WINDOW_SHARDS` is left out, so that runs from before it was part of this keep their digest.
        """
        everything = self.to_dict()
        window = self.data.shuffle_window_shards
        return {
            "dataset": dataset_digest,
            "seed": self.run.seed,
            **{section: everything[section] for section in ("task", "model", "precision", "optimizer")},
            "train": {k: everything["train"][k] for k in ("steps", "global_batch_size", "gradient_clip_norm")},
            **({} if window == IMPLIED_SHUFFLE_WINDOW_SHARDS else {"data.shuffle_window_shards": window}),
        }

    def training_digest(self, dataset_digest: str) -> str:
        """Hex digest of `training_identity`."""
        return storage.digest_json(self.training_identity(dataset_digest))

    def anchored(self, base: str | Path) -> Config:
        """The same with the storage roots and the path of an sqlite file made absolute against `base`."""
        changes: dict[str, Any] = {
            "run": self.run.model_copy(update={"storage_root": storage.absolute(self.run.storage_root, base)}),
            "registry": self.registry.model_copy(
                update={"trusted_roots": tuple(storage.absolute(root, base) for root in self.registry.trusted_roots)}
            ),
            "tracking": self.tracking.model_copy(update={"uri": _anchored_sqlite(self.tracking.uri, base)}),
        }
        return self.model_copy(update=changes)


def load(files: str | Path | Sequence[str] | None = None, overrides: Sequence[str] = ()) -> Config:
    """The configuration of one or several files (none: the defaults) with overrides like `train.steps=200`.

    A later file wins over an earlier one, key by key: a cluster's own settings stand in one, the training in another.
    Raises ConfigError that names the file, the key, the value and the fix.
    """
    chosen = [files] if isinstance(files, str | Path) else list(files or ())
    return _validated({str(file): layers.read(file) for file in chosen}, overrides)


def parse(
    text: str, overrides: Sequence[str] = (), where: str = "config", above: dict[str, layers.Document] | None = None
) -> Config:
    """The configuration in a YAML text, under further layers (where from -> values) and then the overrides.

    Raises ConfigError that names the key, the value and the fix.
    """
    return _validated({where: layers.parse(text, where), **(above or {})}, overrides)


def _validated(documents: dict[str, layers.Document], overrides: Sequence[str]) -> Config:
    merged: layers.Document = {}
    for document in documents.values():
        merged = layers.merged(merged, document)
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


def schema() -> dict[str, Any]:
    """JSON schema of the configuration."""
    return Config.model_json_schema()


def _explain(error: ValidationError, where: str) -> ConfigError:
    first = error.errors()[0]
    location = [str(part) for part in first["loc"]]
    key = ".".join(location)
    if first["type"] == "extra_forbidden":
        return ConfigError("unknown key", where=f"{where}: {key}", value=first["input"], fix=_nearest_key(location))
    message = first["msg"].removeprefix("Value error, ")
    shown = {} if not location else {"value": first["input"]}
    return ConfigError(message[0].lower() + message[1:], where=f"{where}: {key}".rstrip(": "), **shown)


def _nearest_key(location: list[str]) -> str:
    fields: Any = Config.model_fields
    for part in location[:-1]:
        fields = fields[part].annotation.model_fields
    known = list(fields)
    near = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.5)
    return f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(known)}"


def _anchored_sqlite(uri: str, base: str | Path) -> str:
    prefix = "sqlite:///"
    if not uri.startswith(prefix) or uri.startswith(prefix + "/"):
        return uri
    return prefix + storage.absolute(uri.removeprefix(prefix), base)
