"""Turns a source into shards: once, reproducibly, and safely against being killed at any point.

    1. The listing of the source and all settings make the source digest. If `by-source/<it>.json` points to shards
       that still are what their manifest says, nothing is left to do.
    2. Otherwise each part of the source is looked for by the digest of its input, and encoded where it is missing, by
       several processes (parts/). A part is read once; memory holds one record and one block at a time. Whether the
       listing still is the same is looked at again and again: only then is a part found the next time.
    3. The manifest lists the shards of all parts in order. It is written last, under the dataset digest, then the
       pointer.

The pointers come after what they point to: a kill in between costs the parts that were being encoded, and what is made
of them again has the same bytes and digests. Neither the number of processes nor the size of shards moves a sample.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from operator import index
from typing import TYPE_CHECKING, Any

from kftrain.config import Config
from kftrain.core import storage
from kftrain.core.progress import Progress
from kftrain.data.assets import ASSETS, keep_assets, read_assets
from kftrain.data.schema import SPLITS, Record, Source, SourcePart
from kftrain.data.settings import CONTENT_KEY, DataConfig
from kftrain.data.shards import manifest as manifests
from kftrain.data.shards import verify
from kftrain.data.shards.manifest import MANIFEST_NAME, Manifest, Shard, Split
from kftrain.data.shards.staging import publish_folder, staging_folder
from kftrain.errors import DataError, KftrainError
from kftrain.process.machine import num_cpus
from kftrain.run.documents import PartShare
from kftrain.sharding.adopted.adopting import adopt
from kftrain.sharding.clusters import name_cluster
from kftrain.sharding.parts import findings, pool
from kftrain.sharding.parts.baselines import measure_baselines
from kftrain.sharding.parts.document import PartDocument, add_statistics
from kftrain.sharding.parts.encoder import Encoding
from kftrain.sharding.parts.share import count_processes, make_first_message, share_parts
from kftrain.sharding.parts.store import THREADS, Level, PartStore
from kftrain.sharding.sources import resolve_source
from kftrain.sharding.sources.keyed import KeyedSource
from kftrain.sharding.sources.listing import digest_listing
from kftrain.sharding.sources.windowed import TIMES_FOLDER
from kftrain.sharding.unchanged import note_written, require_unchanged

if TYPE_CHECKING:
    from kftrain.tasks.base import EncodingTask

LISTING_SHARE = 0.05
"""Share of the time that may go into looking whether the source is unchanged."""


@dataclass(frozen=True)
class ShardingResult:
    """Result of `shard_dataset`: where the manifest lies, and whether anything was written."""

    manifest_uri: str
    dataset_digest: str
    reused: bool
    """True if unchanged shards were found."""
    manifest: Manifest
    seconds: float
    listings: Mapping[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Source -> its listing, where the window begins at a watermark."""


RunJob = Callable[[Config, Sequence[PartShare]], str]
"""Function that lets a job encode shares of the parts; returns the folder of what leads to them."""


def shard_dataset(
    config: Config, task: EncodingTask, progress: Progress, run_job: RunJob | None = None
) -> ShardingResult:
    """Shard the configuration's source under its task, or find its shards unchanged. `progress` gets lines to show.

    Afterwards the task encodes as the dataset is encoded. `run_job`: starts the job of `data.shard_pods`; None: all
    is encoded here.

    Raises DataError (bad, empty or changing source), ConfigError (no such source), UserCodeError or RetryableError (the
    disk is full, or a process was killed).
    """
    start = time.monotonic()
    is_adopted = config.data.shards == "adopt"
    if config.data.shard_pods > 1 and (is_adopted or task.built_from != config.task):
        progress("data.shard_pods is not used: the shards are there, or the task is not made from the configuration")
        run_job = None
    if is_adopted:
        adopted = adopt(config, task, progress)
        digest = adopted.manifest.dataset_digest
        return ShardingResult(adopted.manifest_uri, digest, adopted.reused, adopted.manifest, time.monotonic() - start)
    sharding = _Sharding(config, task, progress, run_job)
    root = config.run.storage_root
    pointer = storage.join(root, "shards", "by-source", f"{sharding.source_digest()}.json")
    manifest, level = _find(root, pointer, sharding.state, config.data.rehash, progress)
    reused = manifest is not None
    if manifest is None:
        with storage.explain_disk_errors(storage.join(root, "shards")):
            manifest = sharding.run(level)
            digest = manifest.dataset_digest
            note_written(storage.join(root, manifest_path(digest)), manifest, sharding.reused)
            if config.data.stratify:
                storage.publish_json(strata_uri(root, sharding.data), {"strata": sharding.source.strata})
            storage.publish_json(sharding.latest_uri(), {"dataset_digest": digest})
            target = {"dataset_digest": digest, "manifest_uri": manifest_path(digest), "state": sharding.state}
            storage.publish_json(pointer, target)
    elif task.asset_names:
        task.restore(read_assets(root, manifest.task_settings))
    uri = storage.join(root, manifest_path(manifest.dataset_digest))
    listings = {config.data.source: sharding.listing} if config.data.window.watermark else {}
    return ShardingResult(uri, manifest.dataset_digest, reused, manifest, time.monotonic() - start, listings)


