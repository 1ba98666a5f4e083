"""The choice of a layout: worked examples, and properties against counts that share no code with it."""

import dataclasses
import functools
import itertools
from pathlib import Path

import pytest
from helpers.tensor_traffic import traffic_of
from helpers.wire import Step, bytes_sent
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain.models.sizes import count_parameters
from kftrain.models.transformer import Transformer
from kftrain.parallel import layout
from kftrain.parallel.layout import Machines, Work, choose_layout, describe_layouts

ROOT = Path(__file__).parents[3]
GIB = 2**30
NVLINK, ETHERNET, INFINIBAND = 300e9, 25e9 / 8, 400e9 / 8

ONE_BILLION = Work(1_000_000_000, 24, 2048 * 98, 2048, 512, 8, 2, 4, (1, 2, 4, 8))
SEVENTY_BILLION = Work(70_000_000_000, 80, 8192 * 322, 4096, 512, 1, 2, 4, (1, 2, 4, 8))

layouts = settings(derandomize=True, max_examples=25, deadline=None)


def machines(num_nodes, rate, gib=80.0, per_node=8, within=NVLINK):
    return Machines(num_nodes, per_node, gib * GIB, rate, within)


def chosen(where, work):
    """(name, exchange, replicate, shard, tensor) of the layout that is taken."""
    first = choose_layout(where, work)[0]
    assert first.why_not == ""
    return first.name, first.exchange, first.shape.replicate, first.shape.shard, first.shape.tensor


@pytest.mark.parametrize(
    ("where", "work", "expected"),
    [
        (machines(1, ETHERNET, per_node=1), ONE_BILLION, ("one process", "step", 1, 1, 1)),
        (machines(1, ETHERNET), ONE_BILLION, ("zero1", "step", 1, 8, 1)),
        (machines(2, ETHERNET), ONE_BILLION, ("hybrid zero1", "step", 2, 8, 1)),
        # As fast within a node as between them: then one group of all sends the least.
        (machines(2, 8 * NVLINK), ONE_BILLION, ("zero1", "step", 1, 16, 1)),
        # 8 GB of state and no room for whole gradients of several micro batches
        (machines(2, ETHERNET, gib=10), ONE_BILLION, ("hybrid zero2", "step", 2, 8, 1)),
        (machines(2, ETHERNET, gib=5), ONE_BILLION, ("hybrid fsdp", "micro_batch", 2, 8, 1)),
        (machines(8, INFINIBAND), SEVENTY_BILLION, ("fsdp", "micro_batch", 1, 64, 1)),
        # One micro batch a step, which a process of fsdp alone cannot have: 64 of them share 16 rows by tensor.
        (
            machines(8, INFINIBAND),
            dataclasses.replace(SEVENTY_BILLION, batch_rows=16),
            ("fsdp x tensor", "step", 1, 16, 4),
        ),
    ],
)
def test_worked_examples(where, work, expected):
    assert chosen(where, work) == expected


def test_two_nodes_with_ethernet_by_hand():
    """Parameters 2 GB in bf16, gradients 4 GB in fp32; a node has 8 processes and 3.125 GB/s."""
    first = choose_layout(machines(2, ETHERNET), ONE_BILLION)[0]
    assert first.between_nodes_bytes == pytest.approx(8 * 2 * 0.5 * 4e9 / 8)  # each process its eighth of the gradients
    assert first.within_node_bytes == pytest.approx(7 / 8 * (2e9 + 4e9))
    assert first.seconds == pytest.approx(4e9 / 3.125e9 + 5.25e9 / 300e9)
    assert first.state_bytes == pytest.approx(4e9 * 4 / 8 + 2e9 + 4e9)


@st.composite
def jobs(draw):
    nodes, per_node = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 2, 4, 8]))
    within, ratio = draw(st.sampled_from([1e9, 30e9, 300e9])), draw(st.sampled_from([0.01, 0.3, 1.0, 8.0]))
    tensor = draw(st.sampled_from([(1,), (1, 2), (1, 2, 4, 8)]))
    work = Work(
        num_parameters=draw(st.integers(10**6, 10**10)),
        num_layers=draw(st.integers(1, 64)),
        num_features=draw(st.integers(1, 10**5)),
        places_of_row=draw(st.integers(1, 8192)),
        batch_rows=draw(st.integers(1, 512)),
        micro_batch_rows=draw(st.integers(0, 16)),
        compute_bytes=draw(st.sampled_from([2, 4])),
        tensor_sizes=tensor,
    )
    gib = draw(st.sampled_from([1.0, 8.0, 80.0, 10**4]))
    return Machines(nodes, per_node, gib * GIB, within * ratio, within), work


def fits(candidate, where, work):
    share = candidate.shape.replicate * candidate.shape.shard
    return candidate.state_bytes <= where.device_bytes / 2 and share <= work.batch_rows


