"""Registering: an export becomes a version of a registered model, by reference.

    version "models:/<id>"  ──▶  LoggedModel: MLmodel, reference.json  ──▶  export in the storage root

No tensor goes through the tracking server and nothing is pickled; registering reads JSON. The same export registered
again, after a retry, a lost response or by two processes at once, is the same version; and so are the same weights of
another run, as of a recurring one on data that did not change. Of two versions made at the same time the lower stays:
versions are numbered in the order of their creation, so whoever made the higher one sees the lower.

Tags only lead to candidates: whether a version is the same is decided by its reference and its export's manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from kftrain import storage
from kftrain.config import Config
from kftrain.errors import EvaluationError, KftrainError
from kftrain.registry import lineage
from kftrain.registry.champion_alias import ChampionAlias
from kftrain.registry.package import ModelPackage
from kftrain.registry.reference import (
    DATASET_DIGEST_TAG,
    EVALUATION_DIGEST_TAG,
    EXPORT_DIGEST_TAG,
    FILE_NAME,
    TRAINING_DIGEST_TAG,
    Reference,
    require_export,
)
from kftrain.run.documents import Completion, Evaluation
from kftrain.run.paths import RunPaths
from kftrain.tracking import client, model_client, runs, session
from kftrain.tracking.model_client import ModelVersion
from kftrain.tracking.session import StoredModel
from kftrain.trust import Trust

CONTENT_DIGEST_TAG = "kftrain.content_digest"
"""Of a version: the digest of its export's files."""

MAX_OLD_CANDIDATES = 10
"""Of versions of an older kftrain, which have no such tag, so many are looked at, the newest."""

LOADER_MODULE = "kftrain.registry.pyfunc_loader"

MAX_DESCRIPTION_CHARACTERS = 5000
"""MLflow's limit for the description of a version."""

MEASURED = """

Measured under evaluation {}: compare figures with a version of the same evaluation only. On the same data, its run \
has the champion's as `evaluation/….champion` and the difference as `evaluation/….difference`."""
"""What follows a version's figures: those of another one may be of other data."""


@dataclass(frozen=True)
class RegisteredVersion:
    """A version of a registered model, and what it was made of."""

    model_name: str
    version: int
    logged_model_id: str
    mlflow_run_id: str
    """Of the run that registers."""
    export_uri: str
    export_digest: str
    identical: bool = False
    """The version is another run's, with the same weights: this run made none."""


def register(
    config: Config,
    paths: RunPaths,
    completion: Completion,
    evaluation: Evaluation,
    mlflow_run_id: str,
    package: Callable[[], ModelPackage] = ModelPackage,
) -> RegisteredVersion:
    """The version of a run's export, made if it is not there, with the evaluation's metrics. May be repeated.

    Where a version has the same weights already, it is that one, and nothing is made. `package`: what a new version
    carries besides the reference. Raises EvaluationError if the evaluation is of another export, TrackingError if the
    export is not there, the registered model belongs to another storage root, or MLflow fails.
    """
    require_same_export(completion, evaluation)
    require_export(completion.export_uri, completion.export_digest)
    uri, name = config.tracking.uri, config.model_name
    about = f"Trained by kftrain. The gate compares {config.registry.metric} ({config.registry.goal})."
    ChampionAlias.of(config).claim(about)
    reference = _reference(paths, completion, evaluation)
    own = _Own(uri, name, mlflow_run_id, paths.run_id, reference, Trust.of(config))
    found = own.find() or own.create(
        package(), _description(config, paths, completion, evaluation), runs.kind_tags(config)
    )
    if not found.identical:
        model_client.ensure_output(uri, mlflow_run_id, found.logged_model_id, completion.step)
        measured = {EVALUATION_DIGEST_TAG: evaluation.evaluation_digest}
        model_client.set_logged_model_tags(uri, found.logged_model_id, measured)
        metrics = {metric: interval.value for metric, interval in evaluation.metrics.items()}
        points = runs.evaluation_points(uri, mlflow_run_id, metrics)
        dataset = (runs.dataset_name(uri, mlflow_run_id), evaluation.dataset_digest)
        client.log_points(uri, mlflow_run_id, points, found.logged_model_id, dataset)
    return found


def require_same_export(completion: Completion, evaluation: Evaluation) -> None:
    """Raises EvaluationError if what was evaluated is not what the training completed with."""
    if evaluation.export_digest != completion.export_digest:
        what = f"the evaluation is of another export than {completion.export_digest[:16]}"
        value = evaluation.export_digest[:16]
        raise EvaluationError(what, where=completion.export_uri, value=value, fix="evaluate again")


def _reference(paths: RunPaths, completion: Completion, evaluation: Evaluation) -> Reference:
    return Reference(
        export_uri=completion.export_uri,
        export_digest=completion.export_digest,
        run_uri=paths.uri,
        checkpoint_digest=completion.checkpoint_digest,
        dataset_digest=completion.dataset_digest,
        training_digest=completion.training_digest,
        evaluation_digest=evaluation.evaluation_digest,
    )


