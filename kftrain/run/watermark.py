"""Up to when a schedule has trained on its sources, and on which files: entries that are created once and never change.

    <root>/schedules/<name>/watermarks/<n>.json     who has trained      -> the window of the next run

Entry n is created by a run whose window began at entry n - 1, exclusively: of several such runs one moves the
watermark, all others leave it, and it never goes back. An entry is known by its URI; that of number 0 is no file, but
what there is before the first training. An entry names the files that were read since an earlier one, `before`: what
lies between is merged as a binary counter does it, so all files are found in as many entries as the number has bits.
"""

from __future__ import annotations

import time

from pydantic import Field

from kftrain.core import storage
from kftrain.core.storage import number_of
from kftrain.run import documents
from kftrain.run.documents import Document


class Watermark(Document):
    """`<n>.json`: all of some sources that lies before an instant has been trained on."""

    run_uri: str = ""
    """URI of the run that has trained."""
    ends: dict[str, str] = Field(default_factory=dict)
    """Source -> the instant, in RFC 3339."""
    files: dict[str, list[str]] = Field(default_factory=dict)
    """Source -> the names of its files that were first read after the entry `before`."""
    before: int = 0
    time: float = 0.0


class WindowFiles(Document):
    """`window.json` in a run's folder: of each source, the files of its window that no run before has read."""

    files: dict[str, list[str]]


def read_watermark(uri: str) -> Watermark:
    """Read an entry; that of number 0 is empty. Raises DataError where it is missing or damaged."""
    return documents.read(Watermark, uri) if number_of(uri) else Watermark()


def find_watermark(folder: str, run_uri: str) -> str:
    """Return the entry at which the window of a run begins: the last one, or the one before where that is its own."""
    last = storage.join(folder, f"{storage.last_number(folder)}.json")
    return _beside(last, number_of(last) - (read_watermark(last).run_uri == run_uri))


def read_names(uri: str, source: str) -> frozenset[str]:
    """Read the names of all files of a source that were read up to an entry. Raises DataError."""
    names: set[str] = set()
    while number_of(uri):
        entry = read_watermark(uri)
        names.update(entry.files.get(source, ()))
        uri = _beside(uri, entry.before)
    return frozenset(names)


def move_watermark(uri: str, ends: dict[str, str], files: dict[str, list[str]], run_uri: str) -> bool:
    """Add the entry after this one; False where another run has done so. Nothing happens the second time."""
    # The new entry takes in those that follow the number without its lowest one bit, as a carry does in a binary
    # counter: entry 8 holds the files of 1 to 8 and points at 0, entry 7 holds its own and points at 6.
    number, before = number_of(uri) + 1, number_of(uri)
    while before > number & (number - 1):
        entry = read_watermark(_beside(uri, before))
        both = {**files, **entry.files}
        files = {name: sorted({*files.get(name, ()), *entry.files.get(name, ())}) for name in both}
        before = entry.before
    ends = {**read_watermark(uri).ends, **ends}
    entry = Watermark(run_uri=run_uri, ends=ends, files=files, before=before, time=time.time())
    try:
        storage.create_json(_beside(uri, number), entry.to_dict())
    except FileExistsError:
        return read_watermark(_beside(uri, number)).run_uri == run_uri
    return True


def _beside(uri: str, number: int) -> str:
    return f"{uri.rpartition('/')[0]}/{number}.json"
