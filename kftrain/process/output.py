"""The output of several processes: to the console, line by line and with their names, and complete into files.

Each process writes both its streams into one pipe, in the order in which it writes them, and the process that started
them reads all pipes in one thread. No line is torn or held back: torchrun's own `--tee` writes from a thread per stream
into one buffer, which on two processes tears lines, and shows them seconds later wherever the console is no terminal.
A full disk costs the files and a console that nobody reads costs its lines, never the training.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import selectors
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from kftrain.core.printable import printable
from kftrain.core.progress import to_log
from kftrain.run.log_size import MAX_LOG_BYTES, shorten_log

OUTPUT_ENV = "KFTRAIN_OUTPUT_FOLDER"
"""Variable with the folder of the pipes, each called by its process's local rank."""

READ_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 14
"""Bytes without a newline beyond which a line goes to the console in pieces."""

MAX_WAITING_CHARACTERS = 4 << 20
"""Characters that may wait for a console that is not read; later lines are left out, and a note says so."""

NOTE = "[{} lines are only in the log files: nobody read them here]"

MAX_BATCH_LINES = 256
"""Number of waiting lines that a console writes at a time."""

LOOK_SECONDS = 0.1
"""Seconds for which the reading thread may not notice that the processes have ended."""

DRAIN_SECONDS = 5.0
"""Seconds that a console has to take the last lines; counted in slices, so that a machine that pauses loses none."""

PIPE_BYTES = 1 << 16
"""Bytes that a pipe holds, where the system does not say it."""


def redirect_output() -> None:
    """Send everything that this process prints, from Python and from C, into its pipe, if somebody reads one."""
    folder = os.environ.get(OUTPUT_ENV)
    if not folder:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    pipe = os.open(os.path.join(folder, os.environ["LOCAL_RANK"]), os.O_WRONLY)
    os.dup2(pipe, 1)
    os.dup2(pipe, 2)
    os.close(pipe)
    for stream in (sys.stdout, sys.stderr):  # each line at once, for a process that is killed, and in one piece
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(line_buffering=True, write_through=False)


class Output:
    """A block in which the output of processes is shown on the console and kept in files.

    Args:
        folder: An empty folder for pipes and files.
        names: Names of the processes, such as `rank-3`, in the order of their local ranks.
        named: Whether each line on the console begins with its process's name.
    """

    def __init__(self, folder: Path, names: Iterable[str], named: bool) -> None:
        self._selector = selectors.DefaultSelector()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="output")
        self._console = Console(_write_to_console, MAX_WAITING_CHARACTERS, NOTE)
        self.folder = folder
        self.logs = {name: folder / f"{name}.log" for name in names}
        """Name -> the file that holds what the process printed, byte for byte."""
        self._sources = [
            _Source(folder / str(index), log, f"[{name.replace('-', ' ')}] " if named else "", self._console)
            for index, (name, log) in enumerate(self.logs.items())
        ]

    def __enter__(self) -> Output:
        for source in self._sources:
            self._selector.register(source.pipe, selectors.EVENT_READ, source)
        self._thread.start()
        return self

    def __exit__(self, *caught: object) -> None:
        self._ended.set()
        self._thread.join()
        self._selector.close()
        for source in self._sources:
            source.close()
        for _ in range(round(DRAIN_SECONDS / LOOK_SECONDS)):
            if self._console.flush(LOOK_SECONDS):
                break
        self._console.close()

    def _run(self) -> None:
        while not self._ended.is_set():
            for key, _ in self._selector.select(LOOK_SECONDS):
                key.data.read_some()
        for source in self._sources:
            source.drain()


class _Source:
    """The pipe of a process, its file, and the line that it has begun."""

    def __init__(self, pipe: Path, log: Path, prefix: str, console: Console) -> None:
        os.mkfifo(pipe)
        # Open for writing too: a pipe without a writer would be at its end, again and again.
        self.pipe = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
        self._log = _Log(log)
        self._prefix = prefix
        self._console = console
        self._begun = b""

    def drain(self) -> None:
        """Take what the process has left in the pipe, and no more: a child that outlives it may go on writing."""
        left = fcntl.fcntl(self.pipe, fcntl.F_GETPIPE_SZ) if hasattr(fcntl, "F_GETPIPE_SZ") else PIPE_BYTES
        with contextlib.suppress(BlockingIOError):
            while left > 0:
                left -= self.read_some()

    def read_some(self) -> int:
        """Take some bytes from the pipe; return their number. Raises BlockingIOError where there are none."""
        data = os.read(self.pipe, READ_BYTES)
        self._log.write(data)
        *lines, self._begun = (self._begun + data).split(b"\n")
        if len(self._begun) > MAX_LINE_BYTES:
            lines.append(self._begun)
            self._begun = b""
        self._show(lines)
        return len(data)

    def close(self) -> None:
        os.close(self.pipe)
        self._log.close()
        if self._begun:
            self._show([self._begun])

    def _show(self, lines: list[bytes]) -> None:
        self._console.show([self._prefix + line.decode(errors="replace") for line in lines])


