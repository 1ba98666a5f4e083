"""The log file of `kftrain run`: everything that the pipeline prints, as far as the disk has room for it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from kftrain.errors import ConfigError


class Log:
    """A file whose disk may be full: that costs the lines which find no room, and neither the run nor its summary."""

    def __init__(self, stream: BinaryIO, path: Path, warn: Callable[[str], None]) -> None:
        """`stream` is not buffered, so that a line which could not be written is not tried again at the end."""
        self._stream = stream
        self._warn = warn
        self.path = path
        self._failed = False

    def write(self, text: str) -> None:
        """Appends; says so once where it cannot."""
        try:
            self._stream.write(text.encode(errors="replace"))
        except OSError as error:
            if not self._failed:
                self._failed = True
                self._warn(f"warning: {self.path} has gaps from here on: {error.strerror}")


@contextlib.contextmanager
def opened(folder: Path, name: str, warn: Callable[[str], None]) -> Iterator[Log]:
    """A new log file `logs/<time>-<name>.log` below `folder`. Raises ConfigError where there can be none."""
    path = folder / "logs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("wb", buffering=0)
    except OSError as error:
        raise ConfigError(
            f"the log file cannot be written: {error}",
            where="--workdir",
            value=str(folder),
            fix="use a folder that can be written and has room",
        ) from error
    with stream:
        yield Log(stream, path, warn)
