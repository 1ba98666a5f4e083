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

from kftrain.config import Config
from kftrain.core import storage
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
"""Tag of a version with the digest of its export's files alone (`lineage.read_content_digest`)."""

MAX_OLD_CANDIDATES = 10
"""Number of versions of an older kftrain, which lack that tag, that are searched for equal weights, newest first."""

LOADER_MODULE = "kftrain.registry.pyfunc_loader"

MAX_DESCRIPTION_CHARACTERS = 5000
"""MLflow's limit for the description of a version."""

MEASURED = """

Measured under evaluation {}: compare figures with a version of the same evaluation only. On the same data, its run \
has the champion's as `evaluation/….champion` and the difference as `evaluation/….difference`."""
"""Text after a version's figures in its description: those of another version may be of other data."""


@dataclass(frozen=True)
class RegisteredVersion:
    """A version of a registered model, and the export that it was made of."""

    model_name: str
    version: int
    logged_model_id: str
    mlflow_run_id: str
    """Id of the MLflow run that registers, which need not be the one that made the version."""
    export_uri: str
    export_digest: str
    identical: bool = False
    """True if another run registered the same weights before: the version is that run's, and this one made none."""


def register(
    config: Config,
    paths: RunPaths,
    completion: Completion,
    evaluation: Evaluation,
    mlflow_run_id: str,
    package: Callable[[], ModelPackage] = ModelPackage,
) -> RegisteredVersion:
    """Register a run's export as a version, with the evaluation's metrics, and return the version. May be repeated.

    If a version has the same weights already, that one is returned and nothing is made. `package`: makes what a new
    version carries besides the reference. Raises EvaluationError if the evaluation is of another export, TrackingError
    if the export is not there, the registered model belongs to another storage root, or MLflow fails.
    """
    require_same_export(completion, evaluation)
    require_export(completion.export_uri, completion.export_digest)
    uri, name = config.tracking.uri, config.model_name
    about = f"Trained by kftrain. The gate compares {config.registry.metric} ({config.registry.goal})."
    ChampionAlias.of(config).claim(about)
    reference = _make_reference(paths, completion, evaluation)
    pending = _PendingVersion(uri, name, mlflow_run_id, paths.run_id, reference, Trust.of(config))
    registered = pending.find() or pending.create(
        package(), _describe_run(config, paths, completion, evaluation), runs.make_kind_tags(config)
    )
    if not registered.identical:
        model_client.ensure_output(uri, mlflow_run_id, registered.logged_model_id, completion.step)
        tags = {EVALUATION_DIGEST_TAG: evaluation.evaluation_digest}
        model_client.set_logged_model_tags(uri, registered.logged_model_id, tags)
        metrics = {metric: interval.value for metric, interval in evaluation.metrics.items()}
        points = runs.make_evaluation_points(uri, mlflow_run_id, metrics)
        dataset = (runs.read_dataset_name(uri, mlflow_run_id), evaluation.dataset_digest)
        client.log_points(uri, mlflow_run_id, points, registered.logged_model_id, dataset)
    return registered


def require_same_export(completion: Completion, evaluation: Evaluation) -> None:
    """Raise EvaluationError unless the evaluated export is the one that the training completed with."""
    if evaluation.export_digest != completion.export_digest:
        what = f"the evaluation is of another export than {completion.export_digest[:16]}"
        value = evaluation.export_digest[:16]
        raise EvaluationError(what, where=completion.export_uri, value=value, fix="evaluate again")


def _make_reference(paths: RunPaths, completion: Completion, evaluation: Evaluation) -> Reference:
    return Reference(
        export_uri=completion.export_uri,
        export_digest=completion.export_digest,
        run_uri=paths.uri,
        checkpoint_digest=completion.checkpoint_digest,
        dataset_digest=completion.dataset_digest,
        training_digest=completion.training_digest,
        evaluation_digest=evaluation.evaluation_digest,
    )


def _describe_run(config: Config, paths: RunPaths, completion: Completion, evaluation: Evaluation) -> str:
    """Return the description of a version in one sentence, for people, if it has no model card."""
    metrics = ", ".join(f"{name} {interval.value:.4g}" for name, interval in evaluation.metrics.items())
    trained = f"{completion.step:,} steps, {completion.num_parameters:,} parameters"
    if chosen := completion.explain_choice(config.train.steps):
        trained = f"{trained} ({chosen})"
    return f"Run {paths.run_id}: {trained}; {metrics} on {evaluation.num_samples:,} validation samples."


