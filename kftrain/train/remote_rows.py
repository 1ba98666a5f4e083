"""The sparse part of a training: rows on servers, which are read in forward passes and updated after each step.

Gradients of rows travel apart from the dense ones: each process pushes those of its own samples, already divided by the
loss terms of all, so that their sum over the processes is the gradient of the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from kftrain.checkpoint.table_source import StoredTables
from kftrain.config import Config
from kftrain.core.frames import Frame, FrameKind
from kftrain.core.row_encodings import RowEncoding
from kftrain.errors import ConfigError
from kftrain.models.sparse_embedding import SparseEmbedding, attach_tables, find_embeddings
from kftrain.parallel.distributed import Agreement, Distributed
from kftrain.parallel.world import World
from kftrain.remote_parameters.client import RemoteTables
from kftrain.remote_parameters.control import START_SECONDS, ask_all, find_servers, load_all
from kftrain.remote_parameters.link import ServerAddress
from kftrain.remote_parameters.moving import ServerChange
from kftrain.run.commit import CheckpointManifest, CheckpointName, FileEntry
from kftrain.run.membership import Membership, agree_on_servers, read_membership, read_wanted_servers
from kftrain.run.paths import RunPaths
from kftrain.server.process import read_secret
from kftrain.server.table import build_spec
from kftrain.server.table_files import read_entries


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
        self._world: World | None = None
        self._change: ServerChange | None = None
        self._is_change_due = False

    def apply(self, distributed: Distributed, blocks: Sequence[str]) -> None:
        """Register the work of each step; see `Transform`."""
        distributed.agreements.append(Agreement(self._take_numbers, self._take_sums))
        distributed.when_decided.append(self._finish_step)

    def connect(self, paths: RunPaths, world: World, before: CheckpointManifest | None) -> None:
        """Have the servers begin from the checkpoint, and connect to them. Collective."""
        self._secret = read_secret()
        self._world = world
        world.agree(lambda: self._find_servers(paths))
        step, attempt = (before.step, before.attempt) if before else (0, 0)
        if world.is_main:
            load = Frame(FrameKind.LOAD, clock=step, sequence=attempt)
        world.agree(lambda: load_all(self._servers, self._secret, load) if world.is_main else None)
        dims = {table.name: table.dim for table in self._config.server.tables}
        # Nobody reads before all have joined: the clock rule waits for those alone that it knows.
        world.agree(lambda: self._join(dims, world.rank, step))
        if world.is_main and can_change_servers(self._config):
            wanted = WantedServerFinder(paths, self._config)
            self._change = ServerChange(self._servers, self._secret, wanted.find, wanted.agree)
            self._change.start()

    def save(self, uri: str, name: CheckpointName, world: World) -> dict[str, FileEntry]:
        """Have the servers write their tables beside a checkpoint; return their files on the first process. Collective.

        Raises RetryableError, on all processes, where one cannot.
        """
        files: dict[str, FileEntry] = {}

        def ask() -> None:
            frame = Frame(FrameKind.SAVE, clock=name.step, sequence=name.attempt)
            assert self._tables is not None, "the servers are not connected"
            servers = self._tables.servers
            ask_all(servers, self._secret, frame)
            entries = read_entries(uri, len(servers))
            files.update({key: FileEntry(**entry) for key, entry in entries.items()})

        world.barrier()  # all have finished the step, and none has begun the next one
        world.agree(lambda: ask() if world.is_main else None)
        return files

    def collect_metrics(self) -> dict[str, float]:
        """Return how many steps old the rows were that this process has read since the last time."""
        counts = self._tables.take_staleness() if self._tables is not None else None
        if not counts:
            return {}
        mean = sum(steps * count for steps, count in counts.items()) / counts.total()
        return {"mean_row_staleness": mean, "max_row_staleness": float(max(counts))}

    def close(self) -> None:
        """Close the connections."""
        if self._change is not None:
            self._change.close()
        if self._tables is not None:
            self._tables.close()

    def _find_servers(self, paths: RunPaths) -> None:
        server = self._config.server
        num_servers = read_membership(paths, self._config.digest(), server.num_servers).num_servers
        self._servers = find_servers(paths.servers, num_servers, START_SECONDS, server.copies)

    def _join(self, dims: dict[str, int], rank: int, first_step: int) -> None:
        server = self._config.server
        rules: dict[str, Any] = {"max_ahead": server.max_ahead, "encoding": RowEncoding[server.encoding.upper()]}
        rules |= {"noise_seed": self._config.run.seed, "first_step": first_step}
        self._tables = RemoteTables(self._servers, dims, rank, self._secret, **rules)
        attach_tables(self._model, self._tables)

    def _take_numbers(self) -> list[float]:
        is_ready = self._change is not None and self._change.is_ready
        return [float(sum(module.sum_gradients() for module in self._embeddings)), float(is_ready)]

    def _take_sums(self, sums: list[float]) -> None:
        self._is_change_due = sums[1] > 0
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
        if self._is_change_due:
            self._switch()

    def _switch(self) -> None:
        """Go on with other servers, all workers at once: each has finished the step when the first one does so."""
        world, tables = self._world, self._tables
        assert world is not None and tables is not None, "the servers are not connected"
        world.barrier()
        world.agree(self._finish_change, while_saving=True)
        servers = world.from_main(self._servers)
        world.agree(lambda: tables.switch(servers), while_saving=True)

    def _finish_change(self) -> None:
        if self._change is not None:
            self._servers = list(self._change.finish())


def can_change_servers(config: Config) -> bool:
    """Return True where servers may join a job of this configuration, and leave it."""
    return not config.launch.is_remote and config.server.copies == 1


class WantedServerFinder:
    """Looks in a run's folder for the servers that somebody asks for."""

    def __init__(self, paths: RunPaths, config: Config) -> None:
        self._paths = paths
        self._digest = config.digest()
        self._num_configured = config.server.num_servers
        self._request = ""

    def find(self) -> list[ServerAddress] | None:
        """Return the servers that were asked for since the last call, when all are there; None where nobody has."""
        wanted = read_wanted_servers(self._paths, self._digest)
        if wanted is None or wanted.request == self._request:
            return None
        self._request = wanted.request
        return find_servers(self._paths.servers, wanted.num_servers, START_SECONDS)

    def agree(self, num_servers: int) -> None:
        """Make this many servers those of the run."""
        epoch = read_membership(self._paths, self._digest, self._num_configured).epoch + 1
        agree_on_servers(self._paths, self._digest, Membership(epoch, num_servers))