def count_between(candidate, where, work):
    """Bytes that the busiest node sends, edge by edge of each ring."""
    sent = [0.0] * where.num_nodes
    for axis, amount in layout.count_bytes_sent(candidate, work).items():
        for ranks in candidate.shape.groups([axis]):
            for one, following in itertools.pairwise([*ranks, ranks[0]]):
                if one // where.processes_per_node != following // where.processes_per_node:
                    sent[one // where.processes_per_node] += amount
    return max(sent)


@layouts
@given(jobs())
def test_no_other_that_fits_is_faster(job):
    candidates = choose_layout(*job)
    fitting = [candidate for candidate in candidates if fits(candidate, *job)]
    if fitting:
        assert candidates[0] in fitting
        assert candidates[0].seconds == min(candidate.seconds for candidate in fitting)
    reasons = [candidate.why_not for candidate in candidates]
    assert (reasons[0] == "") == bool(fitting) and all(reasons[1:])


@layouts
@given(jobs())
def test_over_a_very_slow_link_no_other_that_fits_sends_less(job):
    where, work = job
    where = dataclasses.replace(where, between_nodes_rate=where.within_node_rate * 1e-9)
    candidates = choose_layout(where, work)
    least = min((c.between_nodes_bytes for c in candidates if fits(c, where, work)), default=None)
    assert least is None or candidates[0].between_nodes_bytes == pytest.approx(least, rel=1e-6)


@layouts
@given(jobs(), st.sampled_from(["between_nodes_rate", "within_node_rate", "device_bytes"]), st.floats(1.0, 100.0))
def test_better_machines_never_take_more_time(job, what, factor):
    where, work = job
    better = dataclasses.replace(where, **{what: getattr(where, what) * factor})
    now, then = choose_layout(where, work)[0], choose_layout(better, work)[0]
    if fits(now, where, work):
        assert then.seconds <= now.seconds * (1 + 1e-9)


@layouts
@given(jobs(), st.floats(0.01, 100.0))
def test_only_the_ratio_of_the_rates_matters(job, factor):
    where, work = job
    faster = dataclasses.replace(
        where, between_nodes_rate=where.between_nodes_rate * factor, within_node_rate=where.within_node_rate * factor
    )
    now, then = choose_layout(where, work)[0], choose_layout(faster, work)[0]
    assert then.seconds * factor == pytest.approx(now.seconds)


@layouts
@given(jobs())
def test_bytes_between_nodes_are_those_of_the_rings(job):
    for candidate in choose_layout(*job):
        assert candidate.between_nodes_bytes == pytest.approx(count_between(candidate, *job))


@layouts
@given(jobs())
def test_bytes_along_each_axis_are_those_of_the_formulas_that_the_kernel_confirms(job):
    """`helpers.wire`, which other tests hold against the bytes that a network has counted."""
    _, work = job
    for candidate in choose_layout(*job):
        num_parameters = work.num_parameters / candidate.shape.tensor
        num_micro_batches = layout._count_micro_batches(candidate.shape, work)[0]
        step = Step(work.compute_bytes * num_parameters, work.reduce_bytes * num_parameters, num_micro_batches)
        expected = bytes_sent(candidate.shape, candidate.strategy, candidate.exchange, step)
        actual = layout.count_bytes_sent(candidate, work)
        assert {axis: actual[axis] for axis in expected if axis != "tensor"} == pytest.approx(
            {axis: amount for axis, amount in expected.items() if axis != "tensor"}
        )


@functools.cache
def parity_rows():
    """Name -> line of the layouts in the table of what is proven."""
    lines = (ROOT / "docs" / "parallelism.md").read_text().splitlines()
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines if line.count(" | ") >= 4}


@layouts
@given(jobs())
def test_only_layouts_of_the_parity_table_are_candidates(job):
    rows = parity_rows()
    for candidate in choose_layout(*job):
        assert candidate.name in rows, candidate
        if candidate.exchange == "micro_batch":
            assert "exchange of each micro batch" in rows[candidate.name], candidate


@pytest.mark.parametrize("options", [{}, {"tie_embeddings": True}, {"num_kv_heads": 2, "ffn_dim": 96}])
def test_sizes_of_a_transformer_are_those_of_the_model(options):
    given_options = {
        "dim": 64,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 0,
        "ffn_dim": 0,
        "tie_embeddings": False,
    }
    options = {**given_options, **options, "vocab_size": 512}
    model = Transformer(**options, sequence_length=128)
    assert count_parameters(options) == sum(parameter.numel() for parameter in model.parameters())
    exact = traffic_of(model, 2, True, True).split
    assert options["dim"] * (4 * options["num_layers"] + 2) == pytest.approx(exact.num_features, rel=0.1)


def test_the_table_gives_a_reason_for_each():
    where = machines(2, ETHERNET, gib=10)
    candidates = choose_layout(where, ONE_BILLION)
    head, *lines = describe_layouts(candidates, where)
    assert head == "layouts on 2 x 8 processes, 5.37 GB of state, 3.12 GB/s a node, 300 GB/s a process"
    assert len(lines) == len(candidates) and lines[0].endswith(": taken")
    reasons = {line.rpartition(": ")[2] for line in lines}
    assert reasons == {"taken", "its state is more than 5.37 GB", "not faster than the 1.33 s of the first"}


def test_processes_that_would_have_no_rows_are_named():
    alone = dataclasses.replace(ONE_BILLION, batch_rows=2)
    candidates = choose_layout(machines(1, ETHERNET), alone)
    assert candidates[0].shape.num_data_ranks <= 2
    assert any(candidate.why_not == "8 processes cannot share 2 rows" for candidate in candidates)
