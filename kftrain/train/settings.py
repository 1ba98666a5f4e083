"""The sections `train` and `optimizer`."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from kftrain.data.batch_sizes import BatchSizes
from kftrain.parallel.settings import CheckpointingMethod
from kftrain.settings.section import Amount, ChangesTraining, Count, Effect, KeepsTraining, Probability, Section, Value

SHORT_NAMES = {
    "cosine": "warmup_cosine",
    "linear": "warmup_linear",
    "wsd": "warmup_stable_decay",
    "inverse_sqrt": "warmup_inverse_sqrt",
}
"""Short name of a schedule -> its name."""

ChangesSince02 = Annotated[Value, Effect(changes_training=True, added="0.2")]
ChangesSince03 = Annotated[Value, Effect(changes_training=True, added="0.3")]
ChangesStart = Annotated[Value, Effect(changes_training=True, counted_as="initial_weights")]
"""Type of a key that the digest of the initial weights stands for in the training identity."""


class ParameterGroup(Section):
    """Parameters with settings of their own."""

    pattern: ChangesTraining[Annotated[str, Field(min_length=1)]]
    """Pattern of the parameters' names, such as `*.norm.*`: `*` stands for any text, `?` for one character. The first
    group whose pattern fits a parameter counts; a group that fits no parameter is refused."""
    learning_rate_scale: ChangesTraining[float] = 1.0
    """Factor on the learning rate of these parameters."""
    weight_decay: ChangesTraining[Annotated[float, Field(ge=0.0)] | None] = None
    """Weight decay of these parameters, vectors included; empty: as without the group."""
    frozen: ChangesTraining[bool] = False
    """Keep the initial values of these parameters."""
    muon: ChangesTraining[bool | None] = None
    """Update the matrices among these parameters with `muon`; empty: only those in the model's blocks."""

    @field_validator("learning_rate_scale")
    @classmethod
    def _is_positive(cls, value: float) -> float:
        if value <= 0:
            raise ValueError("it must be positive; parameters that are not to change are `frozen: true`")
        return value

    @model_validator(mode="after")
    def _is_frozen_or_not(self) -> ParameterGroup:
        if self.frozen and (self.learning_rate_scale, self.weight_decay, self.muon) != (1.0, None, None):
            raise ValueError("frozen parameters have no other settings")
        return self


