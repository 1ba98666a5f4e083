"""The numbers of processes follow where they stand; what of a mesh leaves its nodes is named."""

import itertools
import os

import pytest
from helpers import ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain.parallel.shape import Shape
from kftrain.parallel.topology import Site, count_equal_nodes, describe_axes_across_nodes, order_by_site

anywhere = st.lists(st.builds(Site, st.sampled_from("abcd"), st.sampled_from(["", "x", "y"])), min_size=1, max_size=24)


def runs(values):
    """How often a value follows another one, in a list."""
    return 1 + sum(one != other for one, other in itertools.pairwise(values))


@settings(deadline=None, max_examples=50)
@given(anywhere)
def test_all_are_numbered_once_and_neighbours_stand_together(places):
    order = order_by_site(places)
    assert sorted(order) == list(range(len(places))) and order[0] == 0
    placed = [places[rank] for rank in order]
    racks, nodes = [place.rack for place in placed], [(place.rack, place.node) for place in placed]
    assert runs(racks) == len(set(racks)) and runs(nodes) == len(set(nodes))
    for node in set(nodes):
        members = [rank for rank in order if (places[rank].rack, places[rank].node) == node]
        assert members == sorted(members)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 4), st.sampled_from([1, 2, 4]), st.randoms(use_true_random=False))
def test_tensor_groups_stay_inside_their_nodes_whatever_order_the_pods_came_in(nodes, tensor, random):
    pods = [f"{number}" for number in range(nodes)]
    random.shuffle(pods)
    places = [Site(pod, "xy"[int(pod) % 2]) for pod in pods for _ in range(4)]
    shape = Shape(shard=4 * nodes // tensor, tensor=tensor)
    placed = [places[rank] for rank in order_by_site(places)]
    assert describe_axes_across_nodes(shape, placed) == []


@settings(deadline=None, max_examples=50)
@given(anywhere.filter(lambda places: len(places) % 2 == 0))
def test_data_ranks_are_each_somebodys_whatever_the_numbers(places):
    shape = Shape(shard=len(places) // 2, tensor=2)
    numbers = {rank: number for number, rank in enumerate(order_by_site(places))}
    data_ranks = [shape.data_rank(numbers[rank]) for rank in range(len(places))]
    assert sorted(data_ranks) == sorted(2 * list(range(len(places) // 2)))


def test_pods_of_two_racks_that_came_in_turns_are_numbered_rack_by_rack():
    places = [Site("a", "x"), Site("b", "y"), Site("c", "x"), Site("d", "y")]
    assert order_by_site(places) == [0, 2, 1, 3]


def test_an_axis_that_leaves_its_nodes_is_named():
    places = [Site("a"), Site("a"), Site("b"), Site("b")]
    (line,) = describe_axes_across_nodes(Shape(tensor=4), places)
    assert "tensor 4: 1 of 1 groups stand on several nodes" in line
    (line,) = describe_axes_across_nodes(Shape(replicate=1, shard=1, tensor=4), [Site("a", "x"), *places[1:]])
    assert "several racks" in line
    placed = [*places[:3], Site("c"), *places]
    (line,) = describe_axes_across_nodes(Shape(replicate=2, shard=4), placed)
    assert "shard 4: 2 of 2 groups" in line
    assert describe_axes_across_nodes(Shape(shard=4), places) == [], "what has one copy is sharded over all there is"
    assert describe_axes_across_nodes(Shape(replicate=2, shard=2), places) == []
    assert describe_axes_across_nodes(Shape(tensor=4), []) == [], "all processes are on one node"


@pytest.mark.parametrize(
    ("nodes", "count"),
    [("", 1), ("aaaa", 1), ("abcd", 1), ("aab", 1), ("aabb", 2), ("aabbcc", 3)],
)
def test_nodes_count_where_a_hierarchical_sum_saves_bytes(nodes, count):
    assert count_equal_nodes([Site(node) for node in nodes]) == count


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, Site("node 0")),
        ({"GROUP_RANK": "3"}, Site("node 3")),
        ({"GROUP_RANK": "3", "KFTRAIN_NODE_NAME": "worker-a", "KFTRAIN_RACK": "r1"}, Site("worker-a", "r1")),
    ],
)
def test_a_place_is_read_from_the_environment(environment, place):
    assert Site.of(environment) == place


def seen(world):
    return os.environ["RANK"], world.rank, [place.node for place in world.places], world.gather(os.environ["RANK"])


def test_processes_are_numbered_anew_when_they_meet():
    """Of four single nodes, told by their ranks, the first and the third stand in one rack."""
    environments = [
        {"LOCAL_WORLD_SIZE": "1", "KFTRAIN_NODE_NAME": f"n{rank}", "KFTRAIN_RACK": "xyxy"[rank]} for rank in range(4)
    ]
    answers = ranks.on(4, seen, environments=environments)
    assert [answer[:2] for answer in answers] == [("0", 0), ("1", 2), ("2", 1), ("3", 3)]
    assert {tuple(answer[2]) for answer in answers} == {("n0", "n2", "n1", "n3")}
    assert answers[0][3] == ["0", "2", "1", "3"]
