"""Tables in exports: a file of keys and weights each, and what a key without a row is answered with.

tables.json                    the tables: names, widths, and what new rows follow from
table-<name>.safetensors       `keys` [rows] int64, ascending, and `weights` [rows, dim] float32
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kftrain.checkpoint import tensor_files
from kftrain.checkpoint.files import HashingStream
from kftrain.checkpoint.tensor_files import TensorForm
from kftrain.core import storage
from kftrain.errors import CheckpointError
from kftrain.run import commit
from kftrain.run.commit import FileEntry
from kftrain.server import table_files
from kftrain.server.rows import Keys
from kftrain.server.table import Floats, TableSpec, draw_initial_weights

DOCUMENT = "tables.json"

PIECE_ROWS = 65_536


class StoredTables:
    """Tables that nobody changes; a key without a row has the weights with which training would begin one.

    Args:
        specs: The tables.
        rows: Name of a table -> its keys, ascending, and their weights; a table without any has no rows.
    """

    def __init__(self, specs: Sequence[TableSpec], rows: Mapping[str, tuple[Keys, Floats]] | None = None) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._rows = dict(rows or {})

    def __deepcopy__(self, memo: object) -> StoredTables:
        """Return the same: a copy of a model reads the same tables."""
        return self

    def pull(self, table: str, keys: Keys) -> Floats:
        """Return the weights (keys, dim) of distinct keys."""
        spec = self._specs[table]
        known, weights = self._rows.get(table, (np.empty(0, np.int64), np.empty((0, spec.dim), np.float32)))
        answer = np.empty((len(keys), spec.dim), np.float32)
        places = np.searchsorted(known, keys)
        is_known = places < len(known)
        is_known[is_known] = known[places[is_known]] == keys[is_known]
        answer[is_known] = weights[places[is_known]]
        answer[~is_known] = draw_initial_weights(spec, keys[~is_known])
        return answer

    def push(self, table: str, keys: Keys, gradients: Floats) -> None:
        """Fail: nothing here is trained."""
        raise AssertionError("these tables are not trained")


def write_table_exports(checkpoint_uri: str, files: Mapping[str, FileEntry], folder: str) -> dict[str, FileEntry]:
    """Write the tables of a checkpoint, where it has any, into an export; return their files."""
    if table_files.name_document(0) not in files:
        return {}
    documents = table_files.read_documents(checkpoint_uri)
    names = {field.name for field in fields(TableSpec)}
    specs = [{key: value for key, value in table.items() if key in names} for table in documents[0]["tables"]]
    content = storage.dump_json({"schema": 1, "tables": specs}).encode()
    storage.publish(storage.join(folder, DOCUMENT), content)
    entries = {DOCUMENT: FileEntry(bytes=len(content), sha256=storage.sha256_bytes(content))}
    for spec in specs:
        name = f"table-{spec['name']}.safetensors"
        entries[name] = _write_table(checkpoint_uri, TableSpec(**spec), len(documents), storage.join(folder, name))
    return entries


def _write_table(checkpoint_uri: str, spec: TableSpec, num_servers: int, uri: str) -> FileEntry:
    keys, weights = [np.empty(0, np.int64)], [np.empty((0, spec.dim), np.float32)]
    for rows in table_files.read_rows(checkpoint_uri, spec.name, "rows", num_servers):
        keys.append(rows["key"])
        weights.append(rows["numbers"][:, : spec.dim])
    all_keys, all_weights = np.concatenate(keys), np.concatenate(weights)
    order = np.argsort(all_keys)
    forms = {
        "keys": TensorForm(torch.int64, (len(order),)),
        "weights": TensorForm(torch.float32, (len(order), spec.dim)),
    }
    with storage.simplify_errors(uri, "the export could not be written"), storage.open_write(uri) as stream:
        hashing = HashingStream(stream)
        hashing.write(tensor_files.encode_header(forms))
        hashing.write(all_keys[order].data.cast("B"))
        for start in range(0, len(order), PIECE_ROWS):
            hashing.write(all_weights[order[start : start + PIECE_ROWS]].data.cast("B"))
    return hashing.entry


def read_tables(uri: str, files: Mapping[str, FileEntry]) -> StoredTables:
    """Read the tables of an export; none where it has none. Raises CheckpointError for what is damaged."""
    if DOCUMENT not in files:
        return StoredTables([])
    content = commit.read_verified(storage.join(uri, DOCUMENT), files[DOCUMENT])
    document = storage.decode_json(content, storage.join(uri, DOCUMENT), CheckpointError)
    try:
        specs = [TableSpec(**table) for table in document["tables"]]
    except (TypeError, LookupError) as error:
        raise CheckpointError("it describes no tables", where=storage.join(uri, DOCUMENT)) from error
    rows = {}
    for spec in specs:
        name = f"table-{spec.name}.safetensors"
        if name not in files:
            raise CheckpointError(f"the export has no {name}", where=uri, fix="export the checkpoint again")
        rows[spec.name] = _read_table(uri, name, files[name], spec.dim)
    return StoredTables(specs, rows)


def _read_table(uri: str, name: str, entry: FileEntry, dim: int) -> tuple[Keys, Floats]:
    where = storage.join(uri, name)
    content = _open_bytes(uri, name, entry)
    tensors = tensor_files.read_header(_make_reader(content.data), entry.bytes, where)
    forms = {key: (stored.form.dtype, stored.form.shape) for key, stored in tensors.items()}
    num_rows = forms["keys"][1][0] if "keys" in forms and len(forms["keys"][1]) == 1 else 0
    if forms != {"keys": (torch.int64, (num_rows,)), "weights": (torch.float32, (num_rows, dim))}:
        raise CheckpointError("a table has other tensors than keys and weights", where=where)
    keys = np.frombuffer(content, np.int64, num_rows, tensors["keys"].start)
    weights = np.frombuffer(content, np.float32, num_rows * dim, tensors["weights"].start)
    return keys, weights.reshape(num_rows, dim)


def _open_bytes(uri: str, name: str, entry: FileEntry) -> NDArray[np.uint8]:
    """Return the verified bytes of a file; of this machine's as a map of it, which processes share."""
    where = storage.join(uri, name)
    if not storage.is_local(where):
        return np.frombuffer(commit.read_verified(where, entry), np.uint8)
    commit.verify_files(uri, {name: entry})
    return np.memmap(os.fspath(storage.local_path(where)), np.uint8, "r")


def _make_reader(content: memoryview) -> Callable[[int], memoryview]:
    position = 0

    def read(size: int) -> Any:
        nonlocal position
        position += size
        return content[position - size : position]

    return read