def _description(config: Config, paths: RunPaths, completion: Completion, evaluation: Evaluation) -> str:
    """What people see beside the version's number."""
    metrics = ", ".join(f"{name} {found.value:.4g}" for name, found in evaluation.metrics.items())
    trained = f"{completion.step:,} steps, {completion.num_parameters:,} parameters"
    if chosen := completion.chosen(config.train.steps):
        trained = f"{trained} ({chosen})"
    return f"Run {paths.run_id}: {trained}; {metrics} on {evaluation.num_samples:,} validation samples."


@dataclass(frozen=True)
class _Own:
    """What is to be registered, and where."""

    uri: str
    name: str
    mlflow_run_id: str
    run_id: str
    reference: Reference
    trust: Trust

    def find(self) -> RegisteredVersion | None:
        """The lowest version of this very export; else the lowest with the same files."""
        return self._find_own() or self._find_identical()

    def create(self, package: ModelPackage, description: str, kind_tags: Mapping[str, str]) -> RegisteredVersion:
        """A new version; or a lower one, if another process made it at the same time."""
        tags = {
            runs.RUN_ID_TAG: self.run_id,
            CONTENT_DIGEST_TAG: self._content_digest(),
            DATASET_DIGEST_TAG: self.reference.dataset_digest,
            **kind_tags,
        }
        model_id = self._find_logged_model() or session.create_and_find(
            lambda: self._create_logged_model(package, kind_tags), self._find_logged_model
        )
        measured = MEASURED.format(self.reference.evaluation_digest[:12])
        room = MAX_DESCRIPTION_CHARACTERS - len(measured)
        shown = f"{package.card if 0 < len(package.card) <= room else description}{measured}"
        return session.create_and_find(
            lambda: model_client.create_version(self.uri, self.name, model_id, self.mlflow_run_id, tags, shown),
            self._find_first,
        )

    def _find_first(self) -> RegisteredVersion | None:
        """The lowest version of this export or of the same files; its own ones above it are deleted."""
        found = [version for version in (self._find_own(), self._find_identical()) if version is not None]
        first = min(found, key=lambda version: (version.version, version.identical), default=None)
        for own in self._own_versions():
            if first is not None and own.version > first.version:
                model_client.delete_version(self.uri, self.name, own.version)
        return first

    def _content_digest(self) -> str:
        return lineage.content_digest(self.reference.export_uri, self.reference.export_digest)

    def _find_own(self) -> RegisteredVersion | None:
        return next((self._registered(each, self.reference, False) for each in self._own_versions()), None)

    def _own_versions(self) -> Iterator[ModelVersion]:
        for version in model_client.search_versions(self.uri, self.name, run_id=self.mlflow_run_id):
            theirs = lineage.find(self.uri, version)
            if theirs is not None and theirs.export_digest == self.reference.export_digest:
                yield version

    def _find_identical(self) -> RegisteredVersion | None:
        content = self._content_digest()
        tagged = model_client.search_versions(self.uri, self.name, CONTENT_DIGEST_TAG, content)
        old = model_client.search_versions(self.uri, self.name, TRAINING_DIGEST_TAG, self.reference.training_digest)
        for version in [*tagged, *old[-MAX_OLD_CANDIDATES:]]:
            theirs = lineage.find(self.uri, version)
            if theirs is not None and _has_content(theirs, content, self.trust):
                is_own = theirs.export_digest == self.reference.export_digest
                return self._registered(version, theirs, identical=not is_own)
        return None

    def _find_logged_model(self) -> str | None:
        experiment_id = runs.require_run(self.uri, self.mlflow_run_id).experiment_id
        found = model_client.find_logged_model(self.uri, experiment_id, EXPORT_DIGEST_TAG, self.reference.export_digest)
        return found if found and lineage.of_model(self.uri, found) == self.reference else None

    def _create_logged_model(self, package: ModelPackage, kind_tags: Mapping[str, str]) -> str:
        return model_client.create_logged_model(
            self.uri,
            self.mlflow_run_id,
            self.run_id,
            {**self.reference.tags(), **runs.code_tags(), **kind_tags, runs.RUN_ID_TAG: self.run_id},
            package.params,
            loader_module=LOADER_MODULE,
            data=FILE_NAME,
            stored=StoredModel(
                {FILE_NAME: storage.dump_json(self.reference.to_dict()).encode(), **package.files()},
                package.input_example,
                package.answer_types,
            ),
        )

    def _registered(self, version: ModelVersion, reference: Reference, identical: bool) -> RegisteredVersion:
        return RegisteredVersion(
            model_name=self.name,
            version=version.version,
            logged_model_id=lineage.logged_model_id(version),
            mlflow_run_id=self.mlflow_run_id,
            export_uri=reference.export_uri,
            export_digest=reference.export_digest,
            identical=identical,
        )


def _has_content(reference: Reference, content: str, trust: Trust) -> bool:
    """Whether an export is there, as far as manifest and sizes tell, and consists of these files."""
    try:
        trust.require_place(reference.export_uri)
        require_export(reference.export_uri, reference.export_digest)
        return lineage.content_digest(reference.export_uri, reference.export_digest) == content
    except KftrainError as error:
        if error.retryable:  # storage is away, which says nothing about the export
            raise
        return False
