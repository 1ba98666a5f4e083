"""The samples that a training reads, by which process. Nothing here imports torch: data workers read the same."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from kftrain.config import Config
from kftrain.core import storage
from kftrain.data.conversion import find_conversion
from kftrain.data.decoding import Decoding, Samples, wrap_decode
from kftrain.data.expanded import Gather, ValidationRows, expand_rows
from kftrain.data.loader import CountTerms, Send, TrainLoader
from kftrain.data.order import BatchPlan, Order
from kftrain.data.read_ahead import AheadPlan, StoredSamples, choose_steps_ahead
from kftrain.data.settings import DataConfig
from kftrain.data.shards.cache import NodeCache
from kftrain.data.shards.manifest import Manifest, shard_uri
from kftrain.data.shards.verified import Opened, Uses
from kftrain.data.training_split import open_training_split
from kftrain.data.tuning import FREE_SHARE, Kind, Limits, Tuning
from kftrain.data.validation import open_validation
from kftrain.data.worker_processes import WorkerCommand
from kftrain.process.machine import num_cpus, read_available_bytes
from kftrain.run.paths import RunPaths
from kftrain.tasks import build_task_of
from kftrain.tasks.base import Task
from kftrain.tasks.run_dataset import read_dataset
from kftrain.trust import require_places

FIRST, MOST = Tuning(2, 2, 1), Tuning(256, 16, 32)
"""Settings of a loader at first, and the most of each, where they are left to it."""

WORKER = (sys.executable, "-m", "kftrain.train.data_worker")
"""Command of a data worker's process."""

WORKER_BYTES = 300_000_000
"""Memory of such a process, roughly."""


@dataclass(frozen=True)
class Training:
    """A run's configuration, data and task: the same for every attempt."""

    paths: RunPaths
    config: Config
    manifest_uri: str
    manifest: Manifest
    identity: dict[str, Any]
    task: Task
    uses: Uses = field(default_factory=Uses)
    """Takes note of the shards that this process reads."""

    @property
    def digest(self) -> str:
        """Digest of the training identity."""
        return storage.digest_json(self.identity)


def read_training(paths: RunPaths, config: Config) -> Training:
    """Read what a run trains on. Raises DataError and ConfigError."""
    shards, manifest = read_dataset(paths, config.data)
    require_places(manifest, shards.manifest_uri, config)
    return Training(
        paths=paths,
        config=config,
        manifest_uri=shards.manifest_uri,
        manifest=manifest,
        identity=config.training_identity(shards.dataset_digest),
        task=build_task_of(config.task, shards.manifest_uri, manifest.task_settings),
    )


def open_training_samples(training: Training) -> tuple[StoredSamples, Order]:
    """Open the training split; return all of its samples, and the order in which they are read."""
    conversion = find_conversion(training.manifest, training.task)
    window, uses = training.task.window, training.uses
    return open_training_split(training.manifest_uri, training.manifest, training.config, window, uses, conversion)


def open_validation_rows(training: Training, gather: Gather, share: tuple[int, int]) -> ValidationRows:
    """Open the rows that periodic evaluations read; where there are none, nothing is expanded. Collective.

    `gather`, `share`: see `expand_rows`.
    """
    evaluate, conversion = training.config.evaluate, find_conversion(training.manifest, training.task)
    dataset = open_validation(training.manifest_uri, training.manifest, training.config, training.uses, conversion)
    if not evaluate.interval_steps:  # on all processes alike, since expanding is collective
        return dataset
    return expand_rows(dataset, training.task, gather, share, evaluate.max_interval_samples)


def choose_decoding(training: Training) -> Decoding | None:
    """Return the decoding of the samples; None where they are used as they are stored."""
    task, config = training.task, training.config
    if not task.decodes:
        return None
    return Decoding(wrap_decode(task), config.run.seed, config.data.max_bad_samples)


