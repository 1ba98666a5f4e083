"""Text as records: Python's own library, a folder of text files, JSON lines; UTF-8, read one record at a time."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from typing import BinaryIO

from kftrain.core import storage
from kftrain.data.file_content import checked_text, parse_json, with_text
from kftrain.data.schema import Record
from kftrain.sharding.sources.file_source import FileSource
from kftrain.sharding.sources.listing import SourceFile, reading_source
from kftrain.sharding.sources.pieces import Piece, make_whole_piece

TEXT_SUFFIXES = frozenset(
    (
        *(".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".html", ".htm"),
        *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cs", ".java", ".kt", ".scala"),
        *(".js", ".jsx", ".ts", ".tsx"),
        *(".go", ".rs", ".rb", ".php", ".swift", ".lua", ".pl", ".r", ".jl", ".sh", ".sql"),
    )
)
"""Files of a folder that count as text: prose and source code, by suffix in any case. Others are left out."""

STDLIB_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
"""Folders of what is installed or only for tests, and so differs between machines."""

BUILD_RECORD_PREFIX = "_sysconfigdata"
"""Modules of the standard library that hold the paths and flags of one build."""


class StdlibSource(FileSource):
    """The running Python's standard library: one record per module, key = its path without `.py`."""

    hides_underscores = False

    def __init__(self, folder: str | None = None) -> None:
        super().__init__(
            folder or sysconfig.get_paths()["stdlib"], _is_module, "modules (*.py)", STDLIB_SKIPPED_FOLDERS
        )

    def entries(self) -> list[SourceFile]:
        """Return the modules, sorted by their names without `.py`. Raises DataError where there are none."""
        return sorted(super().entries(), key=lambda entry: entry.name.removesuffix(".py"))

    def read_piece(self, piece: Piece) -> Iterator[Record]:
        """Yield `{"text": bytes}` of a module."""
        yield Record(piece.file.name.removesuffix(".py"), {"text": _read_text(piece.file)})


class TextFolderSource(FileSource):
    """A folder of text files: one record per file, key = its path in the folder."""

    hides_underscores = False

    def __init__(self, uri: str) -> None:
        what = f"text files ({' '.join(sorted(TEXT_SUFFIXES))})"
        super().__init__(uri, is_text, what, frozenset({"_temporary"}))

    def read_piece(self, piece: Piece) -> Iterator[Record]:
        """Yield `{"text": bytes}` of a file."""
        yield Record(piece.file.name, {"text": _read_text(piece.file)})


class JsonLinesSource(FileSource):
    """A `.jsonl` file or a folder of them: one record per line that is not blank, key = `<file>:<line number>`."""

    def __init__(self, uri: str, text_field: str) -> None:
        super().__init__(uri, is_json_lines, "files of JSON lines (*.jsonl)")
        self._text_field = text_field

    def pieces(self, file: SourceFile, target_bytes: int) -> Iterator[Piece]:
        """Yield ranges of lines.

        The lines of a file that is larger are counted: a record is known by its line's number.
        """
        if file.size_bytes <= target_bytes:
            yield make_whole_piece(file)
            return
        start, first = 0, 1
        for stop, num_lines in _find_line_ranges(file, target_bytes):
            yield Piece(file, start, stop, first, stop - start)
            start, first = stop, first + num_lines

    def read_piece(self, piece: Piece) -> Iterator[Record]:
        """Yield all fields of each line, the text field as UTF-8 bytes under `text`.

        Raises DataError naming file and line.
        """
        file = piece.file
        with reading_source(file.uri), storage.open_read(file.uri) as stream:
            for number, line in enumerate(_read_lines(stream, piece), start=piece.first):
                if line.strip():
                    where = f"{file.uri}:{number}"
                    fields = with_text(parse_json(line, where), self._text_field, where)
                    yield Record(f"{file.name}:{number}", fields)


def is_text(name: str) -> bool:
    """Tell whether a file counts as text, by its suffix."""
    base = name.rsplit("/", 1)[-1].lower()
    return "." in base and "." + base.rsplit(".", 1)[-1] in TEXT_SUFFIXES


def is_json_lines(name: str) -> bool:
    """Tell whether a file counts as JSON lines, by its suffix."""
    return name.lower().endswith(".jsonl")


def _is_module(name: str) -> bool:
    return name.endswith(".py") and not name.rsplit("/", 1)[-1].startswith(BUILD_RECORD_PREFIX)


def _read_lines(stream: BinaryIO, piece: Piece) -> Iterator[bytes]:
    position = stream.seek(piece.start)
    for line in stream:
        if piece.stop and position >= piece.stop:
            return
        position += len(line)
        yield line


def _find_line_ranges(file: SourceFile, target_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield end and number of lines of each range: the first end of a line after every `target_bytes`."""
    with reading_source(file.uri), storage.open_read(file.uri) as stream:
        position, num_lines, wanted = 0, 0, target_bytes
        while chunk := stream.read(storage.HASH_CHUNK_BYTES):
            taken = 0
            while position + len(chunk) > wanted and (end := chunk.find(b"\n", max(taken, wanted - position))) >= 0:
                yield position + end + 1, num_lines + chunk.count(b"\n", taken, end + 1)
                taken, num_lines, wanted = end + 1, 0, position + end + 1 + target_bytes
            num_lines += chunk.count(b"\n", taken)
            position += len(chunk)
        if position > wanted - target_bytes:
            yield position, num_lines + 1


def _read_text(entry: SourceFile) -> bytes:
    with reading_source(entry.uri):
        content = storage.read_bytes(entry.uri)
    return checked_text(content, entry.uri)
