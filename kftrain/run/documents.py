"""Small JSON documents that the stages hand to each other, and how they are read; `run.paths` says where they lie.

A document is read with `read`, which refuses another schema version and missing fields, so that a stage never works on
a file that it misunderstands.
"""

from __future__ import annotations

import math
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_serializer, field_validator

from kftrain.core import storage
from kftrain.errors import DataError, KftrainError
from kftrain.run.paths import RunPaths
from kftrain.run.selection import BestEvaluation, describe_choice

SCHEMA_VERSION = 1


class DocumentPart(BaseModel):
    """A part of a document. It is frozen, and a field that it does not know is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Document(DocumentPart):
    """A JSON file that one stage writes and another reads."""

    schema_version: int = SCHEMA_VERSION

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as `storage.publish_json` writes it."""
        return self.model_dump(mode="json")


class RunShards(Document):
    """`shards.json`: the dataset of a run, by the URI of its manifest and by its digest."""

    manifest_uri: str
    dataset_digest: str
    manifest_sha256: str = ""
    """Digest of a manifest with pages when the whole was looked at; else empty, and left out as releases before do."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as `Document.to_dict`."""
        return {name: value for name, value in super().to_dict().items() if value}


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
    """Wall time of the last attempt, in seconds."""
    loss_unit: str = ""
    """Unit of the loss as the task names it; empty in older completions, which do not say."""
    num_training_samples: int = 0
    """Samples of an epoch; 0 in older completions, whose samples are the rows of the training split."""
    selection: BestEvaluation | None = None
    """The evaluation that chose this step, or None for the final step. Its own step differs from `step` where the
    checkpoint of the best evaluation was damaged."""
    trained_steps: int = 0
    """Steps that the training took, more than `step` where an earlier one was best; 0: as many as `step`."""
    packages: dict[str, str] = {}
    """Distribution -> version, of those that the model needs: a server of it installs them. Empty in older
    completions."""

    @property
    def num_trained(self) -> int:
        """Number of steps that the training took, also where an earlier one was chosen."""
        return self.trained_steps or self.step

    @property
    def is_best(self) -> bool:
        """True where the checkpoint is that of the best evaluation."""
        return self.selection is not None and self.selection.step == self.step

    def explain_choice(self, num_steps: int) -> str:
        """Say in words why the checkpoint is that of this step; empty where it is the last one.

        `num_steps`: steps that were planned.
        """
        return describe_choice(self.selection, self.num_trained, num_steps, self.step) if self.selection else ""


class Interval(DocumentPart):
    """A metric with its bootstrap confidence interval. A bound that is not known is infinite, and null in JSON."""

    value: float
    low: float
    high: float
    num_needed: int = Field(default=0, exclude=True)
    """Groups that a difference as skewed as this one needs; 0: it has them. Never written to storage."""

    @field_validator("low", "high", mode="before")
    @classmethod
    def _read_bound(cls, bound: Any, info: ValidationInfo) -> Any:
        return bound if bound is not None else -math.inf if info.field_name == "low" else math.inf

    @field_serializer("low", "high", when_used="json")
    def _write_bound(self, bound: float) -> float | None:
        return bound if math.isfinite(bound) else None


class Slice(DocumentPart):
    """The metrics of a named part of the data, such as all samples of one class."""

    num_samples: int
    metrics: dict[str, float]
    intervals: dict[str, Interval] = {}
    """Name of a metric above -> its interval, from the resamples of the whole; empty in older evaluations."""


class Example(DocumentPart):
    """A group (document, image) of the validation split, as a report shows it."""

    key: str
    is_worst: bool
    """True where it was chosen for its large loss, False where for its place in the data."""
    metrics: dict[str, float] = {}
    shown: dict[str, str] = {}
    """Name -> text that the task shows of the first row: the input, the prediction …"""
    names: list[str] = []
    """Names in `shown`, in the order of the task, because the order of a mapping is lost in JSON."""
    picture: str = ""
    """A PNG image in base64; empty where the task draws none."""


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
    """Mean confidence of these samples; `accuracy` is the share of them that was right."""
    accuracy: float


