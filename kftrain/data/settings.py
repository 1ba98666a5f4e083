"""The section `data`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kftrain.plain import MAX_INTEGER
from kftrain.settings.section import Amount, Count, Section


class DataConfig(Section):
    """Where samples come from and how they are sharded and read."""

    source: str = "stdlib"
    """`stdlib`, `digits`, `module:attr`, or text, .jsonl, .parquet, .tar, class folders of images, a saved dataset."""
    text_field: str = "text"
    """Of records with fields (JSON lines, tables): the one that holds the text."""
    shard_size_bytes: Annotated[int, Field(ge=1 << 16, le=MAX_INTEGER)] = 64_000_000
    """Target size of one shard."""
    validation_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    """Share of the records that is held out, chosen by a hash of each record's key: it stays when data is added."""
    verify: Literal["sha256", "size"] = "sha256"
    """What training checks of every shard before its first step: the whole content, or only the length."""
    shuffle_window_shards: Count = 16
    """Samples are shuffled across this many shards at a time; shards are shuffled over the whole epoch."""
    prefetch_batches: Amount = 2
    """Steps whose samples are read ahead in a background thread; 0 reads in the training thread."""