class OptimizerConfig(Section):
    """The optimizer and its schedule."""

    kind: ChangesTraining[Literal["adamw", "sgd", "muon", "adafactor", "lamb"]] = "adamw"
    """The optimizer. `muon` updates the matrices of the model's blocks (no embeddings), and AdamW the rest."""
    learning_rate: ChangesTraining[Annotated[float, Field(gt=0.0)]] = 1.0e-3
    """Peak learning rate; for `adafactor` and `lamb` relative to the size of a parameter."""
    weight_decay: ChangesTraining[Annotated[float, Field(ge=0.0)]] = 0.1
    """Decoupled weight decay, applied to matrices, not to norms and biases. `sgd` adds it to the gradient, as torch
    does; 0.0001 is usual there."""
    beta1: ChangesTraining[Probability] = 0.9
    """Decay of AdamW's and LAMB's first moment."""
    beta2: ChangesTraining[Probability] = 0.95
    """Decay of AdamW's and LAMB's second moment."""
    epsilon: ChangesTraining[Annotated[float, Field(gt=0.0)]] = 1.0e-8
    """Added to AdamW's and LAMB's denominator."""
    state: ChangesSince03[Literal["fp32", "8bit"]] = "fp32"
    """Format of AdamW's moments. `8bit` keeps them in blocks of 256 bytes with a scale, a quarter of the memory; the
    numbers are near those of fp32, and depend on the layout."""
    momentum: ChangesSince02[Probability | None] = None
    """Momentum of `sgd` (empty: 0.9) and `muon` (empty: 0.95)."""
    nesterov: ChangesSince02[bool | None] = None
    """Nesterov momentum for `sgd` and `muon`; empty: on for `muon`, off for `sgd`."""
    muon_scale: ChangesSince02[Literal["match_rms_adamw", "original"] | None] = None
    """Size of the updates of `muon`. `match_rms_adamw` (or empty): as large as AdamW's, so that one learning rate
    serves both; `original`: orthogonal matrices, larger where there are more rows than columns."""
    schedule: ChangesTraining[
        Literal[
            "warmup_cosine",
            "warmup_linear",
            "warmup_constant",
            "warmup_stable_decay",
            "warmup_inverse_sqrt",
            "constant",
        ]
    ] = "warmup_cosine"
    """Learning rate after a linear warm-up. `warmup_cosine` (or `cosine`): a half cosine down to
    `final_learning_rate_fraction`; `warmup_linear` (`linear`): a line down to it; `warmup_constant`: the peak;
    `warmup_stable_decay` (`wsd`): the peak, then a line down over the last `decay_steps`; `warmup_inverse_sqrt`
    (`inverse_sqrt`): falling with the inverse square root of the step. `constant` has no warm-up."""
    warmup_steps: ChangesTraining[Amount] = 50
    """Steps of linear warm-up; a longer warm-up than the training is cut to it."""
    decay_steps: ChangesSince02[Count | None] = None
    """Final steps over which `warmup_stable_decay` falls; empty: a tenth of all steps."""
    final_learning_rate_fraction: ChangesTraining[Annotated[float, Field(ge=0.0, le=1.0)]] = 0.1
    """Learning rate at the last step, as a fraction of the peak."""
    scale_learning_rate: ChangesSince03[Literal["none", "linear", "square_root"]] = "none"
    """Scale the learning rate of each step with its global batch, relative to `reference_batch_size`: in proportion,
    as is usual for `sgd`, or with the square root, as is usual for `adamw`."""
    reference_batch_size: ChangesSince03[Count | None] = None
    """Global batch for which `learning_rate` is meant, with `scale_learning_rate`."""
    groups: ChangesSince02[tuple[ParameterGroup, ...]] = ()
    """Parameters with settings of their own, by the patterns of their names."""

    @field_validator("schedule", mode="before")
    @classmethod
    def _in_full(cls, value: Any) -> Any:
        return SHORT_NAMES.get(value, value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _has_momentum(self) -> OptimizerConfig:
        kinds = {"momentum": ("sgd", "muon"), "nesterov": ("sgd", "muon"), "muon_scale": ("muon",)}
        for name, having in kinds.items():
            if getattr(self, name) is not None and self.kind not in having:
                raise ValueError(f"{name} is of {' and '.join(having)}, not of {self.kind}")
        if self.kind != "muon" and any(group.muon is not None for group in self.groups):
            raise ValueError(f"muon in groups is of muon, not of {self.kind}")
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum")
        if self.state != "fp32" and self.kind != "adamw":
            raise ValueError(f"state {self.state} is of adamw, not of {self.kind}")
        if (self.scale_learning_rate == "none") != (self.reference_batch_size is None):
            raise ValueError("scale_learning_rate and reference_batch_size are set together")
        return self


SCRATCH, CHAMPION = "scratch", "champion"
"""Values of `train.from` beside a version and an export."""

_VERSION = re.compile(r"v?(\d{1,9})", re.ASCII)


class InitialWeights(Section):
    """The answer to `train.from`: filled in when the run is opened, so that every later attempt starts alike."""

    asked: KeepsTraining[str] = ""
    """Value of `train.from` that this answers; empty: not looked up yet."""
    origin: KeepsTraining[str] = ""
    """Description of the weights for people."""
    export_uri: KeepsTraining[str] = ""
    """URI of the export with the weights; empty: training starts from scratch."""
    export_digest: ChangesStart[str] = ""
    """Digest of that export."""


class BatchPhase(Section):
    """Steps whose batches are smaller than the final one."""

    steps: ChangesTraining[Count]
    """Number of steps."""
    batch_size: ChangesTraining[Count]
    """Samples of each step over all processes."""


class OuterConfig(Section):
    """The exchange between the islands of `parallel.islands`, and what is made of it."""

    steps: ChangesSince03[Count] = 100
    """Steps that an island takes alone between two exchanges; there is one after the last step of all, too."""
    num_fragments: ChangesSince03[Count] = 1
    """Parts of the parameters that are exchanged at different times, each every `steps` steps and after the last one.
    A part is whole parameters, so an exchange is at best so many times shorter."""
    optimizer: ChangesSince03[Literal["nesterov", "average"]] = "nesterov"
    """Optimizer of the outer parameters. `nesterov`: as in DiLoCo; `average`: the mean of the islands' parameters
    (local SGD)."""
    learning_rate: ChangesSince03[Annotated[float, Field(gt=0.0)]] = 0.7
    """Learning rate of `nesterov`; no schedule changes it."""
    momentum: ChangesSince03[Probability] = 0.9
    """Momentum of `nesterov`."""
    encoding: ChangesSince03[Literal["fp32", "bf16", "int8"]] = "fp32"
    """Form in which outer gradients travel. `bf16` is half of the bytes, `int8` a quarter; what a number has lost is
    added to it in the next exchange. Servers send the means back in the same form."""
    quorum: ChangesSince03[Amount] = 0
    """Islands that servers wait for before they send an update without the others, whose gradients come into the next
    one; 0: all of them. Islands then meet only where the run logs, evaluates and saves, and after the last step."""
    grace_seconds: ChangesSince03[Annotated[float, Field(ge=0.0)]] = 1.0
    """Seconds that an update waits for the others when the quorum is there."""
    max_rounds_ahead: ChangesSince03[Count] = 2
    """Exchanges that an island may be ahead of the slowest one, with `quorum`."""

    @model_validator(mode="after")
    def _refuse_what_contradicts(self) -> OuterConfig:
        if not self.quorum and (self.grace_seconds, self.max_rounds_ahead) != (1.0, 2):
            raise ValueError("grace_seconds and max_rounds_ahead are of a quorum, which waits for all at 0")
        if self.steps % self.num_fragments:
            raise ValueError(f"num_fragments must divide steps, {self.steps}: turns come between two steps")
        if self.optimizer == "average" and (self.learning_rate, self.momentum) != (0.7, 0.9):
            raise ValueError("learning_rate and momentum are of optimizer nesterov, not of average")
        return self


class TrainConfig(Section):
    """Length of the training, its batches, and the weights that it starts with."""

    steps: ChangesTraining[Count] = 400
    """Optimizer steps in the whole training."""
    start_from: ChangesStart[str] = Field(SCRATCH, alias="from")
    """Initial weights; the optimizer always starts anew. `scratch`; `champion` (the one at the moment when the run is
    opened, or scratch if there is none yet); a version of the registered model; or the URI of a run or an export."""
    initial_weights: InitialWeights = InitialWeights()
    """The answer to `from`, filled in when the run is opened."""
    global_batch_size: ChangesTraining[Count] = 32
    """Samples per optimizer step over all processes; the share of each process is derived from it."""
    batch_warmup: ChangesSince03[tuple[BatchPhase, ...]] = ()
    """Phases of smaller batches before those of `global_batch_size`, one after the other, each larger than the one
    before."""
    micro_batch_size: KeepsTraining[Amount | Literal["auto"]] = 0
    """Samples per forward pass of one process; 0: its whole share of the step. Smaller values accumulate gradients.
    `auto`: as many as fit into memory, found before the first step; not with an axis that splits the model."""
    average_decay: KeepsTraining[Probability] = 0.0
    """Decay per step of moving averages of the weights, such as 0.999; evaluation and export then take the averages in
    the place of the weights. 0: no averages. The weights that are trained are the same with and without."""
    average_start_steps: KeepsTraining[Amount] = 0
    """Steps before the averages begin; until then they are the weights themselves."""
    gradient_clip_norm: ChangesTraining[Annotated[float, Field(ge=0.0)]] = 1.0
    """Global norm that gradients are scaled down to; 0 disables clipping."""
    activation_checkpointing: KeepsTraining[Literal["none", CheckpointingMethod]] = "none"
    """Activations that blocks keep for the backward pass. `none`: all of them; `blocks`: their input, from which the
    rest is computed again; `selective`: also the results of attention and of two in three matrix products; `offload`:
    all, on the host."""
    checkpointed_blocks: KeepsTraining[Count | tuple[Amount | str, ...]] = 1
    """Blocks that `activation_checkpointing` is for: k for the first of every k blocks (1: all), or a list of numbers
    from 0 and patterns of names, such as `[0, model.layers.1?]`."""
    compile: KeepsTraining[bool] = False
    """Compile the blocks of the model with `torch.compile`. The first steps wait for it; later ones take less time and
    memory. It needs a compiler where the workers run, no axis that splits the model or its sequences, and blocks
    that are not computed again where attention stays within documents."""
    cuda_graphs: KeepsTraining[bool] = False
    """Let compiled blocks repeat recorded CUDA graphs: for small models, whose GPU waits for the host. On one GPU, with
    one micro batch in each step."""
    loss_chunk_tokens: KeepsTraining[Amount] = 0
    """Tokens whose logits are computed at a time, for the loss and for metrics, so that all logits are never there; 0:
    all at once. 256 suits a large vocabulary. The task must take logits in parts, and the model have an `output_layer`,
    as `language_modeling` and the built-in transformers do."""
    noise_scale: KeepsTraining[bool] = False
    """Log and track the gradient noise scale, in samples: under `ddp`, or on one process with several micro batches."""
    log_interval_steps: KeepsTraining[Count] = 10
    """Steps between two recorded points of loss, learning rate and speed."""
    stop_after_no_improvement: KeepsTraining[Amount] = 0
    """Periodic evaluations in a row without a better value of `checkpoint.keep_best` after which training ends; 0
    trains all steps. Learning-rate schedules always span all steps."""
    max_nonfinite_steps: KeepsTraining[Amount] = 0
    """Steps in a row with a non-finite gradient norm to skip before the run ends as diverged (19). In fp16 those that
    are skipped at `precision.loss_scale.minimum` count."""
    outer: OuterConfig = OuterConfig()
    """The exchange between islands."""
    command: ChangesSince03[tuple[str, ...]] = ()
    """A script for torchrun that trains in the place of kftrain's own loop, such as `[train.py, --epochs, "3"]` or
    `[-m, package.module]`. It reads KFTRAIN_DATASET and calls `kftrain.report`, `commit` and `complete`."""
    command_digest: ChangesSince03[str] = ""
    """Digest of the script's files, filled in when the run is opened; to be set where only the workers have them."""

    @field_validator("start_from", mode="before")
    @classmethod
    def _is_known(cls, value: Any) -> Any:
        text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
        if isinstance(text, str) and not (text in (SCRATCH, CHAMPION) or _VERSION.fullmatch(text) or "/" in text):
            raise ValueError("it is scratch, champion, a version as 3 or v3, or the URI of a run or of an export")
        return text

    @field_validator("command")
    @classmethod
    def _is_script(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        is_module = value[:1] == ("-m",) and len(value) > 1
        if value and not is_module and not value[0].endswith(".py"):
            raise ValueError("it begins with a Python file, or with -m and a module: kftrain starts the processes")
        return value

    @model_validator(mode="after")
    def _refuse_what_contradicts(self) -> TrainConfig:
        sizes = self.batch_sizes.sizes
        if sizes != sorted(set(sizes)):
            raise ValueError(f"batch_warmup must grow up to global_batch_size, got {', '.join(map(str, sizes))}")
        if self.average_start_steps and not self.average_decay:
            raise ValueError("average_start_steps is of averages: set average_decay, too")
        if self.checkpointed_blocks != 1 and self.activation_checkpointing == "none":
            raise ValueError("checkpointed_blocks is of activation_checkpointing: set that, too")
        if self.cuda_graphs and not self.compile:
            raise ValueError("cuda_graphs is of compiled blocks: set compile, too")
        if not self.checkpointed_blocks:
            raise ValueError("checkpointed_blocks is empty: set activation_checkpointing to none instead")
        return self

    @property
    def most_micro_rows(self) -> int:
        """The number `micro_batch_size`; 0 where it is not found yet."""
        return 0 if self.micro_batch_size == "auto" else self.micro_batch_size

    def starting_with(self, origin: str, export_uri: str = "", export_digest: str = "") -> TrainConfig:
        """Return a copy that records the answer to `from`; without an export, training starts from scratch."""
        weights = InitialWeights(
            asked=self.start_from, origin=origin, export_uri=export_uri, export_digest=export_digest
        )
        return self.model_copy(update={"initial_weights": weights})

    def without_weights(self) -> TrainConfig:
        """Return a copy whose `from` has not been looked up."""
        return self.model_copy(update={"initial_weights": InitialWeights()})

    @property
    def batch_sizes(self) -> BatchSizes:
        """The number of samples of each step."""
        return BatchSizes(self.global_batch_size, tuple((phase.steps, phase.batch_size) for phase in self.batch_warmup))

    @property
    def from_champion(self) -> bool:
        """True if training starts from the champion."""
        return self.start_from == CHAMPION

    @property
    def from_scratch(self) -> bool:
        """True if training starts with random weights."""
        return self.start_from == SCRATCH

    @property
    def from_version(self) -> int | None:
        """The version of the registered model that `from` names, or None."""
        match = _VERSION.fullmatch(self.start_from)
        return int(match[1]) if match else None
