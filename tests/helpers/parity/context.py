"""Cases of the axis `context`: long enough rows, packed documents, and the bare loop with a plain mask for them."""

import contextlib
import functools
import math

import numpy as np
import torch
from helpers.models.context import Own
from helpers.parity.defects import patched
from helpers.parity.oracle import BASE, PADDING, VOCABULARY, Case, Llama
from helpers.parity.rank import new_loader

from kftrain import config
from kftrain.data.schema import CLUSTER
from kftrain.evaluate.score import score
from kftrain.models import attention
from kftrain.models.transformer import RotaryEmbedding
from kftrain.parallel.mesh import Mesh
from kftrain.parallel.sequences import SequenceCut
from kftrain.parallel.shape import Shape
from kftrain.tasks import build_task
from kftrain.train import probe_split, session

LENGTH = 16
DOCUMENT = 256
"""Id that starts a document, of the tokenizer `bytes`."""

LONG = BASE.replace("sequence_length: 8", f"sequence_length: {LENGTH}")


@functools.cache
def long_rows():
    """`tokens` `[29, 17]`: with starts of documents everywhere, and padding at the end of some."""
    generator = np.random.default_rng(5)
    tokens = generator.integers(97, 123, (29, LENGTH + 1)).astype(np.uint16)
    tokens[generator.random(tokens.shape) < 0.2] = DOCUMENT
    for row in range(0, 29, 3):
        tokens[row, 5 + row % 11 :] = PADDING
    return {"tokens": tokens}


