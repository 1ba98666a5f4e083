"""A disk that is full at a chosen byte, without a disk."""

import errno
import os
import pathlib


class FullFile:
    """A file on a disk that has room for so many bytes."""

    def __init__(self, stream, num_bytes):
        self._stream = stream
        self._left = num_bytes

    def write(self, content):
        """As a file writes: what there is room for, then the error."""
        size = memoryview(content).nbytes
        if size > self._left:
            self._stream.write(memoryview(content)[: self._left])
            self._left = 0
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._left -= size
        return self._stream.write(content)

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._stream.close()


def fill(monkeypatch, part, num_bytes):
    """Files whose names contain `part` find room for so many bytes."""
    before = pathlib.Path.open

    def limited(path, mode="r", *arguments, **options):
        stream = before(path, mode, *arguments, **options)
        return FullFile(stream, num_bytes) if part in path.name and set(mode) & set("wx") else stream

    monkeypatch.setattr(pathlib.Path, "open", limited)
