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

from kftrain.core.records import NumberedRecords, parse_number
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
    return documents.read(Watermark, uri) if parse_number(uri) else Watermark()


def find_watermark(folder: str, run_uri: str) -> str:
    """Return the entry at which the window of a run begins: the last one, or the one before where that is its own."""
    records = NumberedRecords(folder, read_watermark)
    number = records.last_number()
    return records.build_uri(number - (records.read(number).run_uri == run_uri))


def read_names(uri: str, source: str) -> frozenset[str]:
    """Read the names of all files of a source that were read up to an entry. Raises DataError."""
    names: set[str] = set()
    records, number = _find_records(uri)
    while number:
        entry = records.read(number)
        names.update(entry.files.get(source, ()))
        number = entry.before
    return frozenset(names)


def move_watermark(uri: str, ends: dict[str, str], files: dict[str, list[str]], run_uri: str) -> bool:
    """Add the entry after this one; False where another run has done so. Nothing happens the second time."""
    # The new entry takes in those that follow the number without its lowest one bit, as a carry does in a binary
    # counter: entry 8 holds the files of 1 to 8 and points at 0, entry 7 holds its own and points at 6.
    records, last = _find_records(uri)
    number, before = last + 1, last
    while before > number & (number - 1):
        entry = records.read(before)
        both = {**files, **entry.files}
        files = {name: sorted({*files.get(name, ()), *entry.files.get(name, ())}) for name in both}
        before = entry.before
    ends = {**read_watermark(uri).ends, **ends}
    entry = Watermark(run_uri=run_uri, ends=ends, files=files, before=before, time=time.time())
    return records.append(number, entry) or records.read(number).run_uri == run_uri


def _find_records(uri: str) -> tuple[NumberedRecords[Watermark], int]:
    """Return the entries in the folder of an entry, and its number."""
    return NumberedRecords(uri.rpartition("/")[0], read_watermark), parse_number(uri)
