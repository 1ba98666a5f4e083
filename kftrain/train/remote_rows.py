"""The sparse part of a training: rows on servers, which are read in forward passes and updated after each step.

Gradients of rows travel apart from the dense ones: each process pushes those of its own samples, already divided by the
loss terms of all, so that their sum over the processes is the gradient of the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from kftrain.checkpoint.table_source import StoredTables
from kftrain.config import Config
from kftrain.core.frames import Frame, FrameKind
from kftrain.errors import ConfigError
from kftrain.models.sparse_embedding import SparseEmbedding, attach_tables, find_embeddings
from kftrain.parallel.distributed import Agreement, Distributed
from kftrain.parallel.world import World
from kftrain.remote_parameters.client import RemoteTables
from kftrain.remote_parameters.control import ask_all, find_servers
from kftrain.remote_parameters.link import ServerAddress
from kftrain.run.commit import CheckpointManifest, CheckpointName, FileEntry
from kftrain.run.paths import RunPaths
from kftrain.server.process import read_secret
from kftrain.server.table import build_spec
from kftrain.server.table_files import read_entries

START_SECONDS = 120.0
"""Seconds that servers may take to start: they and the workers start at the same time."""


def attach_new_tables(model: nn.Module, config: Config) -> None:
    """Let a model that is being tried read rows as they begin. Raises ConfigError where its tables are others."""
    tables = {table.name: table.dim for table in config.server.tables}
    wanted = {module.table: module.dim for module in find_embeddings(model)}
    if wanted != tables:
        what = "the tables of the model's SparseEmbedding modules, with their widths, are others"
        raise ConfigError(what, where="server.tables", value=tables, fix=f"the model has {wanted or 'none'}")
    attach_tables(model, StoredTables([build_spec(table, config.run.seed) for table in config.server.tables]))


class RemoteRows:
    """A transform that sends the gradients of rows to the servers where the optimizer makes its step."""

    def __init__(self, config: Config, model: nn.Module) -> None:
        self._config = config
        self._model = model
        self._embeddings: list[SparseEmbedding] = find_embeddings(model)
        self._tables: RemoteTables | None = None
        self._servers: list[ServerAddress] = []
        self._secret = b""

    def apply(self, distributed: Distributed, blocks: Sequence[str]) -> None:
        """Register the work of each step; see `Transform`."""
        distributed.agreements.append(Agreement(self._count_nonfinite, self._spoil_step))
        distributed.when_decided.append(self._finish_step)

    def connect(self, paths: RunPaths, world: World, before: CheckpointManifest | None) -> None:
        """Have the servers begin from the checkpoint, and connect to them. Collective."""
        self._secret = read_secret()
        world.agree(lambda: self._find_servers(paths))
        step, attempt = (before.step, before.attempt) if before else (0, 0)
        if world.is_main:
            load = Frame(FrameKind.LOAD, clock=step, sequence=attempt)
        world.agree(lambda: ask_all(self._servers, self._secret, load) if world.is_main else None)
        dims = {table.name: table.dim for table in self._config.server.tables}
        # Nobody reads before all have joined: the clock rule waits for those alone that it knows.
        world.agree(lambda: self._join(dims, world.rank))

    def save(self, uri: str, name: CheckpointName, world: World) -> dict[str, FileEntry]:
        """Have the servers write their tables beside a checkpoint; return their files on the first process. Collective.

        Raises RetryableError, on all processes, where one cannot.
        """
        files: dict[str, FileEntry] = {}

        def ask() -> None:
            frame = Frame(FrameKind.SAVE, clock=name.step, sequence=name.attempt)
            ask_all(self._servers, self._secret, frame)
            entries = read_entries(uri, len(self._servers))
            files.update({key: FileEntry(**entry) for key, entry in entries.items()})

        world.barrier()  # all have finished the step, and none has begun the next one
        world.agree(lambda: ask() if world.is_main else None)
        return files

    def close(self) -> None:
        """Close the connections."""
        if self._tables is not None:
            self._tables.close()

    def _find_servers(self, paths: RunPaths) -> None:
        self._servers = find_servers(paths.servers, self._config.server.num_servers, START_SECONDS)

    def _join(self, dims: dict[str, int], rank: int) -> None:
        self._tables = RemoteTables(self._servers, dims, rank, self._secret)
        attach_tables(self._model, self._tables)

    def _count_nonfinite(self) -> list[float]:
        return [float(sum(module.sum_gradients() for module in self._embeddings))]

    def _spoil_step(self, sums: list[float]) -> None:
        # What skips a step looks at the dense gradients alone, and a step is skipped as a whole or not at all.
        if not math.isfinite(sums[0]):
            parameter = next(one for one in self._model.parameters() if one.grad is not None)
            assert parameter.grad is not None
            parameter.grad.fill_(math.nan)

    def _finish_step(self, found_inf: torch.Tensor) -> None:
        assert self._tables is not None, "the servers are not connected"
        for module in self._embeddings:
            module.push_gradients(is_skipped=bool(found_inf))
        self._tables.finish_step()