class Calibration(DocumentPart):
    """The distance between confidence and accuracy, over all samples and bin by bin."""

    error: float
    """Expected calibration error: the mean distance over all samples."""
    bins: list[CalibrationBin]


class Curve(DocumentPart):
    """A curve over all thresholds for one class against the others."""

    kind: Literal["roc", "precision_recall"]
    """(false positive rate, true positive rate), or (recall, precision)."""
    label: str
    points: list[tuple[float, float]]
    """Points of the curve, thinned, from the highest threshold down."""
    area: float
    """Area under the curve before it was thinned; of `precision_recall` the average precision."""


class ClassFigures(DocumentPart):
    """The figures of one class; one that its samples do not determine is None."""

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
    """Metric name -> baseline name -> value that the metric must be read against."""
    confusion: Confusion | None = None
    figures: dict[str, float] = {}
    """Figures of the whole split that have no interval: `calibration_error`, `roc_auc`, `macro_f1` …"""
    calibration: Calibration | None = None
    curves: list[Curve] = []
    classes: list[ClassFigures] = []
    examples: list[Example] = []
    """Sample predictions: some spread over the data, then those with the largest loss."""
    statistics_sha256: str
    """Digest of `statistics.npz` beside this file: per-group sums, from which any paired comparison can be computed."""
    slices_sha256: str = ""
    """Digest of `slices.npz`, the same sums for each slice; empty where there are none, and in older evaluations."""


class Spread(DocumentPart):
    """A quantity that was measured several times: its median, and the range that holds nine tenths of the values."""

    median: float
    low: float
    """The 5th percentile of the values."""
    high: float
    """The 95th percentile of the values."""


class Performance(Document):
    """`performance.json` beside `metrics.json`: the costs of a pass of the export. They differ every time."""

    export_digest: str
    export_bytes: int
    """Size of all files of the export."""
    device: str
    cpu_threads: int
    num_passes: int
    batch_size: int
    latency_seconds: Spread
    """Seconds of a forward pass with one sample."""
    batch_latency_seconds: Spread
    """Seconds of a forward pass with `batch_size` samples."""
    memory_bytes: Spread | None = None
    """Peak during such a pass: tensors on a GPU, the whole process on a CPU; None where it could not be measured."""


class GateReason(DocumentPart):
    """A thing that the gate looked at, and its verdict."""

    code: str
    """Name of the thing, for programs: `better`, `worse`, `slice_worse` … (docs/gate.md lists them)."""
    verdict: Literal["for", "against", "person"]
    """`for` or `against` a promotion; `person` leaves the decision to somebody."""
    text: str
    """The same in a sentence, for people."""
    figures: dict[str, float] = {}
    """Numbers behind the verdict: `value`, `low`, `high`, `limit` …; one that is not known is left out."""


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
    """A sentence that says why it became champion, or why not."""
    reasons: list[GateReason] = []
    """The figures that the gate looked at, as data; empty in older registrations."""
    awaits_person: bool = False
    """True where nothing speaks against it but a person decides; it has the alias `challenger` until then."""
    num_tries: int = 0
    """Number of this try among those against this champion; 0: none was counted."""
    confidence: float = 0.0
    """Confidence of the interval of `improvement`; 0: as `registry.confidence`."""
    metric: str
    goal: str
    challenger: Interval
    champion_version: int | None = None
    """Version that it was compared with; None where there was no champion."""
    former_champion: bool = False
    """True where there is no champion now, and `champion_version` is the last former one that can be compared with."""
    identical: bool = False
    """True where the same weights were registered before, as `version`: this run made no version."""
    champion: Interval | None = None
    improvement: Interval | None = None
    """Paired difference, positive is better; None without a champion."""


class ReferenceSet(Document):
    """`evaluation/reference.json`: the reference set as it was when the run was evaluated."""

    manifest_uri: str
    dataset_digest: str
    evaluation_digest: str


