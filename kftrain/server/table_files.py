"""The tables of a checkpoint: files of each server beside the dense state, which any number of servers read again.

tables-<server>.json                       what the tables are, and their updates so far; written last
tables-<server>-<table>-rows.npy           rows, with their optimizer state, versions and last use
tables-<server>-<table>-candidates.npy     keys that have been seen too seldom to have a row
"""

from __future__ import annotations

import hashlib
import io
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kftrain.core import storage
from kftrain.errors import CheckpointError
from kftrain.server.rows import Keys
from kftrain.server.table import RowTable

PIECE_ROWS = 65_536
"""Rows that are written, or chosen from, at a time."""

_ONE_PARSER = threading.Lock()
"""Numpy parses a header by `ast`, which raises SystemError in Python 3.11 where two threads parse (gh-106905)."""

Entries = dict[str, dict[str, Any]]
"""Name of a file -> its bytes and sha256, as manifests list them."""


def name_document(server: int) -> str:
    """Return the name of the file that describes a server's tables."""
    return f"tables-{server}.json"


Choice = Callable[[Keys], NDArray[np.bool_]]
"""Returns which keys are meant."""


def write_tables(tables: Sequence[RowTable], uri: str, server: int, num_servers: int, is_owned: Choice | None) -> None:
    """Write the tables of a server into the folder of a checkpoint, its document last.

    `is_owned`: the rows to write, where there are copies of others; None: all.
    """
    documents, files = [], {}
    for table in tables:
        documents.append({**asdict(table.spec), "num_updates": table.num_updates})
        for kind, rows in table.view().items():
            name = f"tables-{server}-{table.spec.name}-{kind}.npy"
            files[name] = _write_array(storage.join(uri, name), rows, is_owned)
    document = {"schema": 1, "num_servers": num_servers, "tables": documents, "files": files}
    storage.publish_json(storage.join(uri, name_document(server)), document)


def read_entries(uri: str, num_servers: int) -> Entries:
    """Read what the files of all servers are, documents included, for the manifest of a checkpoint."""
    entries: Entries = {}
    for server in range(num_servers):
        name = name_document(server)
        content = storage.read_bytes(storage.join(uri, name))
        entries |= storage.decode_json(content, name)["files"]
        entries[name] = {"bytes": len(content), "sha256": storage.sha256_bytes(content)}
    return entries


def read_documents(uri: str) -> list[dict[str, Any]]:
    """Read the documents of all servers of a checkpoint. Raises CheckpointError where there are none, or too few."""
    documents: list[dict[str, Any]] = []
    while len(documents) < (documents[0]["num_servers"] if documents else 1):
        where = storage.join(uri, name_document(len(documents)))
        document = storage.read_json_if_exists(where)
        if document is None or document["schema"] != 1:
            raise CheckpointError("the checkpoint has no such tables, or of another release", where=where)
        documents.append(document)
    return documents


def read_rows(uri: str, table: str, kind: str, num_servers: int) -> Iterator[NDArray[np.void]]:
    """Yield the rows, or candidates, of a table in a checkpoint of so many servers, some at a time."""
    for server in range(num_servers):
        where = storage.join(uri, f"tables-{server}-{table}-{kind}.npy")
        content = None if storage.is_local(where) else io.BytesIO(storage.read_bytes(where))
        with _ONE_PARSER:
            rows = np.load(content or storage.local_path(where), mmap_mode=None if content else "r", allow_pickle=False)
        for start in range(0, len(rows), PIECE_ROWS):
            yield rows[start : start + PIECE_ROWS]


def load_tables(tables: Sequence[RowTable], uri: str, is_owned: Choice) -> None:
    """Fill empty tables with those rows of a checkpoint, whatever number of servers wrote it, that are owned."""
    documents = read_documents(uri)
    for number, table in enumerate(tables):
        kept: dict[str, NDArray[np.void]] = {}
        for kind, empty in table.view().items():
            pieces = [empty]
            for rows in read_rows(uri, table.spec.name, kind, len(documents)):
                pieces.append(rows[is_owned(np.ascontiguousarray(rows["key"]))])
            kept[kind] = np.concatenate(pieces)
        table.load(documents[0]["tables"][number]["num_updates"], **kept)


def _write_array(uri: str, rows: NDArray[np.void], is_owned: Choice | None) -> dict[str, Any]:
    """Write an array, or the rows of it that are owned, as `numpy.save` does, in pieces that are hashed on the way."""
    pieces = [rows[start : start + PIECE_ROWS] for start in range(0, len(rows), PIECE_ROWS)]
    chosen = [is_owned(piece["key"].copy()) if is_owned else np.full(len(piece), True) for piece in pieces]
    header, shape = io.BytesIO(), (int(sum(map(np.count_nonzero, chosen))),)
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(rows) | {"shape": shape})
    digest, num_bytes = hashlib.sha256(), 0
    with storage.open_write(uri) as stream:
        bodies = (piece[choice].view(np.uint8).data for piece, choice in zip(pieces, chosen, strict=True))
        for body in itertools.chain([memoryview(header.getvalue())], bodies):
            stream.write(body)
            digest.update(body)
            num_bytes += len(body)
    return {"bytes": num_bytes, "sha256": digest.hexdigest()}
