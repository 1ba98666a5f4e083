"""Decides which evaluations may be compared: those of an equal evaluation digest. Imports no torch."""

from __future__ import annotations

from kftrain.config import Config
from kftrain.core import storage

FORMAT_VERSION = 1
"""Part of the digest: raise it when the same model and data would give other numbers."""

SPLIT = "validation"


def evaluation_digest(config: Config, dataset_digest: str) -> str:
    """Digest of everything that metrics depend on besides the model: data, split, task, batches, intervals."""
    return storage.digest_json(
        {
            "format": FORMAT_VERSION,
            "dataset": dataset_digest,
            "split": SPLIT,
            "task": config.task.model_dump(mode="json"),
            "batch_size": config.evaluate.batch_size,
            "num_bootstrap": config.evaluate.num_bootstrap,
            "cpu_threads": config.evaluate.cpu_threads,
            **({"metrics": list(config.evaluate.metrics)} if config.evaluate.metrics else {}),
        }
    )
