"""Rounds of islands under any schedule: each gradient is in one update, all make the same ones, and nobody is stuck."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain.server.rounds import RoundRules, Rounds

pytestmark = pytest.mark.timeout(60)

LAST = 12


class Island:
    """What an island knows: the rounds that it has announced, and the updates that it was told of."""

    def __init__(self, number):
        self.number = number
        self.round = 0
        self.is_away = True
        self.updates = []
        self.met = []


class Run:
    """Islands and the rounds on a server, moved one event at a time; time stands still unless it is moved."""

    def __init__(self, rules, meetings):
        self.rules = rules
        self.meetings = meetings
        self.rounds = Rounds(rules, 0)
        self.islands = [Island(number) for number in range(rules.num_islands)]
        self.now = 0.0
        self.wishes = set()

    def announce(self, island):
        island.round, island.is_away = island.round + 1, False
        assert self.rounds.find_flaw(island.number, island.round) == ""
        is_meeting = island.round in self.meetings or island.round == LAST
        self.rounds.announce(island.number, island.round, is_meeting, island.number in self.wishes)
        self.wishes.discard(island.number)
        self.merge()

    def merge(self):
        while self.rounds.merge(self.now):
            pass

    def answer(self):
        """Lets every island go on that may; the islands that did."""
        free = [one for one in self.islands if not one.is_away and self.rounds.is_answered(one.number)]
        for one in free:
            one.updates += self.rounds.list_updates(len(one.updates))
            one.is_away = True
            if self.rounds.is_meeting(one.round):
                one.met.append(one.round)
        return free

    def check(self):
        merged = [member for members in self.rounds.list_updates(0) for member in members]
        assert len(merged) == len(set(merged)), "a gradient is in two updates"
        rounds = [one.round for one in self.islands]
        for one in self.islands:
            assert one.updates == self.rounds.list_updates(0)[: len(one.updates)]
            own = [number for island, number in merged if island == one.number]
            assert own == list(range(1, len(own) + 1)), "out of order"
            if one.is_away:
                assert len(own) == one.round, "goes on without its own gradient"
                bound = self.rules.max_ahead
                assert bound is None or one.round - min(rounds) <= bound


@st.composite
def rules(draw):
    num_islands = draw(st.integers(2, 4))
    quorum = draw(st.integers(1, num_islands))
    max_ahead = None if quorum == num_islands else draw(st.sampled_from([1, 2, 5]))
    return RoundRules(num_islands, quorum, draw(st.sampled_from([0.0, 2.0])), max_ahead)


@settings(max_examples=300, deadline=None)
@given(
    rules=rules(),
    meetings=st.sets(st.integers(1, LAST)),
    events=st.lists(st.tuples(st.sampled_from(["step", "step", "step", "time", "wish"]), st.integers(0, 3))),
)
def test_each_gradient_is_in_one_update_and_all_end_in_the_same_place(rules, meetings, events):
    run = Run(rules, meetings)
    for what, number in events:
        island = run.islands[number % rules.num_islands]
        if what == "step" and island.is_away and island.round < LAST:
            run.announce(island)
        elif what == "wish":
            run.wishes.add(island.number)
        else:
            run.now += 1.0
            run.merge()
        run.answer()
        run.check()
    finish(run)
    updates = run.rounds.list_updates(0)
    assert all(one.updates == updates for one in run.islands)
    assert sum(map(len, updates)) == LAST * rules.num_islands
    # All have met in the same rounds, and what was wanted was done.
    assert len({tuple(one.met) for one in run.islands}) == 1
    assert {*meetings, LAST} <= set(run.islands[0].met)


def finish(run):
    """Lets whoever may take steps to the end. Where nobody may, and time alone moves nothing, it is a deadlock."""
    while any(one.round < LAST or not one.is_away for one in run.islands):
        ready = [one for one in run.islands if one.is_away and one.round < LAST]
        if ready:
            run.announce(min(ready, key=lambda one: one.round))
        run.now += 100.0
        run.merge()
        assert run.answer() or ready, "nobody can go on"
        run.check()


def test_a_meeting_holds_all_updates_that_came_before_it_and_none_that_did_not():
    rounds = Rounds(RoundRules(2, 1, 0.0, 5), 0)
    rounds.announce(0, 1, is_meeting=False, wants_meeting=False)
    assert rounds.merge(0.0) and rounds.is_answered(0)
    rounds.announce(0, 2, is_meeting=True, wants_meeting=False)
    assert rounds.merge(0.0) and not rounds.is_answered(0)
    rounds.announce(1, 1, is_meeting=False, wants_meeting=False)
    assert rounds.merge(0.0) and rounds.is_answered(1) and not rounds.is_answered(0)
    rounds.announce(1, 2, is_meeting=True, wants_meeting=False)
    assert rounds.merge(0.0) and rounds.is_answered(0) and rounds.is_answered(1)
    assert rounds.list_updates(0) == [[(0, 1)], [(0, 2)], [(1, 1)], [(1, 2)]]


def test_who_wants_to_meet_meets_the_others_in_the_next_round_that_none_has_left():
    rounds = Rounds(RoundRules(2, 1, 0.0, 5), 0)
    for number in (1, 2, 3):
        rounds.announce(0, number, is_meeting=False, wants_meeting=False)
        assert rounds.merge(0.0) and rounds.is_answered(0)
    rounds.announce(1, 1, is_meeting=False, wants_meeting=True)
    assert [number for number in range(9) if rounds.is_meeting(number)] == [4]
    rounds.announce(1, 1, is_meeting=False, wants_meeting=True)  # once more, over another connection
    assert not rounds.is_meeting(5)


def test_a_quorum_waits_for_the_grace_and_all_need_none():
    rounds = Rounds(RoundRules(3, 2, 1.5, 5), 0)
    rounds.announce(0, 1, is_meeting=False, wants_meeting=False)
    assert not rounds.merge(10.0) and rounds.count_grace(10.0) is None
    rounds.announce(1, 1, is_meeting=False, wants_meeting=False)
    assert not rounds.merge(20.0) and rounds.count_grace(21.0) == 0.5
    assert not rounds.merge(21.4) and rounds.merge(21.5)
    for island, number in [(0, 2), (1, 2), (2, 1)]:
        rounds.announce(island, number, is_meeting=False, wants_meeting=False)
    assert rounds.merge(22.0)
    assert rounds.list_updates(1) == [[(0, 2), (1, 2), (2, 1)]]


@pytest.mark.parametrize(("island", "number", "flaw"), [(2, 1, "no island 2"), (0, 2, "follows 0"), (0, -1, "follows")])
def test_what_cannot_be_is_a_flaw(island, number, flaw):
    assert flaw in Rounds(RoundRules(2, 2, 0.0, None), 0).find_flaw(island, number)


@pytest.mark.parametrize("max_ahead", [1, 2, 5])
def test_the_bound_is_sharp(max_ahead):
    rounds = Rounds(RoundRules(2, 1, 0.0, max_ahead), 0)
    for number in range(1, max_ahead + 2):
        rounds.announce(0, number, is_meeting=False, wants_meeting=False)
        assert rounds.merge(0.0) and rounds.is_answered(0) == (number <= max_ahead)
    rounds.announce(1, 1, is_meeting=False, wants_meeting=False)
    assert rounds.is_answered(0)
