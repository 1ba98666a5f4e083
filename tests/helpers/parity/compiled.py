"""What is compiled, counted; and another compiler in the place of torch's, which traces alike and generates no code."""

import contextlib

import torch
from helpers.parity.defects import patched

from kftrain.train import spmd_factory

MAX_GRAPHS = 4
"""Forward passes with and without gradients, each of one size and of any size."""

MAX_PIECES = 2
"""Pieces of a block around what is not compiled."""

TORCH_COMPILE = torch.compile


def has_compiler():
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


@contextlib.contextmanager
def counted(max_graphs=MAX_GRAPHS):
    """Blocks are compiled, and equal ones once: the number of graphs is bounded, beside that of `require_compiler`."""
    from torch._dynamo.utils import counters  # takes seconds, as all of the compiler

    torch._dynamo.reset()
    counters.clear()
    yield
    num_graphs = counters["stats"]["unique_graphs"] - 1
    assert 1 <= num_graphs <= max_graphs, num_graphs


def counted_in_pieces():
    """As `counted`, for blocks of which a part is not compiled."""
    return counted(MAX_GRAPHS * MAX_PIECES)


def without_code():
    """Nothing is compiled at all."""
    return patched(torch, "compile", lambda work, options: work)


@contextlib.contextmanager
def without_compiler():
    """As in an image that has none, and nothing compiled from before."""
    from torch._inductor import config as inductor
    from torch._inductor.utils import fresh_cache

    torch._dynamo.reset()
    with inductor.patch({"cpp.cxx": (None, "/no/such/compiler")}), fresh_cache():
        yield


@contextlib.contextmanager
def traced():
    """Blocks are traced and computed by operations of torch: no C++ is compiled, which takes a minute."""
    with counted_in_pieces(), patched(torch, "compile", lambda work, options: TORCH_COMPILE(work, backend="aot_eager")):
        yield


NUM_FORWARDS = 70
"""Of a run of 20 steps that is evaluated ten times, on 29 rows by six: five batches."""


@contextlib.contextmanager
def graphed(compile_with=lambda work, options: TORCH_COMPILE(work, backend="aot_eager")):
    """CUDA graphs without a GPU, which records nothing: torch is told to make them, and when each forward begins."""
    marks, handed_over = [], []

    def compile_block(work, options):
        handed_over.append(options)
        return compile_with(work, options)

    with (
        patched(spmd_factory, "require_graphs", lambda train, world: None),
        patched(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(1)),
        patched(torch, "compile", compile_block),
        counted_in_pieces(),
    ):
        yield
    asked = torch._inductor.list_mode_options("reduce-overhead")
    blocks = handed_over[1:]  # the first is the line that shows whether there is a compiler
    assert blocks and all(asked.items() <= options.items() for options in blocks), handed_over
    assert not asked.items() <= handed_over[0].items()
    assert len(marks) == NUM_FORWARDS, len(marks)


def graphed_by_code():
    """The same with torch's own compiler, which makes code for the CPU and no graphs."""
    return graphed(lambda work, options: TORCH_COMPILE(work, options=options))