class DocumentsLlama(Llama):
    """Attends within documents, by a mask of places x places, and counts positions from their starts."""

    def forward(self, tokens):
        number, length = (tokens == DOCUMENT).cumsum(1), tokens.shape[1]
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        self.hidden = (number[:, :, None] != number[:, None, :]) | later
        self.positions = torch.stack(
            [torch.tensor([int((row[:place] == row[place]).sum()) for place in range(len(row))]) for row in number]
        )
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = x + self.attend(layer, layer.input_layernorm(x))
            inner = layer.post_attention_layernorm(x)
            x = x + layer.mlp.down_proj(torch.nn.functional.silu(layer.mlp.gate_proj(inner)) * layer.mlp.up_proj(inner))
        return self.lm_head(self.model.norm(x))

    def attend(self, layer, x):
        rows, length, dim = x.shape
        width = dim // layer.heads
        part = layer.self_attn
        query = self.turned(part.q_proj(x).view(rows, length, layer.heads, width))
        key, value = (
            projected.view(rows, length, layer.kv_heads, width).repeat_interleave(layer.heads // layer.kv_heads, 2)
            for projected in (part.k_proj(x), part.v_proj(x))
        )
        scores = torch.einsum("bihe,bjhe->bhij", query, self.turned(key)) / math.sqrt(width)
        shares = torch.softmax(scores.masked_fill(self.hidden[:, None], -math.inf), -1)
        return part.o_proj(torch.einsum("bhij,bjhe->bihe", shares, value).reshape(rows, length, dim))

    def turned(self, x):
        """`rotated` at the positions of this batch."""
        places = torch.arange(x.shape[0])[:, None], self.positions
        angles = torch.outer(torch.arange(x.shape[1]), 10_000.0 ** (-torch.arange(0, x.shape[3], 2) / x.shape[3]))
        turn = torch.polar(torch.ones_like(angles.float()), angles.float())[places[1]][:, :, None, :]
        turned = torch.complex(*x.chunk(2, -1)) * turn
        return torch.cat([turned.real, turned.imag], -1)


def one_kv_head():
    return Llama(kv_heads=1)


def four_kv_heads():
    return Llama(kv_heads=4)


def documents_one_kv_head():
    return DocumentsLlama(kv_heads=1)


DOCUMENTS = ("task.attention=documents",)
ONE_HEAD = ("model.num_kv_heads=1",)

ROWS = Case("long rows", data=long_rows, base=LONG)
ONE = Case("one key-value head", ONE_HEAD, one_kv_head, long_rows, base=LONG)
FOUR = Case("four key-value heads", ("model.num_kv_heads=4",), four_kv_heads, long_rows, base=LONG)
PACKED = Case("documents", DOCUMENTS, DocumentsLlama, long_rows, base=LONG)
PACKED_ONE = Case("documents, one key-value head", (*DOCUMENTS, *ONE_HEAD), documents_one_kv_head, long_rows, base=LONG)


# -- a model of one's own ----------------------------------------------------------------------------------------------

OWN_BASE = "\n".join(line for line in LONG.splitlines() if not line.startswith("model:"))


def own_network():
    return Own(VOCABULARY, LENGTH, DOCUMENT)


def own(name="own model", *overrides):
    return Case(name, ("model.kind=helpers.models.context:Own", *overrides), own_network, long_rows, base=OWN_BASE)


OWN = own()
PLANLESS = own("no plan", "model.kind=helpers.models.context:Planless")


def six_places():
    return {"tokens": long_rows()["tokens"][:, :7]}


SIX = Case("six places", data=six_places, base=LONG)


def flawed(flaw):
    return own(flaw, f"model.flaw={flaw}")


# -- evaluation --------------------------------------------------------------------------------------------------------


class Validation:
    """Rows in memory, of which two are a group."""

    def __init__(self, arrays):
        self.arrays = {**arrays, CLUSTER: -np.arange(len(next(iter(arrays.values()))))}
        self.num_samples = len(self.arrays[CLUSTER])

    def read_range(self, start, stop):
        return {name: rows[start:stop] for name, rows in self.arrays.items()}, self.group_of(np.arange(start, stop))

    def group_of(self, rows):
        return rows // 2

    def place_of(self, row):
        return str(row)


def evaluate(world, job):
    """The scores of a row's first weights, as an evaluation between two steps measures them; on the first process."""
    resolved = config.parse(job.text, list(job.overrides))
    mesh, task = Mesh(resolved.parallel.shape(world.size), world), build_task(resolved.task)
    with contextlib.closing(new_loader(resolved, task, mesh, job.data())) as loader:
        engine, _ = session.build(resolved, task, loader, mesh)
        return score(engine.model, task, Validation(job.data()), mesh, 4)


# -- broken on purpose -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def unnoticed(*breaks):
    """Breaks something, and the dry run, which would notice it."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(probe_split, "require_same_as_whole", lambda *settings: None))
        for owner, name, value in breaks:
            stack.enter_context(patched(owner, name, value))
        yield


def turned_by_part(rotary, positions, like, forward=RotaryEmbedding.forward):
    length = positions.shape[-1]
    return forward(rotary, torch.arange(length).expand_as(positions), like)


def positions_of_a_part():
    """Each process counts the positions of its places from 0."""
    return unnoticed((RotaryEmbedding, "forward", turned_by_part))


def spans_within_chunks(*arguments, spans=attention.list_spans):
    return [span._replace(before=slice(span.diagonal.start, span.diagonal.start)) for span in spans(*arguments)]


def mask_cut_at_chunks():
    """Queries do not see what stands in their document before their chunk."""
    return unnoticed((attention, "list_spans", spans_within_chunks))


def mask_of_rows():
    """Gathered keys are attended to across documents."""

    def spans(num_rows, chunks, documents, list_spans=attention.list_spans):
        return list_spans(num_rows, chunks, None)

    return unnoticed((attention, "list_spans", spans))


def mask_of_other_chunks():
    """Queries are taken for those of places in the order of the processes."""

    def chunks(cut, length):
        width = length // (2 * cut.size)
        return [range((2 * cut.place + n) * width, (2 * cut.place + n + 1) * width) for n in (0, 1)]

    before = SequenceCut.take_part

    def take(cut, whole, dim):
        with patched(SequenceCut, "list_chunks", LIST_CHUNKS):
            return before(cut, whole, dim)

    return unnoticed((SequenceCut, "list_chunks", chunks), (SequenceCut, "take_part", take))


LIST_CHUNKS = SequenceCut.list_chunks


def places_in_the_order_of_processes():
    """What the processes send each other is joined one after the other, not in the order of the sequence."""

    def join(cut, parts, dim):
        return parts.movedim(0, dim).flatten(dim, dim + 1)

    return unnoticed((SequenceCut, "join_parts", join))


def rows_counted_twice():
    """Each process that shares rows counts their loss terms."""
    return unnoticed((Shape, "counts_rows", lambda shape, rank: True))


def loss_of_one_part():
    """The loss of the first process's places is taken for that of all."""
    return unnoticed((Shape, "counts_loss", Shape.counts_rows))
