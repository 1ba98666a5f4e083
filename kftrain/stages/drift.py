"""Drift: what has changed between the dataset of a run and the one before it. Nothing fails where it cannot be told."""

from __future__ import annotations

from kftrain import storage
from kftrain.config import Config
from kftrain.data.adopted.conversion import conversion_of
from kftrain.data.drift import DistributionChange, change
from kftrain.data.profile import Counted, Profile, mean_and_deviation, write_profile
from kftrain.data.settings import NEW, REPLAYED
from kftrain.data.sharding import below_root
from kftrain.data.shards.manifest import Manifest, read_manifest
from kftrain.errors import DataError, KftrainError
from kftrain.progress import Progress
from kftrain.run import documents
from kftrain.run.drift import Drift, DriftedDistribution, DriftShift, ProfiledDataset
from kftrain.run.paths import RunPaths
from kftrain.stages.dataset import find_manifest
from kftrain.tasks import Task
from kftrain.trust import Trust

PREVIOUS, NONE = "previous", "none"


def compared(config: Config, manifest_uri: str, manifest: Manifest, task: Task, progress: Progress) -> Drift | None:
    """What has changed since the dataset that `data.drift.against` names; None where there is none, or nobody can tell.

    What goes wrong is a line of `progress`.
    """
    against = config.data.drift.against
    if against == NONE:
        return None
    try:
        now, before = _pair(config, manifest_uri, manifest)
        if now is None:
            return None
        profile = _profile(config, now, task)  # also where nothing is compared: the next dataset is, with this one
        if before is None or before == now:
            return None
        found = drift_between(_profile(config, before, task), profile, before, now, config)
    except KftrainError as error:
        progress(f"warning: how far the data has drifted is not known: {error.line}")
        return None
    progress(found.line)
    return found


def read_drift(paths: RunPaths) -> Drift | None:
    """What has changed since the dataset before a run's; None where nobody has compared them, or it is damaged."""
    try:
        return documents.read(Drift, paths.drift) if storage.exists(paths.drift) else None
    except DataError:
        return None


def drift_between(before: Profile, now: Profile, before_uri: str, now_uri: str, config: Config) -> Drift:
    """What has changed between two datasets. Pure."""
    settings = config.data.drift
    distributions = [
        _distribution(name, before.distributions[name], now.distributions[name], config)
        for name in sorted(before.distributions.keys() & now.distributions.keys())
    ]
    found = [each for each in distributions if each is not None]
    return Drift(
        before=_profiled(before, before_uri),
        now=_profiled(now, now_uri),
        some=settings.some,
        large=settings.large,
        distributions=sorted(found, key=lambda each: -each.psi),
    )


def _pair(config: Config, manifest_uri: str, manifest: Manifest) -> tuple[str | None, str | None]:
    """URIs of the manifests of the new dataset and of the one to compare with."""
    root, against = config.run.storage_root, config.data.drift.against
    own = {each.name: storage.join(root, below_root(each.dataset_digest)) for each in manifest.components}
    if manifest.components and own.keys() != {NEW, REPLAYED}:
        return None, None
    now = own.get(NEW, manifest_uri)
    if against != PREVIOUS:
        found = find_manifest(against)
        Trust.of(config).require_place(found)
        return now, found
    if manifest.components:
        return now, own[REPLAYED]
    return now, storage.join(root, below_root(manifest.parent)) if manifest.parent else None


def _profile(config: Config, manifest_uri: str, task: Task) -> Profile:
    manifest = read_manifest(manifest_uri)
    return write_profile(manifest_uri, manifest, tuple(task.targets), conversion_of(manifest, task))


def _profiled(profile: Profile, manifest_uri: str) -> ProfiledDataset:
    return ProfiledDataset(
        manifest_uri=manifest_uri,
        num_records=profile.num_records,
        content_bytes=profile.content_bytes,
        num_samples=profile.num_samples,
    )


def _distribution(name: str, before: Counted, now: Counted, config: Config) -> DriftedDistribution | None:
    found: DistributionChange | None = change(before.distribution(), now.distribution())
    if found is None:
        return None
    figures = [mean_and_deviation(each) for each in (before, now)] if before.is_ordered else []
    return DriftedDistribution(
        name=name,
        psi=found.psi,
        js_distance=found.js_distance,
        chance_psi=found.chance_psi,
        num_bins=found.num_bins,
        level=found.level(config.data.drift.some, config.data.drift.large),
        shifts=[DriftShift(bin=each.bin, before=each.before, now=each.now) for each in found.shifts],
        before=figures[0] if figures else None,
        now=figures[1] if figures else None,
    )
