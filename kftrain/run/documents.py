"""What the stages hand to each other: small JSON documents; where each of them lies says `run.paths`.

A document is read with `read`, which refuses another schema version and missing fields, so that a stage never works on
a file that it misunderstands.
"""

from __future__ import annotations

import math
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_serializer, field_validator

from kftrain import storage
from kftrain.errors import DataError, KftrainError
from kftrain.run.paths import RunPaths
from kftrain.run.selection import BestEvaluation, in_words

SCHEMA_VERSION = 1


class DocumentPart(BaseModel):
    """A part of a document, without fields that nobody knows."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Document(DocumentPart):
    """A JSON file that one stage writes and another reads."""

    schema_version: int = SCHEMA_VERSION

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as `storage.publish_json` writes it."""
        return self.model_dump(mode="json")


class RunShards(Document):
    """`shards.json`: the dataset of a run."""

    manifest_uri: str
    dataset_digest: str


class Completion(Document):
    """`COMPLETE.json`: the only proof that a training succeeded; written after the export, agreed on by all ranks."""

    run_id: str
    step: int
    samples_consumed: int
    attempt: int
    world_size: int
    checkpoint_uri: str
    checkpoint_digest: str
    export_uri: str
    export_digest: str
    dataset_digest: str
    training_digest: str
    num_parameters: int
    metrics: dict[str, float]
    """Last values of what training recorded: `loss`, `learning_rate`, `samples_per_second` …"""
    seconds: float
    """Wall time of the last attempt."""
    loss_unit: str = ""
    """As the task names it; completions of before do not say."""
    num_training_samples: int = 0
    """Samples of an epoch; completions of before do not say, and theirs are the rows of the training split."""
    selection: BestEvaluation | None = None
    """Why it is this step: the best evaluation; None: it is the last one. Where the checkpoint of the best one was
    damaged, its step is another one than `step`."""
    trained_steps: int = 0
    """Steps that were taken, more than `step` where that is the best one; 0: as many as `step`."""
    packages: dict[str, str] = {}
    """Distribution -> version, of those that the model needs: what a server of it installs. Completions of before do
    not say."""

    @property
    def num_trained(self) -> int:
        """Steps that were taken."""
        return self.trained_steps or self.step

    @property
    def is_best(self) -> bool:
        """Whether it is the checkpoint of the best evaluation."""
        return self.selection is not None and self.selection.step == self.step

    def chosen(self, num_steps: int) -> str:
        """Why it is the checkpoint of this step, of so many that were planned; empty: it is the last one."""
        return in_words(self.selection, self.num_trained, num_steps, self.step) if self.selection else ""


class Interval(DocumentPart):
    """A metric with its bootstrap confidence interval. A bound that is not known is infinite, and null in JSON."""

    value: float
    low: float
    high: float
    num_needed: int = Field(default=0, exclude=True)
    """So many groups a difference as skewed as this needs; 0: it has them. Not kept."""

    @field_validator("low", "high", mode="before")
    @classmethod
    def _read_bound(cls, bound: Any, info: ValidationInfo) -> Any:
        return bound if bound is not None else -math.inf if info.field_name == "low" else math.inf

    @field_serializer("low", "high", when_used="json")
    def _write_bound(self, bound: float) -> float | None:
        return bound if math.isfinite(bound) else None


class Slice(DocumentPart):
    """The metrics of a named part of the data."""

    num_samples: int
    metrics: dict[str, float]
    intervals: dict[str, Interval] = {}
    """Of the same metrics, from the resamples of the whole; evaluations of before have none."""


class Example(DocumentPart):
    """A group (document, image) of the validation split, as a report shows it."""

    key: str
    is_worst: bool
    """Chosen for its large loss; otherwise for its place in the data."""
    metrics: dict[str, float] = {}
    shown: dict[str, str] = {}
    """What the task says of its first row: the input, the prediction …"""
    names: list[str] = []
    """Of what is shown, in the order of the task: JSON keeps that of a mapping no more than we do."""
    picture: str = ""
    """A PNG in base64."""


