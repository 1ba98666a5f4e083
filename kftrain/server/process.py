"""A server of a run as a process: it holds its share of the tables from the checkpoint on that a worker names.

What it holds is memory. When it, or a worker, is lost, the whole job goes back to the last checkpoint, as it does
without servers; so nothing is logged here, and an acknowledgement means that the server has it.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from kftrain.config import Config
from kftrain.core import storage
from kftrain.core.credentials import SERVER_SECRET_VARIABLE
from kftrain.core.frames import Frame, FrameKind, FrameSocket
from kftrain.core.progress import to_log
from kftrain.core.ring import Ring
from kftrain.errors import ConfigError, KftrainError
from kftrain.process.signals import STOP, handle_signals
from kftrain.run.commit import CheckpointName
from kftrain.run.config import read_job_config
from kftrain.run.paths import RunPaths
from kftrain.server import table_files
from kftrain.server.optimizers import RowAdagrad, RowAdam, RowOptimizer, RowSgd
from kftrain.server.server import Server
from kftrain.server.settings import ServerConfig, TableConfig
from kftrain.server.state import ServerState
from kftrain.server.table import RowTable, build_spec

logger = logging.getLogger(__name__)


def run_server(paths: RunPaths, digest: str, number: int) -> None:
    """Serve until SIGTERM. Raises ConfigError where the run's secret is not in the environment."""
    config = read_job_config(paths, digest)
    torch.set_num_threads(1)  # a server shares its node with others, and its rows are too short for several
    secret = read_secret()
    is_stopped = threading.Event()
    with handle_signals(STOP, lambda *_: is_stopped.set()), tempfile.TemporaryDirectory(prefix="kftrain-") as folder:
        server = RunServer(paths, config, number, Path(folder), secret)
        server.start()
        host = socket.gethostbyname(socket.gethostname()) if config.launch.is_remote else "127.0.0.1"
        address = {"name": name_server(number), "host": host, "port": server.address[1]}
        storage.publish_json(storage.join(paths.servers, f"{number}.json"), address)
        to_log(f"holds a share of {len(config.server.tables)} tables, at {host}:{server.address[1]}")
        is_stopped.wait()
        server.stop()


def read_secret() -> bytes:
    """Read the run's secret from the environment. Raises ConfigError where there is none."""
    secret = os.environ.get(SERVER_SECRET_VARIABLE, "")
    if not secret:
        fix = "put it, with a long random value, into a secret of launch.kubernetes.secrets"
        raise ConfigError("workers and servers share no secret", where=SERVER_SECRET_VARIABLE, fix=fix)
    return secret.encode()


def name_server(number: int) -> str:
    """Return the name of a server on the ring."""
    return f"server-{number}"


def build_row_optimizer(config: TableConfig) -> RowOptimizer:
    """Build the optimizer of a table's rows."""
    rate = config.learning_rate
    if config.optimizer == "sgd":
        return RowSgd(rate)
    if "adagrad" in config.optimizer:
        return RowAdagrad(rate, is_row_wise=config.optimizer == "row_wise_adagrad")
    return RowAdam(rate, decays_lazily=config.optimizer == "adam")


def build_state(config: ServerConfig, seed: int, folder: Path) -> ServerState:
    """Build the state of a server that knows nothing yet."""
    tables = [RowTable(build_spec(table, seed), build_row_optimizer(table), folder) for table in config.tables]
    return ServerState(tables, config.max_ahead)


class RunServer(Server):
    """A server whose tables come from the run's checkpoints and go into them."""

    def __init__(self, paths: RunPaths, config: Config, number: int, folder: Path, secret: bytes) -> None:
        self._paths = paths
        self._config = config
        self._number = number
        host = "0.0.0.0" if config.launch.is_remote else "127.0.0.1"
        super().__init__(build_state(config.server, config.run.seed, folder), folder, secret, host)
        self._log.close()
        self._log: Any = _NoLog()

    def _answer(self, frame: Frame, connection: FrameSocket) -> Iterator[Frame]:
        if frame.kind in (FrameKind.SAVE, FrameKind.LOAD):
            yield self._save_or_load(frame)
        else:
            yield from super()._answer(frame, connection)

    def _save_or_load(self, frame: Frame) -> Frame:
        uri = storage.join(self._paths.checkpoints, str(CheckpointName(frame.clock, frame.sequence)))
        with self._changed:
            try:
                return self._save(frame, uri) if frame.kind is FrameKind.SAVE else self._load(frame, uri)
            except (KftrainError, OSError) as error:
                return self._refuse(frame, str(error))

    def _save(self, frame: Frame, uri: str) -> Frame:
        if not self._state.is_between_steps:
            return self._refuse(frame, "a step is not over")
        table_files.write_tables(self._state.tables, uri, self._number, self._config.server.num_servers)
        return Frame(FrameKind.POSITION, clock=frame.clock)

    def _load(self, frame: Frame, uri: str) -> Frame:
        state = build_state(self._config.server, self._config.run.seed, self._folder)
        if frame.clock:
            ring = Ring([name_server(number) for number in range(self._config.server.num_servers)])
            table_files.load_tables(state.tables, uri, lambda keys: ring.find_owners(keys) == self._number)
        self._state = state
        self._connections.clear()  # those of workers of an attempt before, whose frames are refused from now on
        return Frame(FrameKind.POSITION, clock=frame.clock)


class _NoLog:
    """Stands in for the log of a server that nobody starts again with what it knew."""

    num_bytes = 0

    def append(self, frame: Frame) -> int:
        return 0

    def sync(self, position: int) -> None:
        pass

    def close(self) -> None:
        pass
