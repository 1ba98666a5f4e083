"""Which version is champion: the journal is the truth, the alias in MLflow is its image.

Aliases in MLflow are last-writer-wins, so two promotions at once could leave the worse model. Here a promotion is an
entry in the journal, created exclusively against the end that was decided upon (see `transact`); the alias follows.

Why alias and journal agree in the end. Whoever appends an entry first leaves a mark, then appends, then reads the
journal and sets the alias to its end until both are seen to agree, and only then takes the mark away. Take the last
write to the alias. Its writer read journal and alias again afterwards and found them equal; an entry that came later
has a writer of its own, who would have written after it. A writer that dies leaves its mark.

Why a change by hand is told from a write that lags behind. `settle` reads the end n of the journal, then the marks,
then the alias. Without marks every earlier writer has finished, so what they left agrees with n; a later one reads n
or more, and n + 1 does not exist if our entry for the change by hand can be created. So an alias that differs was set
by somebody else, and becomes an `external` entry. With marks the journal wins: a change by hand while a promotion is
under way, or after one that died, is overwritten.

What this needs: a storage root with atomic exclusive creation and listings that show what was written; one storage
root per model; and no writer that sleeps longer than `STALE_WRITER_SECONDS` between two calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from kftrain.config import Config
from kftrain.errors import TrackingError
from kftrain.registry.journal import Entry, Journal, champion_version, next_entry, predecessors
from kftrain.tracking import client

CHAMPION = "champion"
PREVIOUS_CHAMPION = "previous_champion"

MAX_ROUNDS = 100
"""Every round that is lost, another promotion has won; so many in a row mean that something else is wrong."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Title:
    """The title of champion of one registered model: its aliases and its journal."""

    uri: str
    model_name: str
    journal: Journal

    @classmethod
    def of(cls, config: Config) -> Title:
        """The title that the configured model competes for."""
        journal = Journal.of(config.run.storage_root, config.model_name)
        return cls(config.tracking.uri, config.model_name, journal)

    def transact(self, propose: Callable[[list[Entry]], tuple[Result, Entry | None]]) -> Result:
        """Runs `propose` on the journal and appends what it proposes, again and again until nobody was faster.

        `propose` gets the settled journal and returns its result and the next entry, or None to leave all as it is.
        Raises TrackingError.
        """
        for _ in range(MAX_ROUNDS):
            result, entry = propose(self.settle())
            if entry is None or self._append(entry):
                return result
        raise TrackingError("other promotions are always faster", where=self.journal.uri, fix="try again later")

    def settle(self) -> list[Entry]:
        """The journal, after it and the alias were made to agree."""
        for _ in range(MAX_ROUNDS):
            entries, alias, situation = self.observe()
            if situation == "settled":
                self.journal.remove_stale_writers()
                return entries
            if situation == "lagging":
                self._repair()
            else:
                self._append(next_entry(entries, "external", alias, "the alias was changed outside of kftrain"))
        raise TrackingError("alias and journal never agree", where=self.journal.uri, fix="who else sets the alias?")

    def observe(self) -> tuple[list[Entry], int | None, Literal["settled", "lagging", "external"]]:
        """The journal, the alias, and how they stand to each other. Changes nothing. The order of reading matters."""
        entries = self.journal.entries()
        writers = self.journal.writers()
        alias = client.get_aliases(self.uri, self.model_name).get(CHAMPION)
        end = champion_version(entries)
        if alias == end:
            return entries, alias, "settled"
        gone = end is not None and not self.exists(end)
        return entries, alias, "lagging" if writers and not gone else "external"

    def exists(self, version: int) -> bool:
        """Whether the registry still has the version."""
        return client.get_version(self.uri, self.model_name, version) is not None

    def _predecessor(self, entries: list[Entry]) -> int | None:
        return next((version for version in predecessors(entries) if self.exists(version)), None)

    def _append(self, entry: Entry) -> bool:
        """Appends an entry and sets the alias; False if somebody was faster."""
        mark = self.journal.begin_writing()
        try:
            self.journal.append(entry)
        except FileExistsError:
            self.journal.end_writing(mark)
            return False
        self._apply()
        self.journal.end_writing(mark)
        return True

    def _repair(self) -> None:
        mark = self.journal.begin_writing()
        self._apply()
        self.journal.end_writing(mark)

    def _apply(self) -> None:
        """Sets the aliases to the end of the journal until they are seen to agree with it."""
        for _ in range(MAX_ROUNDS):
            entries = self.journal.entries()
            wanted = {CHAMPION: champion_version(entries), PREVIOUS_CHAMPION: self._predecessor(entries)}
            actual = client.get_aliases(self.uri, self.model_name)
            different = {alias: version for alias, version in wanted.items() if actual.get(alias) != version}
            if not different:
                return
            for alias, version in different.items():
                client.set_alias(self.uri, self.model_name, alias, version)
        raise TrackingError("alias and journal never agree", where=self.journal.uri, fix="who else sets the alias?")