def manifest_path(dataset_digest: str) -> str:
    """Return the path of a dataset's manifest below the storage root."""
    return f"shards/{dataset_digest}/{MANIFEST_NAME}"


def _find(root: str, pointer: str, state: str, rehash: bool, progress: Progress) -> tuple[Manifest | None, Level]:
    """Find the manifest that the pointer leads to, if all is unchanged, and how far parts may be reused."""
    level: Level = "sha256" if rehash else "size"
    try:
        target = storage.read_json_if_exists(pointer)
        if target is None:
            return None, level
        if "state" in target and target["state"] != state:
            progress("files of the source may hold something else, at the same size and time: looking at them again")
            return None, "replaced"
        uri = storage.join(root, manifest_path(target["dataset_digest"]))
        manifest = manifests.read_manifest(uri)
        require_unchanged(uri, manifest, rehash, progress)
        read_assets(root, manifest.task_settings)
        if "state" not in target:  # of a release before
            storage.publish_json(pointer, {**target, "state": state})
    except (DataError, ValueError, KeyError, TypeError) as error:  # not where storage is away: they may be as they were
        progress(f"the shards of this source cannot be used again ({error}); sharding again")
        return None, "sha256"
    progress(f"the source is unchanged: using the shards at {uri.rsplit('/', 1)[0]}")
    return manifest, "size"


