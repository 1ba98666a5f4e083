"""Parquet files, read in batches of rows: memory holds a batch and a share of each column's compressed bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from kftrain.core import storage
from kftrain.data.file_content import load_library
from kftrain.data.schema import Record
from kftrain.errors import DataError
from kftrain.sharding.sources.file_source import FileSource
from kftrain.sharding.sources.listing import SourceFile, reading_source
from kftrain.sharding.sources.pieces import Piece, make_whole_piece
from kftrain.sharding.sources.tables import count_batch_rows, find_columns, iterate_rows

READ_BYTES = 32 << 20
"""Bytes that are read ahead of a file, all columns together; a row group may be far larger."""

MIN_COLUMN_READ_BYTES = 1 << 16


class ParquetSource(FileSource):
    """A `.parquet` file or a folder of them: one record per row, key = `<file>:<row number>`, from 1 on.

    Raises ConfigError where pyarrow is not installed.
    """

    def __init__(self, uri: str, text_field: str) -> None:
        super().__init__(uri, is_parquet, "Parquet files (*.parquet)")
        self._text_field = text_field

    def pieces(self, file: SourceFile, target_bytes: int) -> Iterator[Piece]:
        """Yield ranges of row groups. Raises DataError naming the file."""
        if file.size_bytes <= target_bytes:
            yield make_whole_piece(file)
            return
        with (
            reading_source(file.uri),
            storage.open_read(file.uri, read_ahead=False) as stream,
            _report_damage(file.uri),
        ):
            metadata = load_library("pyarrow.parquet").read_metadata(stream)
            groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        start = size = rows = 0
        first = 1
        for stop, row_group in enumerate(groups, start=1):
            size += sum(row_group.column(n).total_compressed_size for n in range(row_group.num_columns))
            rows += row_group.num_rows
            if size >= target_bytes or stop == len(groups):
                yield Piece(file, start, stop, first, size)
                start, size, rows, first = stop, 0, 0, first + rows

    def read_piece(self, piece: Piece) -> Iterator[Record]:
        """Yield all columns of each row, with `text` as UTF-8 bytes, or `image` as pixels and `label`.

        Raises DataError naming file and row.
        """
        with reading_source(piece.file.uri), storage.open_read(piece.file.uri, read_ahead=False) as stream:
            yield from self._read_records(piece, stream)

    def _read_records(self, piece: Piece, stream: BinaryIO) -> Iterator[Record]:
        entry, first = piece.file, piece.first

        def where(number: int) -> str:
            return f"{entry.uri}:{number}"

        with _report_damage(entry.uri):
            file, rows_per_batch = _open_parquet(stream)
            groups = range(piece.start, piece.stop) if piece.stop else None
            schema, batches = file.schema_arrow, file.iter_batches(rows_per_batch, groups, use_threads=False)
        columns = find_columns(schema, self._text_field, entry.uri)
        while True:
            with _report_damage(where(first)):
                batch = next(batches, None)
            if batch is None:
                return
            for number, row in iterate_rows(batch, first, where):
                yield columns.make_record(f"{entry.name}:{number}", row, "", where(number))
            first += batch.num_rows


def is_parquet(name: str) -> bool:
    """Tell whether a file counts as Parquet, by its suffix."""
    return name.lower().endswith(".parquet")


def _open_parquet(stream: BinaryIO) -> tuple[Any, int]:
    """Open a `pyarrow.parquet.ParquetFile`; return it, and how many of its rows make a batch."""
    parquet = load_library("pyarrow.parquet")
    metadata = parquet.read_metadata(stream)
    file = parquet.ParquetFile(
        stream,
        metadata=metadata,
        buffer_size=max(MIN_COLUMN_READ_BYTES, READ_BYTES // max(1, metadata.num_columns)),
        pre_buffer=False,  # or all that was read stays until the end
        page_checksum_verification=True,
    )
    num_bytes = sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
    return file, count_batch_rows(num_bytes, metadata.num_rows)


@contextlib.contextmanager
def _report_damage(where: str) -> Iterator[None]:
    """Turn what pyarrow raises for damaged content into a DataError; the operating system's own errors pass."""
    arrow = load_library("pyarrow")
    try:
        yield
    except (arrow.ArrowException, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DataError(
            f"cannot be read as Parquet: {error}", where=where, fix="it is damaged or cut off: write it again"
        ) from error
