"""Cuts against all cuts there are; bubbles against a simulation of torch's own order of actions."""

import itertools

import pytest
from helpers import bubble
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

from kftrain.errors import ConfigError
from kftrain.parallel import stages

SIZES = [(name, p, turns * p) for name in stages.SCHEDULES for p in (2, 3, 4) for turns in (1, 2, 3, 8)]
ALL_SIZES = [(name, p, m) for name, p, m in SIZES if stages.is_schedulable(name, m, p)]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 5))
def test_a_cut_has_the_least_largest_stage_and_then_the_least_sum_of_squares(costs, num_stages):
    if len(costs) < num_stages:
        with pytest.raises(ConfigError, match=f"too few for {num_stages} stages.*at most {len(costs)}"):
            stages.cut_pieces(costs, num_stages)
        return
    found = stages.cut_pieces(costs, num_stages)
    assert [number for of in found for number in of] == list(range(len(costs))) and all(found)
    sizes = [sum(costs[number] for number in of) for of in found]
    inner = itertools.combinations(range(1, len(costs)), num_stages - 1)
    cuts = [[sum(costs[a:b]) for a, b in itertools.pairwise((0, *edges, len(costs)))] for edges in inner]
    assert (max(sizes), sum(size**2 for size in sizes)) == min((max(of), sum(c**2 for c in of)) for of in cuts)


@pytest.mark.parametrize("name", stages.SCHEDULES)
def test_each_process_has_the_stages_that_torch_gives_it(name):
    schedule = stages.SCHEDULES[name]
    style = "v" if schedule.is_folded else "loop"
    of = generate_stage_to_rank_mapping(4, 4 * schedule.stages_per_process, style=style)
    for place in range(4):
        assert stages.list_stages(name, place, 4) == [stage for stage, rank in of.items() if rank == place]
    assert {stage: stages.find_process(name, stage, 4) for stage in of} == of


@pytest.mark.parametrize(("name", "p", "m"), ALL_SIZES)
def test_the_estimated_bubble_is_that_of_torchs_order_where_stages_cost_the_same(name, p, m):
    orders = bubble.order_of(name, m, p)
    num_stages = stages.SCHEDULES[name].stages_per_process * p
    seconds, works = bubble.simulate(orders, [0.25] * num_stages)
    for work in works:
        assert 1 - work / seconds == pytest.approx(stages.estimate_bubble(name, m, p))


def test_a_stage_that_costs_more_makes_all_others_wait():
    orders = bubble.order_of("1f1b", 8, 2)
    seconds, works = bubble.simulate(orders, [1.0, 3.0])
    # The second stage works all the time but for the first forward pass and the last backward pass of the first one.
    assert works == [24.0, 72.0] and seconds == 72.0 + 1.0 + 2.0


@pytest.mark.parametrize(
    ("name", "num_micro_batches", "num_processes", "said"),
    [
        ("1f1b", 3, 4, "1f1b over 4 processes needs at least 4 micro batches.*3 micro batches.*there are 4, 5 or more"),
        ("zbv", 7, 4, "needs at least 8 micro batches.*there are 8, 9"),
        ("interleaved", 5, 2, "equal rounds.*there are 6, 8"),
        ("interleaved", 33, 2, "equal rounds.*there are 34, 36"),
    ],
)
def test_too_few_micro_batches_are_refused_with_numbers_that_would_do(name, num_micro_batches, num_processes, said):
    with pytest.raises(ConfigError, match=said):
        stages.require_micro_batches(name, num_micro_batches, num_processes)


@pytest.mark.parametrize(("name", "p", "m"), ALL_SIZES)
def test_what_torch_can_schedule_is_not_refused(name, p, m):
    stages.require_micro_batches(name, m, p)