def open_loader(
    training: Training, num_ranks: int, rank: int, count_terms: CountTerms, send: Send | None = None
) -> TrainLoader:
    """Open the loader of one of `num_ranks` processes that read different samples. Raises DataError and ConfigError."""
    config = training.config
    samples, order = open_training_samples(training)
    plan = BatchPlan(config.train.global_batch_size, num_ranks, config.train.most_micro_rows)
    first, most = choose_tunings(config.data, training.task.decodes, count_usual_workers(config.data.worker_kind))
    limits = Limits(most, first.steps if first.steps == most.steps else 1, config.data.prefetch_bytes)
    # The worker opens the same samples and builds the same task from this: see `open_for_worker`.
    greeting = {"run": training.paths.uri, "config": config.to_dict()}
    command = WorkerCommand(WORKER, greeting, training.uses.note_opened)
    ahead, sizes = _plan_ahead(training, samples, plan), config.train.batch_sizes
    arguments = (count_terms, choose_decoding(training), command, send, limits, ahead, sizes)
    return TrainLoader(samples, order, plan, rank, first, *arguments)


def _plan_ahead(training: Training, samples: StoredSamples, plan: BatchPlan) -> AheadPlan | None:
    """Plan to fetch a window ahead; it and the next one may take half of this process's share of its node's cache.

    Returns None where no shard is remote, or nothing is kept.
    """
    data, cache = training.config.data, training.uses.cache
    split = training.manifest.splits["train"]
    if not cache.max_bytes or storage.is_local(shard_uri(training.manifest_uri, split.shards[0])):
        return None
    window_steps = data.shuffle_range_samples * data.shuffle_window_ranges // plan.global_batch_size
    step_samples = -(-plan.global_batch_size // plan.num_ranks)
    sample_bytes = split.column("bytes").sum() / samples.num_samples
    max_bytes = cache.max_bytes / (4 * int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return AheadPlan(samples.plan_fetches, choose_steps_ahead(window_steps, step_samples, sample_bytes, max_bytes))


def choose_tunings(data: DataConfig, decodes: bool, most_workers: int) -> tuple[Tuning, Tuning]:
    """Choose the settings that a loader begins with, and the most of each; one that is a number stays that.

    `most_workers`: where their number is left to the loader.
    """
    count = data.workers if decodes else 0  # only decoding is worth workers
    settings = {"steps": data.prefetch_batches, "workers": count, "requests": data.requests}
    fixed: dict[str, Any] = {name: setting for name, setting in settings.items() if setting != "auto"}
    readers = 1 if data.workers == "auto" else max(1, data.workers)  # each worker of a fixed number reads at once
    kinds: tuple[Kind, Kind] = ("threads", "threads")
    if count and data.worker_kind != "threads":
        kinds = "threads" if data.worker_kind == "auto" else "processes", "processes"
    first = Tuning(FIRST.steps, min(FIRST.workers, most_workers), readers, kinds[0])
    most = Tuning(MOST.steps, most_workers, max(readers, MOST.requests), kinds[1])
    return replace(first, **fixed), replace(most, **fixed)


def count_usual_workers(kind: str) -> int:
    """Count the workers that this process may take: one CPU is left to the process itself, and memory to all of them.

    Else workers that were ended for want of memory would be as many again after each restart.
    """
    num_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    fit = MOST.workers if kind == "threads" else FREE_SHARE * read_available_bytes() / num_processes // WORKER_BYTES
    return int(max(1, min(MOST.workers, num_cpus() // num_processes - 1, fit)))


def open_for_worker(paths: RunPaths, config: Config) -> tuple[Samples, Decoding, Callable[[], list[Any]]]:
    """Open a run's samples for a data worker; return them, their decoding, and what lists opened files.

    The last is a function: it returns the files that were opened since it was called before.
    """
    training = read_training(paths, config)
    opened = Opened(NodeCache.of_node(config.data.cache_dir, config.data.cache_bytes))
    training = replace(training, uses=opened)
    decoding = choose_decoding(training)
    assert decoding is not None, "a task that decodes nothing has no workers"
    return open_training_samples(training)[0], decoding, opened.take_new