class _Sharding:
    """Sharding of a source, up to the published manifest."""

    def __init__(self, config: Config, task: EncodingTask, progress: Progress, run_job: RunJob | None) -> None:
        self._config = config
        self._run_job = run_job if config.data.shard_pods > 1 else None
        self._task = task
        self._kind = resolve_source.source_kind(config.data, progress)
        self._root = config.run.storage_root
        self._shards_uri = storage.join(self._root, "shards")
        times_uri = storage.join(self._shards_uri, TIMES_FOLDER)
        source = resolve_source.open_kind(self._kind, config.data, times_uri)
        self._progress = progress
        self.listing = source.listing()
        self._listing_digest, self.state = digest_listing(self.listing)
        self._encoding = Encoding.of(config.data, config.task.kind, task)
        self._settings = self._collect_settings()
        if not storage.exists(self.latest_uri()):  # else a release before has begun it, by numbers
            data = resolve_source.with_content_keys(config.data, self._kind)
            self._config = config.model_copy(update={"data": data})
            self._settings = self._collect_settings()
        self.data = self._config.data
        self.reused: set[str] = set()
        """Digests of parts that were there."""
        self.source = KeyedSource(source, self.data)

    def _collect_settings(self) -> dict[str, Any]:
        """Return all that decides the shards but the listing and the length of parts."""
        data = self._config.data
        return {
            "format_version": manifests.FORMAT_VERSION,
            "source": data.source,
            "text_field": data.text_field,
            "shard_size_bytes": data.shard_size_bytes,
            "validation_fraction": data.validation_fraction,
            **data.columns,
            "task": {
                "kind": self._config.task.kind,
                "settings": self._encoding.settings,
                "schemas": self._encoding.dump_schemas(),
            },
        }

    def source_digest(self) -> str:
        """Return the digest of all that decides the shards, as far as it is known without reading the source."""
        data = self._config.data
        # The window itself is not in it: what lies in it is listed. How it is chosen decides where parts end.
        chosen = {"window": [data.window.by, data.window.column]} if data.window.is_set else {}
        known = {**self._settings, "part_size_bytes": data.part_size_bytes, "listing": self._listing_digest, **chosen}
        return storage.digest_json(known)

    def latest_uri(self) -> str:
        """Return the URI of what leads to the last dataset of this source and settings, whatever the source held."""
        return storage.join(self._shards_uri, "latest", f"{storage.digest_json(self._settings)}.json")

    def run(self, level: Level) -> Manifest:
        """Read, encode, write and publish; return the manifest that is then in the store."""
        self._progress(f"sharding {self._config.data.source}")
        self.source.learn_strata(read_strata(self._root, self._config.data, self.latest_uri()))
        self._parts = parts = self.source.parts(self._config.data.part_size_bytes)
        self._learn(parts)
        store = PartStore(self._shards_uri, self._encoding, level)
        documents = self._encode_parts(store, parts)
        manifest = self._build_manifest(store, documents)
        uri = storage.join(self._config.run.storage_root, manifest_path(manifest.dataset_digest))
        manifest = manifest.model_copy(update={"baselines": measure_baselines(self._encoding, uri, manifest)})
        self._refuse_changed_source()
        folder_uri = uri.rsplit("/", 1)[0]
        with staging_folder(self._shards_uri) as folder:
            manifests.publish_manifest(str(folder / MANIFEST_NAME), manifest)
            publish_folder(folder, folder_uri, MANIFEST_NAME, verify.has_its_shards)
        self._progress(f"shards written to {folder_uri}")
        return manifests.read_manifest(uri)

    def _learn(self, parts: list[SourcePart]) -> None:
        """Let the task learn what encoding needs to know, or restore it from the dataset before this one; keep it."""
        with self._encoding.run_task_code():
            known = self._read_latest_assets() if self._task.asset_names else {}
            if known:
                self._task.restore(known)
            else:
                self._task.learn(iterate_training_records(self._config, self._task, self.source, parts))
            keep_assets(self._root, self._task.assets())
        self._encoding = Encoding.of(self._config.data, self._config.task.kind, self._task)

    def _read_latest_assets(self) -> dict[str, bytes]:
        """Return the files of the last dataset of this source, so that what is added is encoded as what there was."""
        try:
            latest = self._read_latest()
            if not latest:
                return {}
            manifest = manifests.read_manifest(storage.join(self._root, manifest_path(latest["dataset_digest"])))
            return read_assets(self._root, manifest.task_settings)
        except (DataError, ValueError, KeyError, TypeError) as error:
            self._progress(f"what the dataset before was encoded with cannot be used again ({error})")
            return {}

    def _encode_parts(self, store: PartStore, parts: list[SourcePart]) -> list[PartDocument]:
        """Encode all parts, and return the document of each."""
        settings = {**self._collect_settings(), **({"strata": self.source.strata} if self.source.strata else {})}
        inputs = [storage.digest_json({**settings, "part": part.identity()}) for part in parts]
        encoded: dict[int, PartDocument] = {}
        written: list[int] = []
        look_at = time.monotonic()
        for number, document, reused in self._iterate_documents(store, parts, inputs):
            encoded[number] = document
            written += [] if reused else [number]
            self.reused |= {document.part_digest} if reused else set()
            if len(parts) > 1:
                self._progress(_describe_part(document, len(encoded), len(parts), reused))
            if time.monotonic() >= look_at:
                look_at = self._keep(store, inputs, written, encoded)
        self._keep(store, inputs, written, encoded)
        return [encoded[number] for number in range(len(parts))]

    def _iterate_documents(
        self, store: PartStore, parts: list[SourcePart], inputs: list[str]
    ) -> Iterator[tuple[int, PartDocument, bool]]:
        """Yield number, document and reuse of each part as it is done; the largest ones are begun first."""
        order = sorted(range(len(parts)), key=lambda number: -parts[number].size_bytes)
        jobs = {number: {**vars(parts[number]), "input_digest": inputs[number]} for number in order}
        if self._run_job is not None:
            for known, reused in self._find_on_pods(self._run_job, store, jobs):
                yield from ((number, document, reused) for number, document in known.items())
                jobs = {number: job for number, job in jobs.items() if number not in known}
        num_processes = 1
        if self._task.built_from == self._config.task:  # else another process cannot build it
            sizes = [job["size_bytes"] for job in jobs.values()]
            num_processes = count_processes(sizes, self._config.data.processes, num_cpus())
        if num_processes == 1:
            shown = self._progress if len(parts) == 1 else lambda line: None
            for number in sorted(jobs):
                yield number, *store.obtain(self.source, parts[number], inputs[number], shown)
            return
        share, numbers = self._make_share(store, jobs.values()), list(jobs)
        for place, answer in pool.map_jobs(share.jobs, make_first_message(self._config, share), num_processes):
            yield numbers[place], PartDocument.model_validate(answer["document"]), answer["reused"]

    def _find_on_pods(
        self, run_job: RunJob, store: PartStore, jobs: Mapping[int, Any]
    ) -> Iterator[tuple[dict[int, PartDocument], bool]]:
        """Yield the parts that are there; then those that pods have encoded, unless too little is missing for two."""
        known = store.find_all(jobs)
        yield known, True
        left = {number: job for number, job in jobs.items() if number not in known}
        num_pods = count_processes([job["size_bytes"] for job in left.values()], 0, self._config.data.shard_pods)
        if num_pods > 1:
            shares = [self._make_share(store, share) for share in share_parts(list(left.values()), num_pods)]
            try:
                pending = run_job(self._config, shares)
            except KftrainError:
                self._refuse_changed_source()
                raise
            yield replace(store, pending=pending).find_all(left), False

    def _make_share(self, store: PartStore, jobs: Iterable[dict[str, Any]]) -> PartShare:
        return PartShare(
            kind=self._kind,
            assets=self._encoding.settings.get(ASSETS, {}),
            strata=self.source.strata,
            level=store.level,
            jobs=list(jobs),
        )

    def _keep(self, store: PartStore, inputs: list[str], written: list[int], encoded: dict[int, PartDocument]) -> float:
        """Let the parts that are written be found again, if the source is unchanged; return when to look next."""
        start = time.monotonic()
        # Looked at after the parts were read: a pointer may only lead to bytes of the listing that names it.
        if written:
            self._refuse_changed_source()
        seconds = time.monotonic() - start
        pointers = [(inputs[number], encoded[number].part_digest, self._parts[number].state) for number in written]
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(lambda pointer: store.keep(*pointer), pointers))
        written.clear()
        return time.monotonic() + seconds / LISTING_SHARE

    def _build_manifest(self, store: PartStore, documents: list[PartDocument]) -> Manifest:
        splits = {
            split: [shard for document in documents for shard in document.locate_shards(split)] for split in SPLITS
        }
        for split, shards in splits.items():
            if not shards:
                raise resolve_source.make_empty_split_error(split, self._config.data, self.source.largest_stratum)
        noticed = findings.find_flaws(documents, store.uri)
        for line in findings.describe_findings(noticed):
            self._progress(f"found {line}")
        schema, validation = (self._encoding.schemas[split] for split in SPLITS)
        own = validation if validation != schema else None
        digest = manifests.content_digest(schema, self._encoding.settings, splits, validation_schema=own)
        latest = str(self._read_latest().get("dataset_digest", ""))
        return Manifest(
            dataset_digest=digest,
            sample_schema=schema,
            validation_schema=own,
            task_kind=self._config.task.kind,
            task_settings=self._encoding.settings,
            splits={name: Split(shards=shards) for name, shards in splits.items()},
            source=self._config.data.source,
            source_listing_digest=self._listing_digest,
            baselines={},
            parent="" if latest == digest else latest,
            findings=noticed,
            statistics=add_statistics(documents),
        )

    def _read_latest(self) -> dict[str, Any]:
        """Read what leads to the last dataset of this source; empty where there is none, or nobody knows."""
        try:
            return dict(storage.read_json_if_exists(self.latest_uri()) or {})
        except (DataError, ValueError, TypeError):
            return {}

    def _refuse_changed_source(self) -> None:
        if digest_listing(self.source.listing())[0] != self._listing_digest:
            raise DataError(
                "the source changed while it was read, or does not give the same records twice",
                where=self._config.data.source,
                fix="run again when nobody writes to it",
            )