class Confusion(DocumentPart):
    """Counts of true class (row) against predicted class (column)."""

    labels: list[str]
    matrix: list[list[int]]


class CalibrationBin(DocumentPart):
    """The samples whose prediction had a confidence within two bounds."""

    low: float
    high: float
    num_samples: int
    confidence: float
    """Their mean confidence."""
    accuracy: float


class Calibration(DocumentPart):
    """How far confidence and accuracy lie apart."""

    error: float
    """Expected calibration error: the mean distance over all samples."""
    bins: list[CalibrationBin]


class Curve(DocumentPart):
    """A curve over all thresholds for one class against the others."""

    kind: Literal["roc", "precision_recall"]
    """(false positive rate, true positive rate), or (recall, precision)."""
    label: str
    points: list[tuple[float, float]]
    """From the highest threshold down, thinned."""
    area: float
    """Under the curve as it was before; of `precision_recall` the average precision."""


class ClassFigures(DocumentPart):
    """What is told of one class. None where it is not determined."""

    label: str
    num_samples: int
    precision: float | None = None
    recall: float | None = None
    f1: float | None = None
    roc_auc: float | None = None
    average_precision: float | None = None


class Evaluation(Document):
    """`metrics.json`: how good one export is on the validation split; the same for any number of processes."""

    evaluation_digest: str
    """Digest of data, split, task and evaluation settings: two evaluations compare only if it is equal."""
    checkpoint_digest: str
    export_uri: str
    export_digest: str
    dataset_digest: str
    num_samples: int
    num_groups: int
    """Independent units (documents, images, or clusters of them that the task names) that the bootstrap resamples."""
    confidence: float
    metrics: dict[str, Interval]
    slices: dict[str, Slice] = {}
    baselines: dict[str, dict[str, float]] = {}
    """What the metric must be read against: metric name -> baseline name -> value."""
    confusion: Confusion | None = None
    figures: dict[str, float] = {}
    """Of the whole split, without an interval: `calibration_error`, `roc_auc`, `macro_f1` …"""
    calibration: Calibration | None = None
    curves: list[Curve] = []
    classes: list[ClassFigures] = []
    examples: list[Example] = []
    """Sample predictions: some spread over the data, then those with the largest loss."""
    statistics_sha256: str
    """Digest of `statistics.npz` beside this file: per-group sums, from which any paired comparison can be computed."""
    slices_sha256: str = ""
    """Digest of `slices.npz`: the same for each slice; empty where there are none, and in evaluations of before."""


class Spread(DocumentPart):
    """What was measured several times: the median, and between what the most of it lies."""

    median: float
    low: float
    """5th percentile."""
    high: float
    """95th percentile."""


class Performance(Document):
    """`performance.json` beside `metrics.json`: what the export costs. Other than the metrics it differs every time."""

    export_digest: str
    export_bytes: int
    """Of the files of the export."""
    device: str
    cpu_threads: int
    num_passes: int
    batch_size: int
    latency_seconds: Spread
    """Of a forward pass with one sample."""
    batch_latency_seconds: Spread
    """Of one with `batch_size` samples."""
    memory_bytes: Spread | None = None
    """Peak of such a pass: tensors on a GPU, the whole process on a CPU; None where that could not be told."""


class GateReason(DocumentPart):
    """One thing that the gate looked at, and what it said."""

    code: str
    """What it is, for programs: `better`, `worse`, `slice_worse` … (docs/gate.md lists them)."""
    verdict: Literal["for", "against", "person"]
    """Whether it speaks for a promotion, or against it, or leaves it to a person."""
    text: str
    """For people."""
    figures: dict[str, float] = {}
    """What it was decided by: `value`, `low`, `high`, `limit` …; what is not known is left out."""


