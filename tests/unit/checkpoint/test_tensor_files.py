"""Our safetensors files against those of the library that defines the format, and headers that lie."""

import io
import json
import tracemalloc

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain.checkpoint import tensor_files
from kftrain.checkpoint.tensor_files import DTYPES, TensorForm
from kftrain.errors import CheckpointError


def form_of(tensor):
    return TensorForm(tensor.dtype, tuple(tensor.shape))


def written(tensors):
    """The bytes of a file, as it is written."""
    forms = {name: form_of(tensor) for name, tensor in tensors.items()}
    contents = (bytes(tensor_files.contents_of(tensors[name])) for name in tensor_files.sort_names(forms))
    return tensor_files.encode_header(forms) + b"".join(contents)


def reader_of(content, piece_bytes=None):
    stream = io.BytesIO(content)

    def read(num_bytes):
        assert piece_bytes is None or num_bytes <= piece_bytes
        found = bytearray(stream.read(num_bytes))
        assert len(found) == num_bytes, "read beyond the end"
        return memoryview(found)

    return read, stream


def numbers(dtype, shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    top = 2 if dtype == torch.bool else 120
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, top, (count,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


EVERY_KIND = {
    **{f"z{26 - number}.é": numbers(dtype, (3, 2), number) for number, dtype in enumerate(DTYPES.values())},
    **{f"a{number}": numbers(dtype, (5,), 40 + number) for number, dtype in enumerate(DTYPES.values())},
    "scalar": torch.tensor(3.0),
    "empty": torch.zeros(0, 3),
    'q"\\\u0001\n/': torch.ones(3, 5),
}


@pytest.mark.parametrize("tensors", [EVERY_KIND, {}, {"w": torch.ones(7, 3).t()}])
def test_a_file_is_what_safetensors_writes_byte_for_byte(tensors):
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    assert written(tensors) == safetensors.torch.save(contiguous, metadata={"format": "pt"})


def test_a_header_is_read_as_safetensors_reads_it():
    content = safetensors.torch.save(EVERY_KIND)
    found = tensor_files.read_header(reader_of(content)[0], len(content), "here")
    assert {name: each.form for name, each in found.items()} == {n: form_of(t) for n, t in EVERY_KIND.items()}
    for name, each in found.items():
        own = content[each.start : each.start + each.form.num_bytes]
        assert own == bytes(tensor_files.contents_of(EVERY_KIND[name]))


@st.composite
def parts(draw):
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(draw(st.integers(0, size - start)) for size, start in zip(shape, offsets, strict=True))
    return shape, (offsets, sizes)


@given(parts(), st.sampled_from([torch.float32, torch.bfloat16, torch.int64]), st.integers(8, 64))
@settings(max_examples=300, deadline=None)
def test_a_part_is_read_from_its_rows_in_pieces(case, dtype, piece_bytes):
    shape, part = case
    whole = numbers(dtype, shape)
    offsets, sizes = part
    expected = whole[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))]
    row_bytes, rows = tensor_files.row_range(form_of(whole), part)
    content = bytes(tensor_files.contents_of(whole))[rows.start * row_bytes : rows.stop * row_bytes]
    target = torch.full(sizes, 9, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_files, "PIECE_BYTES", piece_bytes)
        read, stream = reader_of(content, piece_bytes)
        tensor_files.copy_part(form_of(whole), part, read, target)
    assert torch.equal(target, expected.double()) and stream.read() == b""


def with_header(header, data=b""):
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(content).to_bytes(8, "little") + content + data


def entry(shape, start, stop, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


LIES = {
    "a length beyond the file": (2**62).to_bytes(8, "little") + b"{}",
    "a length as long as memory": (2**40).to_bytes(8, "little") + b"{}" * 100,
    "shorter than a length": b"\0\0",
    "nothing": b"",
    "no JSON": with_header(b"\xff\xfe{"),
    "deep JSON": with_header(b"[" * 100_000),
    "a list": with_header([]),
    "a text": with_header('"x"'),
    "a huge shape": with_header({"w": entry([2**40], 0, 4)}, b"1234"),
    "a shape beyond 64 bits": with_header({"w": entry([2**70, 0], 0, 0)}),
    "sizes whose product wraps around": with_header({"w": entry([2**32, 2**32], 0, 0)}),
    "a negative size": with_header({"w": entry([-1, -1], 0, 4)}, b"1234"),
    "sizes that are no numbers": with_header({"w": entry([True], 0, 4)}, b"1234"),
    "a fraction": with_header({"w": entry([1.0], 0, 4)}, b"1234"),
    "an unknown type": with_header({"w": entry([1], 0, 4, "F99")}, b"1234"),
    "a type that is a list": with_header({"w": entry([1], 0, 4, [])}, b"1234"),
    "bytes before the data": with_header({"w": entry([1], -4, 0)}, b"1234"),
    "bytes behind the end": with_header({"w": entry([2], 0, 8)}, b"1234"),
    "bytes that two tensors share": with_header({"a": entry([1], 0, 4), "b": entry([1], 0, 4)}, b"1234"),
    "a gap": with_header({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, b"1" * 12),
    "more bytes than tensors": with_header({"a": entry([1], 0, 4)}, b"1" * 8),
    "a name twice": with_header(b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"a":{}}'),
    "three offsets": with_header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 4]}}, b"1234"),
    "no entry": with_header({"a": None}),
}


@pytest.mark.parametrize("content", LIES.values(), ids=LIES.keys())
def test_a_header_that_lies_is_one_line_and_no_memory(content):
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="no safetensors file") as caught:
            tensor_files.read_header(reader_of(content)[0], len(content), "here")
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()
    assert "\n" not in caught.value.line