def strata_uri(storage_root: str, data: DataConfig) -> str:
    """Return the URI of the thresholds of a source's strata; it depends on nothing but what decides a record's side."""
    known = {"source": data.source, "validation_fraction": data.validation_fraction, **data.columns}
    content = {"text_field": data.text_field} if data.key == CONTENT_KEY else {}
    return storage.join(storage_root, "shards", "strata", f"{storage.digest_json({**known, **content})}.json")


def read_strata(storage_root: str, data: DataConfig, latest_uri: str = "") -> dict[str, int]:
    """Read the thresholds of a source's first sharding. Raises DataError where they cannot be read.

    `latest_uri`: what leads to its last dataset; before thresholds had a file they stood there.
    """
    for uri in filter(None, (strata_uri(storage_root, data), latest_uri)) if data.stratify else ():
        try:
            if (document := storage.read_json_if_exists(uri)) is not None:
                strata = {name: index(limit) for name, limit in document["strata"].items()}
                if strata:  # every sharding has learned some
                    return strata
                raise ValueError("none")
        except (DataError, ValueError, KeyError, TypeError, AttributeError) as error:
            fix = "restore the file, or set another data.validation_fraction to split anew"
            raise DataError("the thresholds of data.stratify cannot be read", where=uri, fix=fix) from error
    return {}


def iterate_training_records(
    config: Config, task: EncodingTask, source: Source, parts: list[SourcePart]
) -> Iterator[Record]:
    """Yield the records of some parts that are in the training split, in order."""
    for record in (record for part in parts for record in source.read(part)):
        if resolve_source.choose_split(record, config.data.validation_fraction, name_cluster(task, record)) == "train":
            yield record


def _describe_part(document: PartDocument, number: int, num_parts: int, reused: bool) -> str:
    shards: list[Shard] = [shard for split in SPLITS for shard in document.splits[split]]
    counts = f"{sum(s.num_samples for s in shards):,} samples, {sum(s.bytes for s in shards):,} bytes"
    return f"part {number} of {num_parts}: {counts}{' (was there)' if reused else ''}"
