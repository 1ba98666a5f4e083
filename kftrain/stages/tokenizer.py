"""Trains a tokenizer by itself: with the file's URI in `task.tokenizer`, several trainings share it."""

from __future__ import annotations

from itertools import islice
from typing import Any

from kftrain.config import Config
from kftrain.core import storage
from kftrain.errors import ConfigError
from kftrain.sharding.shard_dataset import iterate_training_records, read_strata
from kftrain.sharding.sources import resolve_source
from kftrain.sharding.sources.keyed import KeyedSource
from kftrain.tasks import build_task, language_modeling
from kftrain.tasks.language_modeling import LanguageModeling
from kftrain.tasks.tokenizers import TrainTokenizer, parse_option

NUM_SHOWN = 100
"""Number of documents from which the bytes per token are computed."""


def train_tokenizer(config: Config, out: str, vocab_size: int | None = None) -> dict[str, Any]:
    """Train a byte-level BPE on the training split of the configuration's source and write its `tokenizer.json`.

    `vocab_size`: None: as configured, or the default. Returns URI, digest, number of ids and bytes per token. Raises
    ConfigError and DataError.
    """
    wanted = parse_option(config.task.options().get("tokenizer", "bytes"))
    given = wanted.train if wanted and wanted.train else TrainTokenizer()
    changed = {} if vocab_size is None else {"vocab_size": vocab_size}
    train = {"train": {**given.model_dump(mode="json"), **changed}}
    task = build_task(config.task.model_copy(update={"tokenizer": train}))
    if not isinstance(task, LanguageModeling):
        raise ConfigError("has no tokenizer", where="task.kind", value=config.task.kind, fix="use language_modeling")
    kind = resolve_source.source_kind(config.data)
    data = resolve_source.with_content_keys(config.data, kind)  # another tokenizer makes a new dataset
    source = KeyedSource(resolve_source.open_kind(kind, data), data)
    source.learn_strata(read_strata(config.run.storage_root, data))
    parts = source.parts(config.data.part_size_bytes)
    task.learn(iterate_training_records(config, task, source, parts))
    uri, tokenizer = storage.absolute(out), task.tokenizer
    storage.publish(uri, tokenizer.content)
    texts = [
        language_modeling.get_text(record)
        for record in islice(iterate_training_records(config, task, source, parts), NUM_SHOWN)
    ]
    num_tokens = sum(len(tokenizer.encode(text)) for text in texts)
    return {
        "uri": uri,
        "sha256": tokenizer.digest,
        "num_ids": tokenizer.num_ids,
        "bytes_per_token": sum(map(len, texts)) / max(1, num_tokens),
    }
