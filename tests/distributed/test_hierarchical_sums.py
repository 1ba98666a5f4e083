"""Gradients of `ddp` that are summed within each node first: the same training, and fewer bytes between nodes."""

import numpy as np
import pytest
from helpers import two_nodes
from helpers.parity import rank as parity_rank
from helpers.parity import table as parity
from helpers.parity.oracle import STEPS
from helpers.parity.table import Refused, Row
from helpers.pool import Pool
from helpers.wire_counts import TOLERANCE, count_step_bytes

from kftrain.process.machine import NODE_NAME_ENV

pytestmark = pytest.mark.timeout(300, func_only=True)

TEXT = """
task: {kind: language_modeling, sequence_length: 8, tokenizer: bytes}
model: {kind: transformer, dim: 256, num_layers: 2, num_heads: 2}
train: {global_batch_size: 8}
"""
DDP = ("parallel.strategy=ddp",)
HIERARCHICAL = (*DDP, "parallel.hierarchical=true")
INT8 = "parallel.compression.kind=int8"
SMALL = "parallel.bucket_bytes=8192"
NODES = [{NODE_NAME_ENV: f"node-{rank // 2}", "LOCAL_WORLD_SIZE": 2, "LOCAL_RANK": rank % 2} for rank in range(4)]


@pytest.fixture(scope="module")
def nodes():
    """Four processes, two on each of two nodes."""
    pool = Pool(4, NODES)
    yield pool
    pool.close()


def train(nodes, *layout):
    answers = nodes.run(parity_rank.train, Row("", 4, layout).job)
    assert [answer.kind for answer in answers] == ["done"] * 4, answers
    return answers


@pytest.mark.parametrize("more", [(), (SMALL,)], ids=["one_bucket", "small_buckets"])
def test_it_is_the_bare_loop_and_the_flat_sum(nodes, more):
    answers = train(nodes, *HIERARCHICAL, *more)
    parity.check(Row("hierarchical", 4, HIERARCHICAL), answers)
    flat = train(nodes, *DDP, *more)[0].value
    # Sums are rounded in another order; by the last steps norms are off by 2e-6.
    for name, num_steps in (("loss", STEPS), ("gradient_norm", STEPS // 2)):
        ours, theirs = ([point[name] for point in history] for history in (answers[0].value.history, flat.history))
        np.testing.assert_allclose(ours[:num_steps], theirs[:num_steps], rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "layout",
    [("parallel.hierarchical=true",), (*HIERARCHICAL, "parallel.tensor=2"), (*HIERARCHICAL, INT8)],
    ids=["fsdp", "tensor", "compression"],
)
def test_other_sums_are_refused_in_one_line(pools, layout):
    parity.check_refusal(pools, Refused("", 2, layout, "hierarchical is of ddp alone"))


def count_sent(world, layouts):
    """Of each layout the bytes that a node sends to the other one in a step, as a share of those of the gradients."""
    tokens = np.random.default_rng(0).integers(0, 256, size=(64, 9)).astype(np.uint16)
    shares = []
    for layout in layouts:
        read = two_nodes.count_between_nodes
        sent, _, engine, _ = count_step_bytes(world, TEXT, layout, {"tokens": tokens}, read=read)
        size = 4 * sum(parameter.numel() for parameter in engine.model.parameters())
        shares.append(sent * two_nodes.PER_NODE / size)
    return shares


@pytest.mark.slow
def test_a_node_sends_to_others_what_it_would_if_it_were_one_process():
    try:
        flat, hierarchical = two_nodes.run(count_sent, [DDP, HIERARCHICAL])[0]
    except two_nodes.NoNetworksError as problem:
        pytest.skip(f"needs networks of its own: {problem}")
    print(f"\nof the bytes of gradients a node of two sends {hierarchical:.3f}, by a flat sum {flat:.3f}")
    num_nodes, num_processes = two_nodes.NUM_NODES, two_nodes.NUM_NODES * two_nodes.PER_NODE
    assert hierarchical == pytest.approx(2 * (num_nodes - 1) / num_nodes, rel=TOLERANCE)
    assert flat == pytest.approx(2 * (num_processes - 1) / num_processes, rel=TOLERANCE)
