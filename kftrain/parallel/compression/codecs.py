"""Forms in which numbers travel: rows of fp32 to rows of bytes, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from kftrain.parallel.formats import DTYPES

BLOCK_SIZE = 256
"""Numbers of a row that share a scale in int8; so 1.0156 bytes are sent of each number."""

LARGEST_CODE = 127

NO_NUMBER = 3
"""Code of what is not finite; the others are the sign, and 1."""


class Codec(Protocol):
    """A form in which numbers travel."""

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """Pack each row by itself: `[rows, n]` floating point -> `[rows, bytes]` uint8.

        A row with a number that is not finite comes back with one.
        """

    def unpack(self, packed: torch.Tensor, num_numbers: int) -> torch.Tensor:
        """Return what rows of bytes stand for, `[rows, bytes]` -> `[rows, num_numbers]` fp32."""


@dataclass(frozen=True)
class Rounded:
    """Numbers rounded to a format of two bytes."""

    dtype: torch.dtype

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Codec`."""
        return rows.to(self.dtype).view(torch.uint8)

    def unpack(self, packed: torch.Tensor, num_numbers: int) -> torch.Tensor:
        """See `Codec`."""
        return packed.view(self.dtype).float()


@dataclass(frozen=True)
class Int8Blocks:
    """A code of one byte for each number, and a scale in fp32 for each block: its largest number has the code 127.

    A row is the scales of its blocks, and then the codes; the last block is filled up with zeros.
    """

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Codec`."""
        filled = torch.nn.functional.pad(rows.float(), (0, -rows.shape[1] % BLOCK_SIZE))
        blocks = filled.view(len(rows), -1, BLOCK_SIZE)
        # Of a block with infinity the scale is infinity, of one with no number it is none: so is all that comes back.
        scales = blocks.abs().amax(2, keepdim=True) / LARGEST_CODE
        codes = (blocks / torch.where(scales == 0, 1.0, scales)).round_().to(torch.int8)
        return torch.cat([scales.flatten(1).view(torch.uint8), codes.flatten(1).view(torch.uint8)], 1)

    def unpack(self, packed: torch.Tensor, num_numbers: int) -> torch.Tensor:
        """See `Codec`."""
        num_blocks = packed.shape[1] // (4 + BLOCK_SIZE)
        scales = packed[:, : 4 * num_blocks].contiguous().view(torch.float32)
        codes = packed[:, 4 * num_blocks :].view(torch.int8).reshape(len(packed), -1, BLOCK_SIZE)
        return (codes * scales.unsqueeze(2)).view(len(packed), -1)[:, :num_numbers]


class Signs:
    """Signs in two bits each, for a number that is 0 has none."""

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Codec`; the length of a row is a multiple of four."""
        codes = torch.where(rows.isfinite(), rows.sign() + 1, NO_NUMBER).to(torch.uint8).view(len(rows), -1, 4)
        first, second, third, fourth = codes.unbind(2)
        return first | second << 2 | third << 4 | fourth << 6

    def unpack(self, packed: torch.Tensor, num_numbers: int) -> torch.Tensor:
        """See `Codec`."""
        codes = torch.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], 2).view(len(packed), -1)
        return torch.where(codes == NO_NUMBER, torch.nan, codes.float() - 1)


def make_codec(kind: str) -> Codec:
    """Return the codec of a configured kind."""
    return Int8Blocks() if kind == "int8" else Rounded(DTYPES[kind])
