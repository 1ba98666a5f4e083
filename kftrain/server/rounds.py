"""The rounds of islands: whose outer gradients make which update, where not all wait for each other.

An island announces a round when the servers have its outer gradient of it, and waits for an answer. Once `quorum`
islands wait, and all do or `grace_seconds` are over, the gradients that are in no update yet make the next one. An
answer names all updates since the one before. So all islands move by the same updates in the same order, and each
gradient is in one update; where the quorum is all islands, an update is a round of all (Douillard et al. 2023).

In some rounds all islands meet: nobody goes on before all gradients up to there are in updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kftrain.server.clock import may_begin

Member = tuple[int, int]
"""An outer gradient: its island, and its round."""


@dataclass(frozen=True)
class RoundRules:
    """The rules of `train.outer`."""

    num_islands: int
    quorum: int
    """Islands that wait before there is an update without the others."""
    grace_seconds: float
    """Seconds that an update waits for the others then."""
    max_ahead: int | None
    """Rounds that an island may be ahead of the slowest one; None: as many as there are."""


class Rounds:
    """The rounds of all islands. Nothing here waits, or looks at a clock: `now` is any that does not go back."""

    def __init__(self, rules: RoundRules, first_round: int) -> None:
        """Begin after `first_round` rounds of all islands, whose updates have no members any more."""
        self._rules = rules
        self.announced = [first_round] * rules.num_islands
        """The last round of each island whose gradient is there."""
        self._merged = list(self.announced)
        self._updates: list[Sequence[Member]] = [()] * first_round
        self._meetings: set[int] = set()
        self._quorum_since: float | None = None

    def find_flaw(self, island: int, number: int) -> str:
        """Describe why a round cannot be announced; empty if it can, or was already."""
        if not 0 <= island < self._rules.num_islands:
            return f"there is no island {island}"
        follows = number - self.announced[island] in (0, 1)
        return "" if follows else f"round {number} of island {island} follows {self.announced[island]}"

    def announce(self, island: int, number: int, is_meeting: bool, wants_meeting: bool) -> None:
        """Note that the gradient of a round is there. Twice is as once.

        `is_meeting`: all meet in it, and all say so. `wants_meeting`: all are to meet soon.
        """
        self.announced[island] = number
        if is_meeting:
            self._meetings.add(number)
        elif wants_meeting and not any(meeting >= number for meeting in self._meetings):
            # The first one that nobody has left behind; whoever waits in it already meets the others there.
            gone = [last if self.is_answered(one) else last - 1 for one, last in enumerate(self.announced)]
            self._meetings.add(max(gone) + 1)

    def is_meeting(self, number: int) -> bool:
        """Return True if all islands meet in this round."""
        return self._rules.quorum == self._rules.num_islands or number in self._meetings

    def is_answered(self, island: int) -> bool:
        """Return True if the island need not wait, and False from `announce` on until it need no longer."""
        number = self.announced[island]
        if self._merged[island] < number or (self.is_meeting(number) and min(self._merged) < number):
            return False
        return may_begin(dict(enumerate(self.announced)), number, self._rules.max_ahead)

    def merge(self, now: float) -> bool:
        """Make the next update if it is due; return True if it was."""
        islands = range(self._rules.num_islands)
        members = [(one, self.announced[one]) for one in islands if self._merged[one] < self.announced[one]]
        # Who waits for the bound, or for a meeting, counts: nothing will come from there before an update.
        num_waiting = sum(not self.is_answered(island) for island in islands)
        if not members or num_waiting < self._rules.quorum:
            self._quorum_since = None
            return False
        if self._quorum_since is None:
            self._quorum_since = now
        if num_waiting < self._rules.num_islands and now < self._quorum_since + self._rules.grace_seconds:
            return False
        self._updates.append(members)
        for island, number in members:
            self._merged[island] = number
        self._quorum_since = None
        return True

    def count_grace(self, now: float) -> float | None:
        """Return the seconds until an update is due by the grace alone; None where none is."""
        since = self._quorum_since
        return None if since is None else max(0.0, since + self._rules.grace_seconds - now)

    def list_updates(self, num_known: int) -> list[Sequence[Member]]:
        """Return the members of each update behind the first `num_known` ones."""
        return self._updates[num_known:]