class Console:
    """Shows lines, made printable, from a thread of its own: a reader that is slow or gone holds up nobody else.

    Args:
        write: Writes lines, which have no newlines. Once it raises BrokenPipeError nothing more is written.
        limit: Number of characters that may wait; lines beyond it are left out. None: `show` itself writes, no thread.
        note: Line in the place of those that were left out, with `{}` for their number.
    """

    def __init__(self, write: Callable[[list[str]], object], limit: int | None, note: str = "") -> None:
        self._write = write
        self._limit = limit
        self._note = note
        self._waiting: list[str] = []
        self._num_characters = 0
        """Characters of the lines that wait or are being written, newlines too."""
        self._num_left_out = 0
        self._is_closed = False
        self._changed = threading.Condition()
        self._turn = threading.Lock()
        self._thread: threading.Thread | None = None
        self.broken: BrokenPipeError | None = None
        """The error of the write that found that nobody reads any more."""

    def show(self, lines: list[str]) -> None:
        """Hand lines to the thread that writes them. Without a limit, write them; BrokenPipeError if nobody reads."""
        if self._limit is None:
            with self._turn:
                self._write_lines(lines)
            if self.broken is not None:
                raise self.broken
            return
        with self._changed:
            if self._num_characters > self._limit:
                self._num_left_out += len(lines)
            elif self.broken is None:
                self._add_note()
                self._add(lines)

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until all lines are written; return whether they are, after `timeout_seconds` at the latest."""
        with self._changed:
            self._add_note()
            return self._changed.wait_for(lambda: not self._num_characters, timeout_seconds)

    def close(self) -> None:
        """End the thread once it has written what waits."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _add_note(self) -> None:
        if self._num_left_out:
            self._add([self._note.format(self._num_left_out)])
            self._num_left_out = 0

    def _add(self, lines: list[str]) -> None:
        self._waiting += lines
        self._num_characters += sum(len(line) + 1 for line in lines)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="console")
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                # Few at a time: while a slow reader takes all that waits, every new line would be left out.
                lines, self._waiting = self._waiting[:MAX_BATCH_LINES], self._waiting[MAX_BATCH_LINES:]
            if not lines:
                return
            self._write_lines(lines)  # without the lock: this may block for ever, and `show` must not
            with self._changed:
                self._num_characters -= sum(len(line) + 1 for line in lines)
                self._changed.notify_all()

    def _write_lines(self, lines: list[str]) -> None:
        try:
            if self.broken is None:
                self._write([printable(line) for line in lines])
        except BrokenPipeError as error:
            self.broken = error


class _Log:
    """A process's log file: it loses its middle where it grows too long, and ends at the first error of the disk."""

    def __init__(self, path: Path) -> None:
        self._stream = path.open("w+b", buffering=0)
        self._path = path
        self._size = 0
        self._broken = False

    def write(self, data: bytes) -> None:
        if self._broken:
            return
        try:
            self._stream.write(data)
            self._size += len(data)
            if self._size > MAX_LOG_BYTES:
                self._cut_middle()
        except OSError as error:
            self._broken = True
            to_log(f"warning: {self._path.name} ends here: {error}")

    def close(self) -> None:
        self._stream.close()

    def _cut_middle(self) -> None:
        self._stream.seek(0)
        kept = shorten_log(self._stream.read())
        self._stream.seek(0)
        self._stream.truncate()
        self._stream.write(kept)
        self._size = len(kept)


def _write_to_console(lines: list[str]) -> None:
    """Write whole lines. A console that has gone away must not stop the processes: they would wait for a reader."""
    try:
        sys.stdout.buffer.write("".join(f"{line}\n" for line in lines).encode())
        sys.stdout.buffer.flush()
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
