"""The champion of a registered model: the journal is the truth, the alias in MLflow is its image.

Aliases in MLflow are last-writer-wins, so two promotions at once could leave the worse model. Here a promotion is an
entry in the journal, created exclusively against the end that was decided upon (see `transact`); the alias follows.

Why alias and journal agree in the end. Whoever appends an entry first leaves a mark, then appends, then reads the
journal and sets the alias to its end until both are seen to agree, and only then takes the mark away. Take the last
write to the alias. Its writer read journal and alias again afterwards and found them equal; an entry that came later
has a writer of its own, who would have written after it. A writer that dies leaves its mark.

Why a change by hand is told from a write that lags behind. `settle` reads the end n of the journal, then the marks,
then the alias. Without marks every earlier writer has finished, so what they left agrees with n; a later one reads n or
more, and n + 1 does not exist if our entry for the change by hand can be created. So an alias that differs was set by
somebody else, and becomes an `external` entry. `transact` looks once more before it appends. With marks the journal
wins: a change by hand while a promotion is under way, or after one that died, is overwritten.

What this needs: a storage root with atomic exclusive creation and listings that show what was written; one storage
root per model, which the registered model's tag `kftrain.journal` sees to (it can only refuse, it decides nothing); and
no writer that is suspended for longer than `journal.WATCH_SECONDS` and then goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from kftrain.config import Config
from kftrain.core import storage
from kftrain.errors import TrackingError
from kftrain.registry import lineage
from kftrain.registry.journal import (
    Entry,
    Journal,
    find_champion_version,
    find_entered_digest,
    list_predecessors,
    make_next_entry,
)
from kftrain.registry.reference import Reference
from kftrain.tracking import model_client
from kftrain.tracking.model_client import RegisteredModel
from kftrain.trust import Trust

JOURNAL_TAG = "kftrain.journal"
"""Tag of a registered model with the URI of the journal that its alias follows."""

CHAMPION = "champion"
PREVIOUS_CHAMPION = "previous_champion"
CHALLENGER = "challenger"
"""Alias of the last version that waits for a person. It is for people: no decision reads it."""

MAX_ROUNDS = 100
"""Rounds after which `transact` and its like give up: a round is lost only if another promotion won it, and so many
losses in a row mean that something else is wrong."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class ChampionAlias:
    """The champion of one registered model: the journal that decides, and the aliases in MLflow that follow it."""

    uri: str
    model_name: str
    journal: Journal
    trust: Trust
    """The places that references of versions may point to."""

    @classmethod
    def of(cls, config: Config) -> ChampionAlias:
        """Return the alias that the configured model competes for."""
        journal = Journal.of(config.run.storage_root, config.model_name)
        return cls(config.tracking.uri, config.model_name, journal, Trust.of(config))

    def claim(self, description: str = "") -> None:
        """Create the registered model if it is missing, and tie it to this journal if it is tied to none.

        Raises TrackingError if it belongs to the journal of another storage root.
        """
        own = {JOURNAL_TAG: storage.absolute(self.journal.uri)}
        model_client.ensure_registered_model(self.uri, self.model_name, own, description)
        model = model_client.get_registered_model(self.uri, self.model_name)
        if model is not None and JOURNAL_TAG not in model.tags:  # made by hand, or by an older kftrain
            self._require_own_champion(model)
            model_client.set_registered_model_tag(self.uri, self.model_name, JOURNAL_TAG, own[JOURNAL_TAG])
            # Read again: of two roots that set the tag at once the last one won, and the other must be refused.
            model = model_client.get_registered_model(self.uri, self.model_name)
        self._require_own(model)

    def _require_own(self, model: RegisteredModel | None) -> None:
        tagged = model.tags.get(JOURNAL_TAG) if model else None
        own = storage.absolute(self.journal.uri)
        if tagged is not None and tagged != own:
            raise self._describe_other_root(tagged)

    def _require_own_champion(self, model: RegisteredModel) -> None:
        """Raise TrackingError if the champion's run lies below another root: its journal is there."""
        number = model.aliases.get(CHAMPION)
        version = None if number is None else model_client.get_version(self.uri, self.model_name, number)
        reference = lineage.find_reference(self.uri, version)
        root = storage.absolute(self.journal.uri).rsplit("/registry/", 1)[0]
        if reference is not None and not reference.run_uri.startswith(root + "/"):
            raise self._describe_other_root(reference.run_uri)

    def _describe_other_root(self, other: str) -> TrackingError:
        own = storage.absolute(self.journal.uri)
        what = "the registered model belongs to another storage root, where its journal of promotions is"
        moved = "if the root moved here with its journal, set the registered model's tag"
        fix = f"set run.storage_root or registry.model_name; or, {moved} {JOURNAL_TAG} to {own} in MLflow"
        return TrackingError(what, where=self.model_name, value=other, fix=fix)

    def remove_dead_writers(self) -> None:
        """Remove the marks of promotions that died. Takes `journal.WATCH_SECONDS` if there are any."""
        dead = self.journal.dead_writers()
        # In this order: alias and journal must be seen to agree after the writers were seen to be dead.
        if dead and self.observe()[2] == "settled":
            self.journal.remove_writers(dead)

    def transact(self, propose: Callable[[list[Entry]], tuple[Result, Entry | None]]) -> Result:
        """Append the entry that `propose` returns, and call it again whenever another process was faster.

        `propose` gets the settled journal and returns its result and the next entry, or None to change nothing. It must
        bear being called several times. Raises TrackingError.
        """
        for _ in range(MAX_ROUNDS):
            result, entry = propose(self.settle())
            if entry is None:
                return result
            if self.observe()[2] != "external" and self._append(entry):  # `propose` may read for minutes
                return result
        raise TrackingError("other promotions are always faster", where=self.journal.uri, fix="try again later")

    def settle(self) -> list[Entry]:
        """Make journal and alias agree, and return the journal.

        An alias that lags behind is set; one that was changed by hand becomes an entry. Raises TrackingError.
        """
        for _ in range(MAX_ROUNDS):
            entries, aliased, situation = self.observe()
            if situation == "settled":
                return entries
            if situation == "lagging":
                self._repair()
            else:
                self._append(make_next_entry(entries, "external", aliased, "the alias was changed outside of kftrain"))
        raise TrackingError("alias and journal never agree", where=self.journal.uri, fix="who else sets the alias?")

    def observe(self) -> tuple[list[Entry], int | None, Literal["settled", "lagging", "external"]]:
        """Read the journal and the alias, and tell how they stand to each other. Changes nothing.

        Entries are read before writers and writers before the alias: see the module for why only this order is safe.
        """
        entries = self.journal.entries()
        writers = self.journal.writers()
        model = model_client.get_registered_model(self.uri, self.model_name)
        self._require_own(model)
        aliased = model.aliases.get(CHAMPION) if model else None
        end = find_champion_version(entries)
        if aliased == end:
            return entries, aliased, "settled"
        gone = end is not None and not self.holds(entries, end)
        return entries, aliased, "lagging" if writers and not gone else "external"

    def point_challenger(self, version: int, awaits_person: bool) -> None:
        """Set the alias `challenger` on a version that awaits a person; else take it away if the version has it."""
        if awaits_person:
            model_client.set_alias(self.uri, self.model_name, CHALLENGER, version)
        elif model_client.get_aliases(self.uri, self.model_name).get(CHALLENGER) == version:
            model_client.set_alias(self.uri, self.model_name, CHALLENGER, None)

    def exists(self, version: int) -> bool:
        """Return True if the registry has a version of this number."""
        return model_client.get_version(self.uri, self.model_name, version) is not None

    def holds(self, entries: list[Entry], version: int) -> bool:
        """Return True if the registry has the version that the journal means, not a later one of its number."""
        digest = find_entered_digest(entries, version)
        return self.exists(version) if not digest else self.reference(entries, version) is not None

    def reference(self, entries: list[Entry], version: int | None) -> Reference | None:
        """Return the reference of a version; None if it has none, or is not the one that the journal means."""
        registered = None if version is None else model_client.get_version(self.uri, self.model_name, version)
        reference = lineage.find_reference(self.uri, registered)
        digest = find_entered_digest(entries, version)
        return reference if reference and digest in ("", reference.export_digest) else None

    def _find_predecessor(self, entries: list[Entry]) -> int | None:
        return next((version for version in list_predecessors(entries) if self.holds(entries, version)), None)

    def _append(self, entry: Entry) -> bool:
        """Append an entry and set the aliases. Return False if another process has taken the number."""
        # The mark is there before the entry: nobody may see entry and old alias without knowing that a write is due.
        with self.journal.writing():
            if not self.journal.append(entry):
                return False
            self._apply()
        return True

    def _repair(self) -> None:
        with self.journal.writing():
            self._apply()

    def _apply(self) -> None:
        """Set the aliases to the end of the journal until they are seen to agree with it.

        A champion that was deleted meanwhile can have no alias: whoever settles next enters that.
        """
        # Both are read again after every write: another writer may have appended, or have set an older champion.
        for _ in range(MAX_ROUNDS):
            entries = self.journal.entries()
            wanted = {CHAMPION: find_champion_version(entries), PREVIOUS_CHAMPION: self._find_predecessor(entries)}
            actual = model_client.get_aliases(self.uri, self.model_name)
            different = {aliased: version for aliased, version in wanted.items() if actual.get(aliased) != version}
            champion = different.get(CHAMPION)
            if not different or (champion is not None and not self.holds(entries, champion)):
                return
            for aliased, version in different.items():
                model_client.set_alias(self.uri, self.model_name, aliased, version)
        raise TrackingError("alias and journal never agree", where=self.journal.uri, fix="who else sets the alias?")
