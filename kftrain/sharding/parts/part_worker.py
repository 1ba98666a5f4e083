"""The process that encodes parts of a source for another one: see `sharding/parts/pool.py`."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from typing import Any

from kftrain.config import Config
from kftrain.core import storage
from kftrain.data.assets import ASSETS, read_assets
from kftrain.data.schema import SourcePart
from kftrain.errors import KftrainError, error_to_dict
from kftrain.process.child import receive, send
from kftrain.process.parent_death import die_with_parent
from kftrain.sharding.parts.encoder import Encoding
from kftrain.sharding.parts.store import PartStore
from kftrain.sharding.sources import resolve_source
from kftrain.sharding.sources.keyed import KeyedSource
from kftrain.sharding.sources.listing import require_as_listed
from kftrain.tasks.registry import build_task
from kftrain.trust import permit_kinds


def main(descriptor: int, parent: int) -> None:
    """Answer jobs that come over a socket until it is closed, or the process `parent` dies."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, too, which then closes the socket
    connection = Connection(descriptor)
    first, encoder = receive(connection), None
    while first is not None and (job := receive(connection)) is not None:
        try:
            encoder = encoder or _Encoder(first)
            answer = encoder.run(job)
        except KftrainError as error:
            answer = {"error": error_to_dict(error)}
        send(connection, answer)
    os._exit(0)  # no thread of a user's code holds this up


class _Encoder:
    """Source, task and store of whoever listed the source, made again from the configuration."""

    def __init__(self, first: dict[str, Any]) -> None:
        config = Config.model_validate(first["config"])
        data, root = config.data, config.run.storage_root
        permit_kinds([config.task.kind, data.source, *(component.source for component in data.components)])
        self._source = KeyedSource(resolve_source.open_kind(first["kind"], data), data, first["strata"])
        task = build_task(config.task)
        if first["assets"]:
            task.restore(read_assets(root, {ASSETS: first["assets"]}))
        encoding = Encoding.of(data, config.task.kind, task, hash_in_line=True)
        self._store = PartStore(storage.join(root, "shards"), encoding, first["level"], first["pending"])

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Return the document of a part, and whether it was there. Raises as `PartStore.obtain` does.

        Where who has listed the source looks at it only when all is done, a part that was read is kept only if its
        files are still as they were listed.
        """
        part = SourcePart(tuple(job["pieces"]), job["context"], state=job["state"])
        document, reused = self._store.obtain(self._source, part, job["input_digest"], lambda line: None)
        if self._store.pending:
            if not reused:
                require_as_listed(piece["file"] for piece in part.pieces if "file" in piece)
            self._store.keep(job["input_digest"], document.part_digest, part.state)
        return {"document": document.to_dict(), "reused": reused}