class Registration(Document):
    """`registration.json`: the registered version and what the gate decided."""

    run_id: str
    model_name: str
    version: int
    logged_model_id: str
    mlflow_run_id: str
    tracking_uri: str
    promoted: bool
    reason: str
    """One sentence: why it became champion, or why not."""
    reasons: list[GateReason] = []
    """The same as data, all that the gate looked at; registrations of before have none."""
    awaits_person: bool = False
    """Nothing speaks against it, but a person decides: it has the alias `challenger` until then."""
    num_tries: int = 0
    """Which try against this champion it was; 0: none was counted."""
    confidence: float = 0.0
    """Of the interval of `improvement`; 0: as `registry.confidence`."""
    metric: str
    goal: str
    challenger: Interval
    champion_version: int | None = None
    """The champion that it was compared with; None where there was none."""
    former_champion: bool = False
    """`champion_version` is the last of the former champions that can be compared with; there is none now."""
    identical: bool = False
    """The same weights were registered before, as `version`: this run made no version."""
    champion: Interval | None = None
    improvement: Interval | None = None
    """Paired difference, positive is better; None without a champion."""


class ReferenceSet(Document):
    """`evaluation/reference.json`: the reference set as it was when the run was evaluated."""

    manifest_uri: str
    dataset_digest: str
    evaluation_digest: str


class EvaluationTarget(DocumentPart):
    """One export to score, and where its metrics go."""

    export_uri: str
    export_digest: str
    checkpoint_digest: str
    output_uri: str
    """Folder of `metrics.json` and `statistics.npz`."""
    manifest_uri: str = ""
    """The dataset whose validation split it is scored on; empty: the run's."""
    evaluation_digest: str = ""
    """Of this target; empty: that of the request."""
    required: bool = True
    """False: where the export cannot be loaded, `Unmeasured` says why, and the job goes on without it."""


class Unmeasured(Document):
    """`evaluation/unmeasured.json`: why the champion could not be scored beside the run's own model."""

    evaluation_digest: str
    export_digest: str
    """Of the champion."""
    reason: str


class EvaluationRequest(Document):
    """`evaluation/request.json`: what one evaluation job scores, in order."""

    evaluation_digest: str
    targets: list[EvaluationTarget]


DocumentType = TypeVar("DocumentType", bound=Document)


def read(kind: type[DocumentType], uri: str, error: type[KftrainError] = DataError) -> DocumentType:
    """The document at `uri`. Raises `error` where it is missing, damaged or of another schema version."""
    return parse(kind, read_content(uri, error), uri, error)


def read_if_exists(kind: type[DocumentType], uri: str, error: type[KftrainError] = DataError) -> DocumentType | None:
    """`read`, or None where there is none: others may remove it at any time. Raises `error` where it is damaged."""
    try:
        content = storage.read_bytes(uri)
    except FileNotFoundError:
        return None
    return parse(kind, content, uri, error)


def read_content(uri: str, error: type[KftrainError] = DataError) -> bytes:
    """The bytes of a document, for `parse`. Raises `error` where it is missing."""
    try:
        return storage.read_bytes(uri)
    except FileNotFoundError as cause:
        name = uri.rsplit("/", 1)[-1]
        raise error(f"{name} is missing", where=uri, fix="run the stage that writes it first") from cause


def parse(kind: type[DocumentType], content: bytes, uri: str, error: type[KftrainError] = DataError) -> DocumentType:
    """The document that was read from `uri`. Raises `error` where it is damaged or of another schema version."""
    name = uri.rsplit("/", 1)[-1]
    document = storage.decode_json(content, uri, error)
    try:
        if isinstance(document, dict) and (version := document.get("schema_version")) != SCHEMA_VERSION:
            raise error(f"{name} has another schema version", where=uri, value=version, fix=f"need {SCHEMA_VERSION}")
        return kind.model_validate(document)
    except ValidationError as cause:
        first = cause.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise error(
            f"{name} is damaged: {key}: {first['msg']}", where=uri, fix="run the stage that writes it again"
        ) from cause


def to_be_scored(paths: RunPaths, request: EvaluationRequest) -> list[EvaluationTarget]:
    """The targets of an evaluation that must have metrics in the end: all but one that cannot be loaded."""
    try:
        found = read(Unmeasured, paths.unmeasured)
    except DataError:
        return request.targets
    given_up = found.export_digest if found.evaluation_digest == request.evaluation_digest else ""
    return [target for target in request.targets if target.required or target.export_digest != given_up]
