"""Drift: what has changed between the dataset of a run and the one before it. Nothing fails where it cannot be told."""

from __future__ import annotations

from kftrain import storage
from kftrain.config import Config
from kftrain.data.adopted.conversion import conversion_of
from kftrain.data.drift import Distribution, change
from kftrain.data.profile import Profile, mean_and_deviation, write_profile
from kftrain.data.settings import NEW, REPLAYED
from kftrain.data.sharding import below_root
from kftrain.data.shards.manifest import Manifest, read_manifest
from kftrain.errors import ConfigError, DataError, KftrainError
from kftrain.progress import Progress
from kftrain.run import documents
from kftrain.run.drift import Drift, DriftedDistribution, ProfiledDataset
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
        found = _compared(config, manifest_uri, manifest, task)
    except KftrainError as error:
        progress(f"warning: how far the data has drifted is not known: {error.line}")
        return None
    if found is not None:
        progress(found.line)
    return found


def read_drift(paths: RunPaths) -> Drift | None:
    """What has changed since the dataset before a run's; None where nobody has compared them, or it is damaged."""
    try:
        return documents.read_if_exists(Drift, paths.drift)
    except DataError:
        return None


def _compared(config: Config, manifest_uri: str, manifest: Manifest, task: Task) -> Drift | None:
    """The profiles are written also where nothing is compared: the next dataset is, with this one."""
    found = []
    for name, now, before in _pairs(config, manifest_uri, manifest):
        profile = _profile(config, now, task)
        if before is not None and before != now:
            own = drift_between(_profile(config, before, task), profile, before, now, config)
            found.append(own if not name else _named(own, name))
    return _together(found) if found else None


def _named(found: Drift, name: str) -> Drift:
    """That of a component, whose name its distributions have."""
    named = [each.model_copy(update={"name": f"{name}: {each.name}"}) for each in found.distributions]
    return found.model_copy(update={"distributions": named})


def _together(found: list[Drift]) -> Drift:
    """One of all components that are compared; sizes are those of all together."""
    if len(found) == 1:
        return found[0]
    distributions = sorted((each for one in found for each in one.distributions), key=lambda each: -each.psi)
    sizes = {"before": _summed([each.before for each in found]), "now": _summed([each.now for each in found])}
    return found[0].model_copy(update={**sizes, "distributions": distributions})


def _summed(sizes: list[ProfiledDataset]) -> ProfiledDataset:
    return ProfiledDataset(
        manifest_uri=", ".join(each.manifest_uri for each in sizes),
        num_records=sum(each.num_records for each in sizes),
        content_bytes=sum(each.content_bytes for each in sizes),
        num_samples=sum(each.num_samples for each in sizes),
    )


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


def _pairs(config: Config, manifest_uri: str, manifest: Manifest) -> list[tuple[str, str, str | None]]:
    """Of each dataset that is compared: its name, empty for the only one, and the manifests of now and of before.

    The new one of a replay is compared with what is seen again; a component of another mixture with the dataset that
    it was appended to, or with the component of its name.
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
        parent = _place(root, manifest.parent) if manifest.parent else None
        return [("", own.get(NEW, manifest_uri), named or own.get(REPLAYED, parent))]
    if named:
        return [(name, now, theirs.get(name)) for name, now in own.items()]
    parents = {name: read_manifest(now).parent for name, now in own.items()}
    return [(name, now, _place(root, parents[name]) if parents[name] else None) for name, now in own.items()]


def _components(root: str, manifest: Manifest) -> dict[str, str]:
    """Name of each component of a mixture, and the manifest of its dataset."""
    return {each.name: _place(root, each.dataset_digest) for each in manifest.components}


def _place(root: str, dataset_digest: str) -> str:
    return storage.join(root, below_root(dataset_digest))


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


def _distribution(name: str, before: Distribution, now: Distribution, config: Config) -> DriftedDistribution | None:
    found = change(before, now)
    if found is None:
        return None
    return DriftedDistribution(
        name=name,
        level=found.level(config.data.drift.some, config.data.drift.large),
        before=mean_and_deviation(before),
        now=mean_and_deviation(now),
        **vars(found),
    )
