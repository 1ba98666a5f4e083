"""Files of tensors in the format safetensors, in pieces: none is written or read as a whole.

    8 bytes      length of the header, little-endian
    header       JSON: name -> dtype, shape, and where its bytes begin and end; padded with spaces to 8 bytes
    the tensors  one after the other, row by row, without gaps

What is written is, byte for byte, what `safetensors.torch.save_file` writes. A header is accepted only if its tensors
fill the file exactly: so no header makes a reader allocate more memory than the file has bytes.
The format: https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kftrain.errors import CheckpointError

DTYPES = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Types by the format's names, in the order in which tensors lie in a file."""

PIECE_BYTES = 4 << 20
"""Most bytes of a file that are in memory at a time."""

MAX_HEADER_BYTES = 16 << 20
"""Largest header that is read: parsed JSON takes many times its size. One of 10,000 tensors has one megabyte."""

Read = Callable[[int], memoryview]
"""Function that returns exactly so many of the next bytes, valid until it is called again; its caller asks for at most
`PIECE_BYTES`."""

Part = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets of a part of a tensor, and its shape."""


@dataclass(frozen=True)
class TensorForm:
    """Type and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in a file."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def whole(self) -> Part:
        """The part that is the whole tensor."""
        return (0,) * len(self.shape), self.shape


@dataclass(frozen=True)
class StoredTensor:
    """The form of a tensor in a file, and its place there."""

    form: TensorForm
    start: int
    """Offset of the tensor's first byte in the file."""


def sort_names(forms: Mapping[str, TensorForm]) -> list[str]:
    """Sort the names of tensors as they lie in a file: by type, then by name."""
    order = {dtype: number for number, dtype in enumerate(DTYPES.values())}
    return sorted(forms, key=lambda name: (order[forms[name].dtype], name.encode()))


def encode_header(forms: Mapping[str, TensorForm]) -> bytes:
    """Encode the header of a file of these tensors, with its length in front."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    # The entry that `save_file` writes, too: it tells programs that know several frameworks whose tensors these are.
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name in sort_names(forms):
        form = forms[name]
        stop = start + form.num_bytes
        entries[name] = {"dtype": names[form.dtype], "shape": list(form.shape), "data_offsets": [start, stop]}
        start = stop
    content = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)
    return len(content).to_bytes(8, "little") + content


def contents_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor on the CPU, row by row."""
    content: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()  # numpy has no bf16
    return memoryview(content)


def read_header(read: Read, num_bytes: int, where: str) -> dict[str, StoredTensor]:
    """Read which tensors lie in a file of so many bytes, in their order. Raises CheckpointError."""
    length = int.from_bytes(read(8), "little") if num_bytes >= 8 else num_bytes
    # Before any of it is read: the length is whatever eight bytes somebody has written.
    if length > min(num_bytes - 8, MAX_HEADER_BYTES):
        raise _damage_error("its header is longer than it may be", where, length)
    content = b"".join(bytes(read(size)) for size in _cut_length(length, PIECE_BYTES))
    try:
        entries = json.loads(content, object_pairs_hook=_require_unique)
        entries.pop("__metadata__", None)
        stored = [(name, _parse_form(entry), *entry["data_offsets"]) for name, entry in entries.items()]
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise _damage_error("its header is none", where) from error
    tensors: dict[str, StoredTensor] = {}
    start = 0
    # Without gaps and overlaps: else a small file could name tensors of any size, or one range twice. By the end, too:
    # an empty tensor begins where the next one does, and must come before it.
    for name, form, begin, end in sorted(stored, key=lambda entry: (entry[2], entry[3])):
        if begin != start or end - begin != form.num_bytes:
            raise _damage_error("its header says other sizes than the tensors have", where, name)
        tensors[name] = StoredTensor(form, 8 + length + start)
        start = end
    if 8 + length + start != num_bytes:
        raise _damage_error("its header describes another number of bytes", where, start)
    return tensors


def row_range(form: TensorForm, part: Part) -> tuple[int, range]:
    """Return the bytes of one row, and the range of rows that must be read for a part, without a gap.

    A row is what lies behind one index of dim 0; one that the part cuts is read whole. A part that cuts dim 0 only is
    contiguous in the file: it is read as a range of single numbers, each of which counts as a row.
    """
    offsets, sizes = part
    if not form.shape:
        return form.dtype.itemsize, range(1)
    width = math.prod(form.shape[1:])
    first, last = offsets[0], offsets[0] + sizes[0]
    if 0 in sizes:
        return form.dtype.itemsize, range(0)
    if sizes[1:] == form.shape[1:]:
        return form.dtype.itemsize, range(first * width, last * width)
    return width * form.dtype.itemsize, range(first, last)


def copy_part(stored: TensorForm, part: Part, read: Read, target: torch.Tensor) -> None:
    """Read the rows of a part, and copy of each what the part has of it.

    `read` must begin with the first byte of the first row of `row_range`, and has passed the last one afterwards.
    `target`: contiguous, of the part's shape; numbers are converted to its type and moved to its device.
    """
    row_bytes, rows = row_range(stored, part)
    if not rows:
        return
    offsets, sizes = part
    is_contiguous = row_bytes == stored.dtype.itemsize
    shape = () if is_contiguous else stored.shape[1:]
    inner = () if is_contiguous else tuple(slice(a, a + n) for a, n in zip(offsets[1:], sizes[1:], strict=True))
    every = (slice(None), *inner)
    flat, done = target.view(-1) if is_contiguous else target, 0
    for num_rows in _cut_length(len(rows), max(1, PIECE_BYTES // row_bytes)):
        content = _read_joined(read, num_rows * row_bytes)
        piece = torch.frombuffer(content, dtype=stored.dtype).view(num_rows, *shape)
        flat[done : done + num_rows].copy_(piece[every])  # at once: the next `read` overwrites what `piece` looks at
        done += num_rows


def pass_over(num_bytes: int, read: Read) -> None:
    """Read bytes of which nothing is wanted."""
    for size in _cut_length(num_bytes, PIECE_BYTES):
        read(size)


def _read_joined(read: Read, num_bytes: int) -> Any:
    """Read the next bytes as one: a row may be longer than what `read` returns at a time."""
    if num_bytes <= PIECE_BYTES:
        return read(num_bytes)
    whole, done = bytearray(num_bytes), 0
    for size in _cut_length(num_bytes, PIECE_BYTES):
        whole[done : done + size] = read(size)
        done += size
    return whole


def _cut_length(length: int, step: int) -> Iterator[int]:
    """Yield the lengths of the pieces that a length is cut into."""
    for start in range(0, length, step):
        yield min(step, length - start)


def _require_unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    # json keeps the last of two, other readers may keep the first: one file would be two models.
    listed = list(pairs)
    entries = dict(listed)
    if len(entries) != len(listed):
        raise ValueError("a name stands twice")
    return entries


def _parse_form(entry: Any) -> TensorForm:
    numbers = [*entry["shape"], *entry["data_offsets"]]
    # By type, not isinstance: to Python `true` is an int.
    if not all(type(number) is int and 0 <= number < 2**62 for number in numbers) or len(entry["data_offsets"]) != 2:
        raise ValueError("no numbers")
    return TensorForm(DTYPES[entry["dtype"]], tuple(entry["shape"]))


def _damage_error(what: str, where: str, value: Any = None) -> CheckpointError:
    return CheckpointError(f"no safetensors file: {what}", where=where, value=value, fix="export the checkpoint again")