class EvaluationTarget(DocumentPart):
    """An export to score, and the place of its metrics."""

    export_uri: str
    export_digest: str
    checkpoint_digest: str
    output_uri: str
    """Folder that gets `metrics.json` and `statistics.npz`."""
    manifest_uri: str = ""
    """Manifest of the dataset whose validation split it is scored on; empty: the run's."""
    evaluation_digest: str = ""
    """Digest of this target's evaluation; empty: that of the request."""
    required: bool = True
    """False: where the export cannot be loaded, `Unmeasured` says why, and the job goes on without it."""


class Unmeasured(Document):
    """`evaluation/unmeasured.json`: why the champion could not be scored beside the run's own model."""

    evaluation_digest: str
    export_digest: str
    """Digest of the champion's export."""
    reason: str


class EvaluationRequest(Document):
    """`evaluation/request.json`: the exports that one evaluation job scores, in order."""

    evaluation_digest: str
    targets: list[EvaluationTarget]


class MicroBatchChoice(Document):
    """`micro_batch.json`: the micro batch that was found for `train.micro_batch_size: auto`."""

    rows: int
    layout: str
    """Digest of what the answer depends on: in another layout it is looked for again."""


class PartShare(Document):
    """`sharding/<config digest>/<rank>.json`: parts of a source that one process encodes, and what it needs for it."""

    kind: str
    """Kind of the source, so that nobody has to look again."""
    assets: dict[str, Any]
    strata: dict[str, int]
    level: Literal["sha256", "size", "replaced"]
    jobs: list[dict[str, Any]]
    """The parts, each with its input digest: what a process that encodes is told."""

    @property
    def digest(self) -> str:
        """Digest by which a process knows its share: 128 bits, as a job names those of all."""
        return storage.digest_json(self.to_dict())[:32]


SHARES_ENV = "KFTRAIN_SHARES"
"""Variable with the digests of a sharding job's shares, by rank: no process reads what anybody else tells it to."""


DocumentType = TypeVar("DocumentType", bound=Document)


def read(kind: type[DocumentType], uri: str, error: type[KftrainError] = DataError) -> DocumentType:
    """Read the document at `uri`. Raises `error` where it is missing, damaged or of another schema version."""
    return parse_document(kind, read_content(uri, error), uri, error)


def read_if_exists(kind: type[DocumentType], uri: str, error: type[KftrainError] = DataError) -> DocumentType | None:
    """Read a document that others may remove at any time; None where there is none. Raises `error` if damaged."""
    try:
        content = storage.read_bytes(uri)
    except FileNotFoundError:
        return None
    return parse_document(kind, content, uri, error)


def read_content(uri: str, error: type[KftrainError] = DataError) -> bytes:
    """Read the bytes of a document, for `parse`. Raises `error` where it is missing."""
    try:
        return storage.read_bytes(uri)
    except FileNotFoundError as cause:
        name = uri.rsplit("/", 1)[-1]
        raise error(f"{name} is missing", where=uri, fix="run the stage that writes it first") from cause


def parse_document(
    kind: type[DocumentType], content: bytes, uri: str, error: type[KftrainError] = DataError
) -> DocumentType:
    """Parse the bytes that were read from `uri`. Raises `error` where they are damaged or of another schema version."""
    return validate(kind, storage.decode_json(content, uri, error), uri, error)


def validate(kind: type[DocumentType], document: Any, uri: str, error: type[KftrainError] = DataError) -> DocumentType:
    """Make a document of the JSON that was read from `uri`. Raises `error` as `parse` does."""
    name = uri.rsplit("/", 1)[-1]
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


def list_targets_to_score(paths: RunPaths, request: EvaluationRequest) -> list[EvaluationTarget]:
    """List the targets that must have metrics in the end: all but an optional one that could not be loaded."""
    try:
        unmeasured = read(Unmeasured, paths.unmeasured)
    except DataError:
        return request.targets
    given_up = unmeasured.export_digest if unmeasured.evaluation_digest == request.evaluation_digest else ""
    return [target for target in request.targets if target.required or target.export_digest != given_up]
