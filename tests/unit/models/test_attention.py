"""Attention by spans against softmax over a plain mask of places x places, and what it allocates."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kftrain.models.attention import CausalAttention, attend_by_kernels, list_spans, locate_documents
from kftrain.models.transformer import Transformer

START = 7
CHUNKS = {
    "all places": [range(24)],
    "front and end": [range(4), range(20, 24)],
    "middle": [range(8, 12), range(12, 16)],
}


def tokens_with_documents(rows, length):
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    tokens[0, [3, 4, 11, 22]] = START
    tokens[1, 0] = START  # a document that starts with its row, and ends with it
    tokens[2, length // 2 :] = START  # documents of one token
    return tokens


def by_mask(query, key, value, places, starts):
    """Softmax over all places, of which a mask leaves what a token may see."""
    repeats, every = query.shape[1] // key.shape[1], torch.arange(key.shape[2])
    scores = torch.einsum("bhie,bhje->bhij", query, key.repeat_interleave(repeats, 1)) / math.sqrt(query.shape[3])
    visible = every <= places[:, None]
    if starts is not None:
        visible = visible & (every >= starts[:, places, None])
        visible = visible[:, None]
    shares = scores.masked_fill(~visible, -math.inf).softmax(-1)
    return torch.einsum("bhij,bhje->bhie", shares, value.repeat_interleave(repeats, 1))


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("kind", ["rows", "documents"])
@pytest.mark.parametrize("way", ["spans", "kernels"])
def test_outputs_and_gradients_are_those_of_a_plain_mask(way, kind, num_kv_heads, chunks):
    generator = torch.Generator().manual_seed(0)
    places = torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in chunks])
    shapes = (3, 4, len(places), 6), (3, num_kv_heads, 24, 6), (3, num_kv_heads, 24, 6)
    heads = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    starts = locate_documents(tokens_with_documents(3, 24), START)[1] if kind == "documents" else None
    weight = torch.randn(shapes[0], generator=generator, dtype=torch.float64)
    expected = by_mask(*heads, places, starts)
    if way == "spans":
        found = CausalAttention().attend_chunks(*heads, chunks, starts)
    else:
        bounds = None if starts is None else [[*sorted(set(row.tolist())), 24] for row in starts]
        found = attend_by_kernels(*heads, list_spans(3, chunks, bounds))
    torch.testing.assert_close(found, expected)
    for own, theirs in zip(
        torch.autograd.grad(found, heads, weight), torch.autograd.grad(expected, heads, weight), strict=True
    ):
        torch.testing.assert_close(own, theirs)


def test_in_bf16_a_span_is_as_near_to_the_exact_output_as_one_kernel():
    generator = torch.Generator().manual_seed(0)
    exact = [torch.randn(2, 2, 64, 16, generator=generator) for _ in range(3)]
    chunks, places = [range(16, 48)], torch.arange(16, 48)
    expected = by_mask(exact[0][:, :, 16:48], *exact[1:], places, None)
    rounded = [heads.bfloat16() for heads in exact]
    found = CausalAttention().attend_chunks(rounded[0][:, :, 16:48], *rounded[1:], chunks)
    kernel = torch.nn.functional.scaled_dot_product_attention(*rounded, is_causal=True)[:, :, 16:48]
    assert (found - expected).square().mean().sqrt() <= 1.5 * (kernel - expected).square().mean().sqrt()


def test_positions_count_from_the_start_of_each_document():
    positions, starts = locate_documents(tokens_with_documents(3, 24), START)
    assert positions[0, 0, :12].tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4, 5, 6, 0]
    assert starts[0, :12].tolist() == [0, 0, 0, 3, *[4] * 7, 11]
    assert positions[2, 0].tolist() == [*range(12), *[0] * 12]


class NothingLarge(TorchDispatchMode):
    """Refuses results with as many elements as there are pairs of places."""

    def __init__(self, limit):
        super().__init__()
        self.limit = limit
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.largest = max(self.largest, leaf.numel(), leaf.untyped_storage().nbytes() // leaf.itemsize)
                assert leaf.numel() < self.limit, (function, leaf.shape)
        return result


def test_documents_make_nothing_of_the_size_of_places_x_places():
    length = 4096
    model = Transformer(vocab_size=64, document_token=START, attention="documents", dim=32, num_layers=1, num_heads=2)
    tokens = torch.randint(0, 64, (1, length), generator=torch.Generator().manual_seed(0))
    with NothingLarge(length * length // 8) as watch:
        model(tokens).square().sum().backward()
    assert watch.largest >= length * 64, "it has seen the logits"
