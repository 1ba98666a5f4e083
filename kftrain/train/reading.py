"""The samples that a training reads, by which process. Nothing here imports torch: data workers read the same."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kftrain.config import Config
from kftrain.core import storage
from kftrain.data.conversion import find_conversion
from kftrain.data.decoding import Decoding, Samples, wrap_decode
from kftrain.data.expanded import Gather, ValidationRows, expand_rows
from kftrain.data.loader import CountTerms, Send, TrainLoader, Workers
from kftrain.data.order import BatchPlan, Order
from kftrain.data.shards.cache import opened_of
from kftrain.data.shards.manifest import Manifest, read_manifest
from kftrain.data.shards.verified import Uses, note_opened
from kftrain.data.training_split import open_training_split
from kftrain.data.validation import open_validation
from kftrain.data.worker_processes import WorkerCommand
from kftrain.process.machine import num_cpus
from kftrain.run.paths import RunPaths
from kftrain.tasks import build_task_of
from kftrain.tasks.base import Task
from kftrain.trust import read_shards, require_places

MAX_WORKERS = 16
"""Most data workers of one process, unless the configuration asks for more."""

WORKER = "kftrain.train.data_worker"
"""Module that a data worker's process runs."""


@dataclass(frozen=True)
class Training:
    """A run's configuration, data and task: the same for every attempt."""

    paths: RunPaths
    config: Config
    manifest_uri: str
    manifest: Manifest
    identity: dict[str, Any]
    task: Task
    uses: Uses | None = None
    """Takes note of the shards that this process reads; None where nobody asks."""

    @property
    def digest(self) -> str:
        """Digest of the training identity."""
        return storage.digest_json(self.identity)


def read_training(paths: RunPaths, config: Config) -> Training:
    """Read what a run trains on. Raises DataError and ConfigError."""
    shards = read_shards(paths)
    manifest = read_manifest(shards.manifest_uri)
    require_places(manifest, shards.manifest_uri, config)
    return Training(
        paths=paths,
        config=config,
        manifest_uri=shards.manifest_uri,
        manifest=manifest,
        identity=config.training_identity(shards.dataset_digest),
        task=build_task_of(config.task, shards.manifest_uri, manifest.task_settings),
    )


def open_training_samples(training: Training) -> tuple[Samples, Order]:
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
    plan = BatchPlan(config.train.global_batch_size, num_ranks, config.train.micro_batch_size)
    prefetch, decoding = config.data.prefetch_batches, choose_decoding(training)
    return TrainLoader(samples, order, plan, rank, prefetch, count_terms, decoding, _choose_workers(training), send)


def _choose_workers(training: Training) -> Workers:
    data = training.config.data
    # "auto": only decoding is worth workers.
    count = data.workers
    if count == "auto":
        count = (
            count_usual_workers(num_cpus(), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
            if training.task.decodes
            else 0
        )
    # The worker opens the same samples and builds the same task from this: see `open_for_worker`.
    greeting = {"run": training.paths.uri, "config": training.config.to_dict()}
    if data.worker_kind == "threads":
        return Workers(count)
    opened = functools.partial(note_opened, training.uses)
    return Workers(count, WorkerCommand([sys.executable, "-m", WORKER], greeting, opened))


def count_usual_workers(num_cpus: int, num_processes: int) -> int:
    """Return the number of workers of each process that shares a machine: one CPU is left to each process itself."""
    return max(1, min(MAX_WORKERS, num_cpus // num_processes - 1))


def open_for_worker(paths: RunPaths, config: Config) -> tuple[Samples, Decoding, Callable[[], list[Any]]]:
    """Open a run's samples for a data worker; return them, their decoding, and what lists opened files.

    The last is a function: it returns the files that were opened since it was called before.
    """
    training = read_training(paths, config)
    opened = opened_of(config.data, training.manifest.dataset_digest)
    training = replace(training, uses=opened)
    decoding = choose_decoding(training)
    assert decoding is not None, "a task that decodes nothing has no workers"
    return open_training_samples(training)[0], decoding, opened.take_new
