"""Text as records: Python's own library, a folder of text files, JSON lines; UTF-8, read one record at a time."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator

from kftrain import storage
from kftrain.data.schema import Record
from kftrain.data.sources.decoding import checked_text, parse_json, with_text
from kftrain.data.sources.file_source import FileSource
from kftrain.data.sources.listing import SourceFile, reading_source

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


class StdlibSource(FileSource):
    """The running Python's standard library: one record per module, key = its path without `.py`."""

    def __init__(self, folder: str | None = None) -> None:
        super().__init__(
            folder or sysconfig.get_paths()["stdlib"], _is_module, "modules (*.py)", STDLIB_SKIPPED_FOLDERS
        )

    def records(self) -> Iterator[Record]:
        """`{"text": bytes}` of each module, sorted."""
        for entry in sorted(self.entries(), key=lambda entry: entry.name.removesuffix(".py")):
            yield Record(entry.name.removesuffix(".py"), {"text": _read_text(entry)})


class TextFolderSource(FileSource):
    """A folder of text files: one record per file, key = its path in the folder."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri, is_text, f"text files ({' '.join(sorted(TEXT_SUFFIXES))})")

    def records(self) -> Iterator[Record]:
        """`{"text": bytes}` of each file, sorted."""
        for entry in self.entries():
            yield Record(entry.name, {"text": _read_text(entry)})


class JsonLinesSource(FileSource):
    """A `.jsonl` file or a folder of them: one record per line that is not blank, key = `<file>:<line number>`."""

    def __init__(self, uri: str, text_field: str) -> None:
        super().__init__(uri, is_json_lines, "files of JSON lines (*.jsonl)")
        self._text_field = text_field

    def records(self) -> Iterator[Record]:
        """All fields of each line, the text field as UTF-8 bytes under `text`.

        Raises DataError naming file and line.
        """
        for entry in self.entries():
            with reading_source(entry.uri), storage.open_read(entry.uri) as stream:
                for number, line in enumerate(stream, start=1):
                    if line.strip():
                        where = f"{entry.uri}:{number}"
                        fields = with_text(parse_json(line, where), self._text_field, where)
                        yield Record(f"{entry.name}:{number}", fields)


def is_text(name: str) -> bool:
    """Whether a file counts as text, by its suffix."""
    base = name.rsplit("/", 1)[-1].lower()
    return "." in base and "." + base.rsplit(".", 1)[-1] in TEXT_SUFFIXES


def is_json_lines(name: str) -> bool:
    """Whether a file counts as JSON lines, by its suffix."""
    return name.lower().endswith(".jsonl")


def _is_module(name: str) -> bool:
    return name.endswith(".py") and not name.rsplit("/", 1)[-1].startswith(BUILD_RECORD_PREFIX)


def _read_text(entry: SourceFile) -> bytes:
    with reading_source(entry.uri):
        content = storage.read_bytes(entry.uri)
    return checked_text(content, entry.uri)
