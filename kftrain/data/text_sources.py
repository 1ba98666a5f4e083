"""Text as records: Python's own library, a folder of text files, JSON lines; UTF-8, read one record at a time."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from typing import Any

from kftrain import storage
from kftrain.data.files import FileEntry, list_files, reading_source
from kftrain.data.schema import Record
from kftrain.errors import DataError

TEXT_SUFFIXES = frozenset(
    (
        *(".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".html", ".htm"),
        *(
            ".py",
            ".pyi",
            ".c",
            ".h",
            ".cc",
            ".cpp",
            ".hpp",
            ".cs",
            ".java",
            ".kt",
            ".scala",
            ".js",
            ".jsx",
            ".ts",
            ".tsx",
        ),
        *(".go", ".rs", ".rb", ".php", ".swift", ".lua", ".pl", ".r", ".jl", ".sh", ".sql"),
    )
)
"""Files of a folder that count as text: prose and source code, by suffix in any case. Others are left out."""

STDLIB_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
"""What is installed or only for tests, and so differs between machines."""

BUILD_RECORD_PREFIX = "_sysconfigdata"
"""Modules of the standard library that hold the paths and flags of one build."""


class StdlibSource:
    """The running Python's standard library: one record per module, key = its path without `.py`."""

    def __init__(self, folder: str | None = None) -> None:
        self._folder = folder or sysconfig.get_paths()["stdlib"]

    def listing(self) -> list[dict[str, Any]]:
        """Names, sizes and times of the modules. Raises DataError where there are none."""
        return [entry.to_dict() for entry in self._entries()]

    def records(self) -> Iterator[Record]:
        """`{"text": bytes}` of each module, sorted."""
        for entry in sorted(self._entries(), key=lambda entry: entry.name.removesuffix(".py")):
            yield Record(entry.name.removesuffix(".py"), {"text": _read_text(entry)})

    def _entries(self) -> list[FileEntry]:
        return _some(list_files(self._folder, _is_module, STDLIB_SKIPPED_FOLDERS), self._folder, "modules (*.py)")


class TextFolderSource:
    """A folder of text files: one record per file, key = its path in the folder."""

    def __init__(self, uri: str) -> None:
        self._uri = uri

    def listing(self) -> list[dict[str, Any]]:
        """Names, sizes and times of the files. Raises DataError where there are none."""
        return [entry.to_dict() for entry in self._entries()]

    def records(self) -> Iterator[Record]:
        """`{"text": bytes}` of each file, sorted."""
        for entry in self._entries():
            yield Record(entry.name, {"text": _read_text(entry)})

    def _entries(self) -> list[FileEntry]:
        return _some(list_files(self._uri, is_text), self._uri, f"text files ({' '.join(sorted(TEXT_SUFFIXES))})")


class JsonLinesSource:
    """A `.jsonl` file or a folder of them: one record per line that is not blank, key = `<file>:<line number>`."""

    def __init__(self, uri: str, text_field: str) -> None:
        self._uri, self._text_field = uri, text_field

    def listing(self) -> list[dict[str, Any]]:
        """Names, sizes and times of the files. Raises DataError where there are none."""
        return [entry.to_dict() for entry in self._entries()]

    def records(self) -> Iterator[Record]:
        """All fields of each line, the text field as UTF-8 bytes under `text`.

        Raises DataError naming file and line.
        """
        for entry in self._entries():
            with reading_source(entry.uri), storage.open_read(entry.uri) as stream:
                for number, line in enumerate(stream, start=1):
                    if line.strip():
                        yield Record(f"{entry.name}:{number}", self._parse(line, f"{entry.uri}:{number}"))

    def _parse(self, line: bytes, where: str) -> dict[str, Any]:
        try:
            fields = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise DataError(f"not a line of JSON: {error}", where=where, fix="correct or delete the line") from error
        if not isinstance(fields, dict) or not isinstance(fields.get(self._text_field), str):
            keys = sorted(fields) if isinstance(fields, dict) else type(fields).__name__
            raise DataError(
                f"no text in field '{self._text_field}'", where=where, value=keys, fix="set data.text_field"
            )
        try:
            return {**fields, "text": fields[self._text_field].encode("utf-8")}
        except UnicodeEncodeError as error:
            raise DataError(f"not Unicode text: {error}", where=where, fix="correct or delete the line") from error

    def _entries(self) -> list[FileEntry]:
        return _some(list_files(self._uri, is_json_lines), self._uri, "files of JSON lines (*.jsonl)")


def is_text(name: str) -> bool:
    """Whether a file counts as text, by its suffix."""
    base = name.rsplit("/", 1)[-1].lower()
    return "." in base and "." + base.rsplit(".", 1)[-1] in TEXT_SUFFIXES


def is_json_lines(name: str) -> bool:
    """Whether a file counts as JSON lines, by its suffix."""
    return name.lower().endswith(".jsonl")


def _is_module(name: str) -> bool:
    return name.endswith(".py") and not name.rsplit("/", 1)[-1].startswith(BUILD_RECORD_PREFIX)


def _some(entries: list[FileEntry], where: str, what: str) -> list[FileEntry]:
    if not entries:
        raise DataError(f"the source has no {what}", where=where, fix="check data.source")
    return entries


def _read_text(entry: FileEntry) -> bytes:
    with reading_source(entry.uri):
        content = storage.read_bytes(entry.uri)
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"not UTF-8 text: {error.reason} at byte {error.start}", where=entry.uri, fix="convert it"
        ) from error
    return content
