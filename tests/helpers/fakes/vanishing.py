"""A folder of which something goes just when it is listed."""

import os
import shutil
from pathlib import Path


class _Listed:
    """What `os.scandir` gives, with its entries in hand."""

    def __init__(self, entries):
        self._entries = iter(entries)

    def __iter__(self):
        return self._entries

    def __next__(self):
        return next(self._entries)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def close(self):
        pass


def vanish(monkeypatch, folder, gone, before=False):
    """Removes `gone` right after `folder` was listed the next time, or right before.

    Returns a list that holds `gone` once that has happened.
    """
    removed = []

    def remove():
        if not removed:
            removed.append(gone)
            shutil.rmtree(gone) if Path(gone).is_dir() else Path(gone).unlink()

    def wrapped(original, kept):
        def listing(path="."):
            is_meant = not isinstance(path, int) and os.path.realpath(path) == os.path.realpath(folder)
            if is_meant and before:
                remove()
            found = kept(original(path))
            if is_meant:
                remove()
            return found

        return listing

    monkeypatch.setattr(os, "listdir", wrapped(os.listdir, list))
    monkeypatch.setattr(os, "scandir", wrapped(os.scandir, lambda entries: _Listed(list(entries))))
    return removed