@dataclass(frozen=True)
class _PendingVersion:
    """An export that is to become a version, with the registered model and the run that it belongs to."""

    uri: str
    name: str
    mlflow_run_id: str
    run_id: str
    reference: Reference
    trust: Trust

    def find(self) -> RegisteredVersion | None:
        """Return the lowest version of this very export, else the lowest with the same files, else None."""
        return self._find_own() or self._find_identical()

    def create(self, package: ModelPackage, description: str, kind_tags: Mapping[str, str]) -> RegisteredVersion:
        """Make a version and return it; or a lower one, if another process has made one at the same time."""
        tags = {
            runs.RUN_ID_TAG: self.run_id,
            CONTENT_DIGEST_TAG: self._content_digest(),
            DATASET_DIGEST_TAG: self.reference.dataset_digest,
            **kind_tags,
        }
        model_id = self._find_logged_model() or session.create_and_find(
            lambda: self._create_logged_model(package, kind_tags), self._find_logged_model
        )
        hint = MEASURED.format(self.reference.evaluation_digest[:12])
        room = MAX_DESCRIPTION_CHARACTERS - len(hint)
        text = f"{package.card if 0 < len(package.card) <= room else description}{hint}"
        return session.create_and_find(
            lambda: model_client.create_version(self.uri, self.name, model_id, self.mlflow_run_id, tags, text),
            self._find_first,
        )

    def _find_first(self) -> RegisteredVersion | None:
        """Return the lowest version of this export or of the same files, and delete this run's own ones above it."""
        candidates = [version for version in (self._find_own(), self._find_identical()) if version is not None]
        first = min(candidates, key=lambda version: (version.version, version.identical), default=None)
        # Safe with others at the same time: all keep the lowest, and numbers are given in the order of creation, so
        # that whoever made a higher version sees the lower one here. Versions of other runs are left to those.
        for own in self._search_own():
            if first is not None and own.version > first.version:
                model_client.delete_version(self.uri, self.name, own.version)
        return first

    def _content_digest(self) -> str:
        return lineage.read_content_digest(self.reference.export_uri, self.reference.export_digest)

    def _find_own(self) -> RegisteredVersion | None:
        return next((self._make_registered(version, self.reference, False) for version in self._search_own()), None)

    def _search_own(self) -> Iterator[ModelVersion]:
        for version in model_client.search_versions(self.uri, self.name, run_id=self.mlflow_run_id):
            theirs = lineage.find_reference(self.uri, version)
            if theirs is not None and theirs.export_digest == self.reference.export_digest:
                yield version

    def _find_identical(self) -> RegisteredVersion | None:
        content = self._content_digest()
        tagged = model_client.search_versions(self.uri, self.name, CONTENT_DIGEST_TAG, content)
        old = model_client.search_versions(self.uri, self.name, TRAINING_DIGEST_TAG, self.reference.training_digest)
        for version in [*tagged, *old[-MAX_OLD_CANDIDATES:]]:
            theirs = lineage.find_reference(self.uri, version)
            if theirs is not None and _has_content(theirs, content, self.trust):
                is_own = theirs.export_digest == self.reference.export_digest
                return self._make_registered(version, theirs, identical=not is_own)
        return None

    def _find_logged_model(self) -> str | None:
        experiment_id = runs.require_run(self.uri, self.mlflow_run_id).experiment_id
        model_id = model_client.find_logged_model(
            self.uri, experiment_id, self.mlflow_run_id, EXPORT_DIGEST_TAG, self.reference.export_digest
        )
        return model_id if model_id and lineage.find_model_reference(self.uri, model_id) == self.reference else None

    def _create_logged_model(self, package: ModelPackage, kind_tags: Mapping[str, str]) -> str:
        return model_client.create_logged_model(
            self.uri,
            self.mlflow_run_id,
            self.run_id,
            {**self.reference.tags(), **runs.make_code_tags(), **kind_tags, runs.RUN_ID_TAG: self.run_id},
            package.params,
            loader_module=LOADER_MODULE,
            data=FILE_NAME,
            stored=StoredModel(
                {FILE_NAME: storage.dump_json(self.reference.to_dict()).encode(), **package.files()},
                package.input_example,
                package.answer_types,
            ),
        )

    def _make_registered(self, version: ModelVersion, reference: Reference, identical: bool) -> RegisteredVersion:
        return RegisteredVersion(
            model_name=self.name,
            version=version.version,
            logged_model_id=lineage.parse_logged_model_id(version),
            mlflow_run_id=self.mlflow_run_id,
            export_uri=reference.export_uri,
            export_digest=reference.export_digest,
            identical=identical,
        )


def _has_content(reference: Reference, content: str, trust: Trust) -> bool:
    """Return True if an export is there, as far as manifest and sizes tell, and its files have this digest."""
    try:
        trust.require_place(reference.export_uri)
        require_export(reference.export_uri, reference.export_digest)
        return lineage.read_content_digest(reference.export_uri, reference.export_digest) == content
    except KftrainError as error:
        if error.retryable:  # storage is away, which says nothing about the export
            raise
        return False
