"""A server of a run as a process: it holds its share of the tables from the checkpoint on that a worker names.

What it holds is memory. When it, or a worker, is lost, the whole job goes back to the last checkpoint, as it does
without servers; so there is no log, and an acknowledgement means that the server has it. With `server.copies: 2` each
process also holds a copy of its neighbour's share, which takes over when the neighbour dies.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kftrain.config import Config
from kftrain.core import storage
from kftrain.core.credentials import SERVER_SECRET_VARIABLE
from kftrain.core.frames import Frame, FrameKind, FrameSocket
from kftrain.core.progress import to_log
from kftrain.errors import ConfigError, KftrainError, Preempted
from kftrain.process.signals import STOP, handle_signals
from kftrain.run.commit import CheckpointName
from kftrain.run.config import read_job_config
from kftrain.run.membership import read_membership
from kftrain.run.paths import RunPaths
from kftrain.server import table_files
from kftrain.server.chain import CONNECT_SECONDS, Chain, NoCopy
from kftrain.server.moving import (
    RowMove,
    build_late_error,
    build_ring,
    drop_foreign_rows,
    name_server,
    take_clocks,
    unpack_rows,
)
from kftrain.server.optimizers import RowAdagrad, RowAdam, RowOptimizer, RowSgd
from kftrain.server.outer_gradients import ISLAND_KINDS, OuterGradients
from kftrain.server.rounds import RoundRules
from kftrain.server.rows import Keys
from kftrain.server.server import Server
from kftrain.server.settings import ServerConfig, TableConfig
from kftrain.server.state import ServerState
from kftrain.server.table import RowTable, build_spec

logger = logging.getLogger(__name__)


def run_server(paths: RunPaths, digest: str, number: int) -> int:
    """Serve until SIGTERM and then for as long as workers are there, or until the run has no place for it.

    Returns the exit code. Raises ConfigError where the run's secret is not in the environment.
    """
    config = read_job_config(paths, digest)
    torch.set_num_threads(1)  # a server shares its node with others, and its rows are too short for several
    secret = read_secret()
    is_stopped, code = threading.Event(), 0

    def stop(*_: object) -> None:
        nonlocal code
        code = Preempted.exit_code  # by 0 its work were done: a Job of Kubernetes would start no other in its place
        is_stopped.set()

    with handle_signals(STOP, stop), tempfile.TemporaryDirectory(prefix="kftrain-") as folder:
        servers = [RunServer(paths, config, number, Path(folder), secret)]
        if config.server.copies > 1:
            neighbour = (number - 1) % config.server.num_servers
            servers.append(RunServer(paths, config, neighbour, Path(folder), secret, is_copy=True))
        servers[0].when_left = is_stopped.set
        for server in servers:
            server.start()
            server.publish_address()
        held = f"a share of {len(config.server.tables)} tables" if config.server.tables else "outer gradients"
        to_log(f"holds {held}, at port {servers[0].address[1]}")
        is_stopped.wait()
        if code:  # a cluster tells all at once to stop, and workers need servers for their last commit
            servers[0].wait_for_workers()
        for server in servers:
            server.stop()
    return code


def read_secret() -> bytes:
    """Read the run's secret from the environment. Raises ConfigError where there is none."""
    secret = os.environ.get(SERVER_SECRET_VARIABLE, "")
    if not secret:
        fix = "put it, with a long random value, into a secret of launch.kubernetes.secrets"
        raise ConfigError("workers and servers share no secret", where=SERVER_SECRET_VARIABLE, fix=fix)
    return secret.encode()


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


def build_round_rules(config: Config) -> RoundRules:
    """Build the rules by which the outer gradients of islands are merged."""
    outer, num_islands = config.train.outer, config.parallel.islands
    quorum, max_ahead = outer.quorum or num_islands, outer.max_rounds_ahead if outer.quorum else None
    return RoundRules(num_islands, quorum, outer.grace_seconds, max_ahead)


