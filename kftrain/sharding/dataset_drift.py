"""Measures drift: how far the dataset of a run differs from the one before it. A run never fails because of it."""

from __future__ import annotations

from kftrain.config import Config
from kftrain.core import storage
from kftrain.core.progress import Progress
from kftrain.data.conversion import find_conversion
from kftrain.data.settings import NEW, REPLAYED
from kftrain.data.shards.manifest import Manifest, read_manifest
from kftrain.errors import ConfigError, DataError, KftrainError
from kftrain.run import documents
from kftrain.run.drift import Drift, DriftedDistribution, ProfiledDataset
from kftrain.run.paths import RunPaths
from kftrain.sharding.drift import Distribution, measure_change
from kftrain.sharding.profile import Profile, compute_mean_and_deviation, write_profile
from kftrain.sharding.shard_dataset import manifest_path
from kftrain.tasks import Task
from kftrain.tasks.run_dataset import find_manifest
from kftrain.trust import Trust

PREVIOUS, NONE = "previous", "none"


def measure_drift(
    config: Config, manifest_uri: str, manifest: Manifest, task: Task, progress: Progress
) -> Drift | None:
    """Measure the drift since the dataset that `data.drift.against` names; None if there is none, or it is unknown.

    An error becomes a warning in `progress`.
    """
    against = config.data.drift.against
    if against == NONE:
        return None
    try:
        drift = _compare_components(config, manifest_uri, manifest, task)
    except KftrainError as error:
        progress(f"warning: how far the data has drifted is not known: {error.line}")
        return None
    if drift is not None:
        progress(drift.line)
    return drift


def read_drift(paths: RunPaths) -> Drift | None:
    """Read the drift that a run has measured; None if it has measured none, or the document is damaged."""
    try:
        return documents.read_if_exists(Drift, paths.drift)
    except DataError:
        return None


def _compare_components(config: Config, manifest_uri: str, manifest: Manifest, task: Task) -> Drift | None:
    """Profile the dataset and compare it with the one before, component by component; None if nothing is compared."""
    drifts = []
    for name, now, before in _pair_datasets(config, manifest_uri, manifest):
        profile = _profile(config, now, task)  # also written if nothing is compared: the next dataset needs it
        if before is not None and before != now:
            own = drift_between(_profile(config, before, task), profile, before, now, config)
            drifts.append(own if not name else _prefix_names(own, name))
    return _merge_drifts(drifts) if drifts else None


def _prefix_names(drift: Drift, component: str) -> Drift:
    """Put the name of the component before the names of a drift's distributions."""
    named = [entry.model_copy(update={"name": f"{component}: {entry.name}"}) for entry in drift.distributions]
    return drift.model_copy(update={"distributions": named})


def _merge_drifts(drifts: list[Drift]) -> Drift:
    """Merge the drifts of all components: distributions by size of drift, largest first, and the sums of the sizes."""
    if len(drifts) == 1:
        return drifts[0]
    distributions = sorted((entry for drift in drifts for entry in drift.distributions), key=lambda entry: -entry.psi)
    sizes = {
        "before": _sum_sizes([drift.before for drift in drifts]),
        "now": _sum_sizes([drift.now for drift in drifts]),
    }
    return drifts[0].model_copy(update={**sizes, "distributions": distributions})


def _sum_sizes(datasets: list[ProfiledDataset]) -> ProfiledDataset:
    return ProfiledDataset(
        manifest_uri=", ".join(dataset.manifest_uri for dataset in datasets),
        num_records=sum(dataset.num_records for dataset in datasets),
        content_bytes=sum(dataset.content_bytes for dataset in datasets),
        num_samples=sum(dataset.num_samples for dataset in datasets),
    )


def drift_between(before: Profile, now: Profile, before_uri: str, now_uri: str, config: Config) -> Drift:
    """Compare the distributions that two profiles have in common, largest drift first. Pure."""
    settings = config.data.drift
    distributions = [
        _compare(name, before.distributions[name], now.distributions[name], config)
        for name in sorted(before.distributions.keys() & now.distributions.keys())
    ]
    drifted = [entry for entry in distributions if entry is not None]
    return Drift(
        before=_describe_dataset(before, before_uri),
        now=_describe_dataset(now, now_uri),
        some=settings.some,
        large=settings.large,
        distributions=sorted(drifted, key=lambda entry: -entry.psi),
    )


def _pair_datasets(config: Config, manifest_uri: str, manifest: Manifest) -> list[tuple[str, str, str | None]]:
    """Pair every dataset with the one to compare it with: name, manifest of now, manifest of before or None.

    The name is empty for a dataset of one source. The new part of a replay is compared with the replayed part. A
    component of any other mixture is compared with the dataset that it was appended to or, if `data.drift.against`
    names a mixture, with the component of the same name there.
    """
    root, against = config.run.storage_root, config.data.drift.against
    own = _components(root, manifest)
    named = "" if against == PREVIOUS else find_manifest(against)
    if named:
        Trust.of(config).require_place(named)
        theirs = _components(root, read_manifest(named))
    if named and bool(theirs) and (not own or own.keys() == {NEW, REPLAYED}):
        what = "a mixture, and this is a dataset of one source"
        raise ConfigError(what, where="data.drift.against", value=against, fix="name a dataset of one source")
    if not own or own.keys() == {NEW, REPLAYED}:
        parent = _manifest_uri(root, manifest.parent) if manifest.parent else None
        return [("", own.get(NEW, manifest_uri), named or own.get(REPLAYED, parent))]
    if named:
        return [(name, now, theirs.get(name)) for name, now in own.items()]
    parents = {name: read_manifest(now).parent for name, now in own.items()}
    return [(name, now, _manifest_uri(root, parents[name]) if parents[name] else None) for name, now in own.items()]


def _components(root: str, manifest: Manifest) -> dict[str, str]:
    """Return the components of a mixture: name -> manifest of its dataset."""
    return {component.name: _manifest_uri(root, component.dataset_digest) for component in manifest.components}


def _manifest_uri(root: str, dataset_digest: str) -> str:
    return storage.join(root, manifest_path(dataset_digest))


def _profile(config: Config, manifest_uri: str, task: Task) -> Profile:
    """Return the profile of a dataset; make it and write it beside the manifest if it is missing."""
    manifest = read_manifest(manifest_uri)
    return write_profile(manifest_uri, manifest, tuple(task.targets), find_conversion(manifest, task))


def _describe_dataset(profile: Profile, manifest_uri: str) -> ProfiledDataset:
    return ProfiledDataset(
        manifest_uri=manifest_uri,
        num_records=profile.num_records,
        content_bytes=profile.content_bytes,
        num_samples=profile.num_samples,
    )


def _compare(name: str, before: Distribution, now: Distribution, config: Config) -> DriftedDistribution | None:
    difference = measure_change(before, now)
    if difference is None:
        return None
    return DriftedDistribution(
        name=name,
        level=difference.level(config.data.drift.some, config.data.drift.large),
        before=compute_mean_and_deviation(before),
        now=compute_mean_and_deviation(now),
        **vars(difference),
    )
