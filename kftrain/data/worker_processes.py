"""Who decodes the samples of a step where that holds the GIL: processes that are started once and stay.

They are given numbers and positions through memory that is shared, and decode into it; what goes through a socket is
which rows are wanted, and that they are done. A worker ends when its end of the socket is closed, or when this process
is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from kftrain.data.decoding import BadSample, Decoder, Decoding, Filled, Samples
from kftrain.data.schema import Arrays
from kftrain.data.shared_rows import NUMBERS, POSITIONS, Slot, Slots, map_slot
from kftrain.data.worker_messages import WorkerConnection
from kftrain.data.workers import Locate, Rows, cut_rows
from kftrain.errors import FailureClass, KftrainError, RetryableError, error_from_dict

END_SECONDS = 5.0
"""Seconds that a worker has to end by itself."""


@dataclass(frozen=True)
class WorkerCommand:
    """Command that starts a worker, and its first message."""

    command: Sequence[str]
    """To which the number of its descriptor and the id of the process that starts it are appended."""
    greeting: dict[str, Any]
    """Message from which it knows what to read and how to decode; plain data."""
    on_opened: Callable[[list[Any]], None] = lambda opened: None
    """Is given which files a worker has opened before each of its answers is used."""


class DecodingProcesses:
    """Fetcher of rows whose decoding runs in worker processes."""

    def __init__(
        self,
        samples: Samples,
        locate: Locate,
        decoding: Decoding,
        num_workers: int,
        num_rows: int,
        command: WorkerCommand,
    ) -> None:
        """Start the workers, in a thread that must live as long as they: the kernel ends them with it.

        `num_rows`: of a step.
        """
        self._locate = locate
        self._workers = [_Worker(number, command) for number in range(num_workers)]  # they import meanwhile
        try:
            self._layout = Decoder(samples, decoding).find_layout(locate)
        except BaseException:
            self.close()
            raise
        fields = self._layout.to_list()
        self._slots = Slots(fields, num_rows)
        for worker in self._workers:
            worker.send({"fields": fields, "num_rows": num_rows})

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.process_id for worker in self._workers]

    def begin(self, positions: np.ndarray) -> Rows:
        """Ask for the samples, as `Fetcher` says.

        Nothing is cancelled: who has been asked writes to the slot until that is done.
        """
        slot, arrays = self._slots.take()
        arrays.pop(NUMBERS)[:] = self._locate(positions)
        arrays.pop(POSITIONS)[:] = positions
        asked = zip(self._workers, cut_rows(len(positions), len(self._workers)), strict=False)
        parts = [(rows.start, partial(worker.answer, worker.ask(slot, arrays, rows))) for worker, rows in asked]
        return Rows(arrays, parts, self._layout)

    def close(self) -> None:
        """End the workers, as `Fetcher` says."""
        for worker in self._workers:
            worker.close()
        for worker in self._workers:
            worker.wait()


class _Worker:
    """Worker process, from outside. It answers requests in their order."""

    def __init__(self, number: int, command: WorkerCommand) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*command.command, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},  # there are as many workers as cores
            )
        self._number = number
        self._on_opened = command.on_opened
        self._connection = WorkerConnection(ours)
        self._num_asked = 0
        self._num_answered = 0
        self._known: set[int] = set()
        self._unanswered: deque[Arrays] = deque()
        """Arrays that it still writes to, also where nobody else wants them any more."""
        self.send(command.greeting)

    @property
    def process_id(self) -> int:
        return self._process.pid

    def send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        with contextlib.suppress(OSError):  # it has ended: whoever waits for its answer hears why
            self._connection.send(message, descriptors)

    def ask(self, slot: Slot, arrays: Arrays, rows: slice) -> int:
        """Ask for some rows of a slot; return the number of the request."""
        descriptors = [] if slot.number in self._known else [slot.descriptor]
        self._known.add(slot.number)
        self._unanswered.append(arrays)
        self.send({"slot": slot.number, "start": rows.start, "stop": rows.stop}, descriptors)
        self._num_asked += 1
        return self._num_asked

    def answer(self, request: int) -> Filled:
        """Wait for the answer to a request; those before it that nobody waited for are dropped.

        Raises what the worker raised, and RetryableError where it has ended.
        """
        while True:
            received = self._connection.receive()
            if received is None:
                raise self._make_lost_error()
            answer, _ = received
            self._unanswered.popleft()
            self._num_answered += 1
            self._on_opened(answer.get("opened", []))
            if self._num_answered < request and "fatal" not in answer:
                continue
            if "error" in answer:
                raise error_from_dict(answer["error"])
            bad = {row: BadSample.from_dict(sample) for row, sample in answer["bad"]}
            return Filled(answer["bytes"], answer["seconds"], bad)

    def close(self) -> None:
        self._connection.close()

    def wait(self) -> None:
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _make_lost_error(self) -> KftrainError:
        self.close()
        self.wait()
        code = self._process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        killed = code == -signal.SIGKILL
        return RetryableError(
            f"data worker {self._number} (process {self._process.pid}) {how}",
            where="data.workers",
            fix="give the pod more memory, or use fewer workers" if killed else "see its last lines in the log",
        ).of_class(FailureClass.HOST_MEMORY if killed else FailureClass.USER_CODE)


def decode_rows(
    connection: WorkerConnection, samples: Samples, decoding: Decoding, opened: Callable[[], list[Any]] = list
) -> None:
    """Decode, in a worker, what it is asked for until the other end is gone.

    `opened`: what it has opened since that was asked for last; plain data.
    """
    decoder = Decoder(samples, decoding)
    slots: dict[int, Arrays] = {}
    received = connection.receive()
    layout = {} if received is None else received[0]
    while (received := connection.receive()) is not None:
        request, descriptors = received
        for descriptor in descriptors:
            slots[request["slot"]] = map_slot(descriptor, layout["fields"], layout["num_rows"])
            os.close(descriptor)
        rows = slice(request["start"], request["stop"])
        into = {name: array[rows] for name, array in slots[request["slot"]].items()}
        numbers, positions = into.pop(NUMBERS), into.pop(POSITIONS)
        try:
            filled = decoder.fill(into, numbers, positions)
        except KftrainError as error:
            connection.send({"error": error.to_dict()})
            continue
        bad = [(row, sample.to_dict()) for row, sample in filled.bad.items()]
        answer = {"bytes": filled.num_bytes, "seconds": filled.seconds, "bad": bad, "opened": opened()}
        connection.send(answer)