class RunServer(Server):
    """A server whose tables come from the run's checkpoints and go into them; `is_copy`: it stands by for that one."""

    def __init__(
        self, paths: RunPaths, config: Config, number: int, folder: Path, secret: bytes, is_copy: bool = False
    ) -> None:
        self._is_copy = is_copy
        self._paths = paths
        self._config = config
        self._number = number
        self._num_servers = config.server.num_servers
        self._ring = build_ring(self._num_servers)
        self._move: RowMove | None = None
        self._outer: OuterGradients | None = None
        self._first_change = 0
        """Number of the first change that is not over, as far as this server knows."""
        self._has_foreign_rows = False
        self._num_drops = 0
        """Threads that drop foreign rows."""
        self.when_left: Callable[[], object] = lambda: None
        """Called when this server is no longer on the ring."""
        host = "0.0.0.0" if config.launch.is_remote else "127.0.0.1"
        self._folder = folder
        super().__init__(build_state(config.server, config.run.seed, folder), secret, host)

    def publish_address(self) -> None:
        """Write where this server listens into the run's folder."""
        host = socket.gethostbyname(socket.gethostname()) if self._config.launch.is_remote else "127.0.0.1"
        address = {"name": name_server(self._number), "host": host, "port": self.address[1]}
        name = f"{self._number}-copy.json" if self._is_copy else f"{self._number}.json"
        storage.publish_json(storage.join(self._paths.servers, name), address)

    def _hang_up(self) -> None:
        super()._hang_up()
        if self._move is not None:
            self._move.close()
        if self._outer is not None:
            self._outer.close()

    def _answer(self, frame: Frame, connection: FrameSocket) -> Iterator[Frame]:
        methods = {FrameKind.SAVE: self._save, FrameKind.LOAD: self._load, FrameKind.MOVE: self._copy_rows}
        methods |= {FrameKind.ROWS: self._take_rows, FrameKind.CLOCKS: self._take_clocks}
        methods |= {FrameKind.SETTLE: self._settle}
        if self._outer is not None:  # read before the connection is asked for: it may be of an attempt before, too
            methods |= dict.fromkeys(ISLAND_KINDS, self._outer.answer)
        if frame.kind in ISLAND_KINDS and self._connections.get(frame.worker) is not connection:
            yield self._refuse(frame, "it is of an attempt before, or the worker has another connection by now")
            return
        if frame.kind not in methods:
            yield from super()._answer(frame, connection)
            return
        try:
            yield methods[frame.kind](frame)
        except (KftrainError, OSError) as error:
            yield self._refuse(frame, str(error))
        if self._number >= self._num_servers and frame.kind is FrameKind.SETTLE:
            self.when_left()  # after the answer

    def _save(self, frame: Frame) -> Frame:
        with self._changed:
            if not self._state.is_between_steps:
                return self._refuse(frame, "a step is not over")
            is_owned = self._find_own if self._has_foreign_rows else None
            uri = self._name_checkpoint(frame)
            table_files.write_tables(self._state.tables, uri, self._number, self._num_servers, is_owned)
        return Frame(FrameKind.POSITION, clock=frame.clock)

    def _load(self, frame: Frame) -> Frame:
        state = build_state(self._config.server, self._config.run.seed, self._folder)
        with self._changed:
            self._end_move()
            if frame.clock and state.tables:
                table_files.load_tables(state.tables, self._name_checkpoint(frame), self._find_own)
            self._copy.close()
            self._copy = NoCopy()
            if self._config.server.copies > 1 and not self._is_copy:
                address = self._read_address(f"{self._number}-copy")
                self._copy = Chain(address["host"], address["port"], self._secret, self._hang_up)
            self._leader, self._has_taken_over = None, False
            self._state = state
            self._has_foreign_rows = False
            self._readable_position = 0
            self._connections.clear()  # those of workers of an attempt before, whose frames are refused from now on
            self._begin_outer(frame.clock)
        return Frame(FrameKind.POSITION, clock=frame.clock)

    def _begin_outer(self, num_steps: int) -> None:
        if self._outer is not None:
            self._outer.close()
        if self._config.parallel.islands > 1:
            first_round = num_steps // self._config.train.outer.steps
            self._outer = OuterGradients(build_round_rules(self._config), first_round, self._config.run.seed)

    def _name_checkpoint(self, frame: Frame) -> str:
        return storage.join(self._paths.checkpoints, str(CheckpointName(frame.clock, frame.sequence)))

    def _read_address(self, name: str) -> dict[str, Any]:
        address: dict[str, Any] = storage.read_json(storage.join(self._paths.servers, f"{name}.json"))
        return address

    def _end_move(self) -> None:
        if self._move is not None:
            self._move.close()
            self._move = None
        config = self._config
        self._num_servers = read_membership(self._paths, config.digest(), config.server.num_servers).num_servers
        self._ring = build_ring(self._num_servers)

    def _find_own(self, keys: Keys) -> NDArray[np.bool_]:
        is_own: NDArray[np.bool_] = self._ring.find_owners(keys) == self._number
        return is_own

    def _connect_to(self, number: int) -> FrameSocket:
        address = self._read_address(str(number))
        name = name_server(number)
        return FrameSocket.connect(address["host"], address["port"], self._secret, name, CONNECT_SECONDS)

    def _copy_rows(self, frame: Frame) -> Frame:
        move = self._find_move(frame)
        num_rows = move.finish() if frame.sequence else move.copy()
        return Frame(FrameKind.POSITION, clock=num_rows)

    def _find_move(self, frame: Frame) -> RowMove:
        with self._changed:
            self._wait_until_dropped()
            self._require_current(frame)
            if self._move is not None and self._move.change == frame.clock:
                return self._move
            self._end_move()  # else it would leave out what another one has sent
        move = RowMove(self._state, self._changed, self._number, frame.table, self._connect_to, frame.clock)
        with self._changed:
            if self._is_stopped or frame.clock < self._first_change:  # since it began to connect
                move.close()
            else:
                self._move = move
        return move

    def _require_current(self, frame: Frame) -> None:
        """Raise RetryableError where the frame is of a change that is over."""
        # A thread may be late, or a connection slow: its rows would take the place of newer ones.
        if frame.clock < self._first_change:
            raise build_late_error(self._number, frame.clock)
        self._first_change = frame.clock

    def _take_rows(self, frame: Frame) -> Frame:
        with self._changed:
            self._wait_until_dropped()
            self._require_current(frame)
            self._has_foreign_rows = True
            self._state.tables[frame.table].put_rows(unpack_rows(frame), bool(frame.sequence))
        return Frame(FrameKind.POSITION)

    def _take_clocks(self, frame: Frame) -> Frame:
        with self._changed:
            self._require_current(frame)
            flaw = take_clocks(self._state, frame)
        return self._refuse(frame, flaw) if flaw else Frame(FrameKind.POSITION)

    def _settle(self, frame: Frame) -> Frame:
        with self._changed:
            if frame.clock + 1 < self._first_change:  # what it would drop may be of a later change
                return Frame(FrameKind.POSITION)
            self._first_change = frame.clock + 1
            self._end_move()
            self._has_foreign_rows = True
            self._num_drops += 1
        self._start_thread(self._drop_foreign_rows)
        return Frame(FrameKind.POSITION)

    def _drop_foreign_rows(self) -> None:
        drop_foreign_rows(self._state.tables, self._changed, self._find_own)
        with self._changed:
            self._num_drops -= 1
            self._has_foreign_rows = self._num_drops > 0
            self._changed.notify_all()

    def _wait_until_dropped(self) -> None:
        # Else what comes now would be dropped, or what is to be dropped would be copied.
        self._changed.wait_for(lambda: self._is_stopped or not self._num_drops)
