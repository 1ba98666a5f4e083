"""The process that encodes parts of a source for another one: see `sharding/parts/pool.py`."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

from kftrain.data.assets import ASSETS, read_assets
from kftrain.data.schema import SourcePart
from kftrain.data.settings import DataConfig
from kftrain.errors import KftrainError, error_to_dict
from kftrain.process.parent_death import die_with_parent
from kftrain.sharding.parts.encoder import Encoding
from kftrain.sharding.parts.pool import accept_jobs
from kftrain.sharding.parts.store import PartStore
from kftrain.sharding.sources import resolve_source
from kftrain.sharding.sources.keyed import KeyedSource
from kftrain.tasks.registry import build_task
from kftrain.tasks.settings import TaskConfig
from kftrain.trust import permit_kinds


def main(descriptor: int, parent: int) -> None:
    """Answer jobs that come over a socket until it is closed, or the process `parent` dies."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, too, which then closes the socket
    connection, first = accept_jobs(descriptor)
    encoder = None
    while True:
        try:
            job = json.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            os._exit(0)  # no thread of a user's code holds this up
        try:
            encoder = encoder or _Encoder(first)
            answer = encoder.run(job)
        except KftrainError as error:
            answer = {"error": error_to_dict(error)}
        connection.send_bytes(json.dumps(answer).encode())


class _Encoder:
    """Source, task and store of the parent, made again from the configuration."""

    def __init__(self, first: dict[str, Any]) -> None:
        data, config = DataConfig.model_validate(first["data"]), TaskConfig.model_validate(first["task"])
        permit_kinds([config.kind, data.source, *(component.source for component in data.components)])
        self._source = KeyedSource(resolve_source.open_kind(first["kind"], data), data, first["strata"])
        task = build_task(config)
        if first["assets"]:
            task.restore(read_assets(first["root"], {ASSETS: first["assets"]}))
        encoding = Encoding.of(data, config.kind, task, hash_in_line=True)
        self._store = PartStore(first["shards_uri"], encoding, first["level"])

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        part = SourcePart(tuple(job["pieces"]), job["context"], state=job["state"])
        document, reused = self._store.obtain(self._source, part, job["input_digest"], lambda line: None)
        return {"document": document.to_dict(), "reused": reused}
