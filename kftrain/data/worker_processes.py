"""Who decodes the samples of a step where that holds the GIL: processes that are started once and stay.

They are given numbers and positions through memory that is shared, and decode into it; messages say which rows are
wanted, and that they are done. A worker ends when its end of the socket is closed, or when this process is gone.
"""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kftrain.data.counters import Counters
from kftrain.data.decoding import BadSample, Decoder, Decoding, Filled, Samples
from kftrain.data.schema import Arrays
from kftrain.data.shared_rows import NUMBERS, POSITIONS, Slots, make_memory
from kftrain.data.tuning import Tuning
from kftrain.data.workers import Locate, Rows, cut_rows
from kftrain.errors import KftrainError, error_from_dict
from kftrain.process.child import Child, receive, send

WORKER_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(128 << 20)}
"""Limits of the C library from which on memory goes back to the system, which is far above those of a new process: else
each decoded image costs as many page faults as it has pages, a third of the time."""

LOST_FIX = "give the pod more memory, or use fewer workers"


@dataclass(frozen=True)
class WorkerCommand:
    """Command that starts a worker, and its first message."""

    command: Sequence[str]
    """To which are appended the descriptors of its socket and of the shared memory, and the id of its parent."""
    greeting: dict[str, Any]
    """Message from which it knows what to read and how to decode; plain data."""
    on_opened: Callable[[list[Any]], None] = lambda opened: None
    """Is given which files a worker has opened before each of its answers is used."""


class DecodingProcesses:
    """Worker processes that decode rows."""

    def __init__(
        self,
        samples: Samples,
        locate: Locate,
        decoding: Decoding,
        tuning: Tuning,
        num_rows: int,
        command: WorkerCommand,
    ) -> None:
        """Start the workers, in a thread that must live as long as they: the kernel ends them with it.

        `num_rows`: of a step.
        """
        self._locate = locate
        self._command = command
        self._memory = make_memory()
        self._workers = [_Worker(number, command, self._memory) for number in range(tuning.workers)]  # they import
        self._num_pieces = tuning.pieces
        self._num_asked = 0
        try:
            self._layout = Decoder(samples, decoding).find_layout(locate)
        except BaseException:  # a signal, too: workers must not outlive the loader
            self.close()
            raise
        fields = self._layout.to_list()
        self._form = {"fields": fields, "num_rows": num_rows}
        self._slots = Slots(self._memory, fields, num_rows)
        for worker in self._workers:
            worker.child.send(self._form)

    def resize(self, tuning: Tuning) -> None:
        """Start more workers, each of which reads by itself; in the thread that has started the first."""
        self._num_pieces = tuning.pieces
        for number in range(len(self._workers), tuning.workers):
            self._workers.append(_Worker(number, self._command, self._memory))
            self._workers[-1].child.send(self._form)

    def begin(self, positions: np.ndarray) -> Rows:
        """Ask for the samples at these positions of the order, int64 `[k]`; do not wait for them.

        Nothing is cancelled: who has been asked writes to the slot until that is done.
        """
        slot, arrays = self._slots.take()
        num_rows = len(positions)  # fewer than the slot holds, where batches still grow
        arrays.pop(NUMBERS)[:num_rows] = self._locate(positions)
        arrays.pop(POSITIONS)[:num_rows] = positions
        parts = []
        for rows in cut_rows(len(positions), self._num_pieces):
            worker = self._workers[self._num_asked % len(self._workers)]
            self._num_asked += 1
            parts.append((rows.start, functools.partial(worker.answer, worker.ask(slot, arrays, rows))))
        return Rows(arrays, parts, self._layout)

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:  # so that all of them end at the same time
            worker.child.connection.close()
        for worker in self._workers:
            worker.child.end()
        os.close(self._memory)


class _Worker:
    """Worker process, from outside. It answers requests in their order."""

    def __init__(self, number: int, command: WorkerCommand, memory: int) -> None:
        environment = {**WORKER_ENVIRONMENT, **os.environ, "OMP_NUM_THREADS": "1"}  # as many workers as cores
        self.child = Child(command.command, [memory], environment)
        self._number = number
        self._on_opened = command.on_opened
        self._num_asked = 0
        self._num_answered = 0
        self._unanswered: deque[Arrays] = deque()
        """Arrays that it still writes to, also where nobody else wants them any more."""
        self.child.send(command.greeting)

    def ask(self, slot: int, arrays: Arrays, rows: slice) -> int:
        """Ask for some rows of a slot; return the number of the request."""
        self._unanswered.append(arrays)
        self.child.send({"slot": slot, "start": rows.start, "stop": rows.stop})
        self._num_asked += 1
        return self._num_asked

    def answer(self, request: int) -> Filled:
        """Wait for the answer to a request; those before it that nobody waited for are dropped.

        Raises what the worker raised, and RetryableError where it has ended.
        """
        while True:
            answer = receive(self.child.connection)
            if answer is None:
                what = f"data worker {self._number} (process {self.child.process_id})"
                raise self.child.make_lost_error(what, "data.workers", LOST_FIX)
            self._unanswered.popleft()
            self._num_answered += 1
            self._on_opened(answer.get("opened", []))
            if self._num_answered < request and "fatal" not in answer:
                continue
            if "error" in answer:
                raise error_from_dict(answer["error"])
            bad = {row: BadSample.from_dict(sample) for row, sample in answer["bad"]}
            return Filled(Counters(**answer["counters"]), bad)


def decode_rows(
    connection: Connection,
    memory: int,
    samples: Samples,
    decoding: Decoding,
    opened: Callable[[], list[Any]] = list,
) -> None:
    """Decode, in a worker, what it is asked for until the other end is gone.

    `memory`: descriptor of the rows. `opened`: what was opened since that was asked for last; plain data.
    """
    decoder, layout = Decoder(samples, decoding), receive(connection)
    if layout is None:
        return
    view = functools.cache(Slots(memory, **layout).view)
    while (request := receive(connection)) is not None:
        rows = slice(request["start"], request["stop"])
        into = {name: array[rows] for name, array in view(request["slot"]).items()}
        numbers, positions = into.pop(NUMBERS), into.pop(POSITIONS)
        try:
            filled = decoder.fill(into, numbers, positions)
        except KftrainError as error:
            send(connection, {"error": error.to_dict()})
            continue
        bad = [(row, sample.to_dict()) for row, sample in filled.bad.items()]
        send(connection, {"counters": vars(filled.counters), "bad": bad, "opened": opened()})
