"""Which version is champion: the journal is the truth, the alias in MLflow is its image.

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

from kftrain import storage
from kftrain.config import Config
from kftrain.errors import TrackingError
from kftrain.registry import lineage
from kftrain.registry.journal import Entry, Journal, champion_version, entered_digest, next_entry, predecessors
from kftrain.registry.reference import Reference
from kftrain.tracking import model_client
from kftrain.tracking.model_client import RegisteredModel
from kftrain.trust import Trust

JOURNAL_TAG = "kftrain.journal"
"""Of the registered model: the URI of the journal that says who is champion."""

CHAMPION = "champion"
PREVIOUS_CHAMPION = "previous_champion"
CHALLENGER = "challenger"
"""The last version that a person is to decide about. It only shows: nothing is decided by it."""

MAX_ROUNDS = 100
"""Every round that is lost, another promotion has won; so many in a row mean that something else is wrong."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class ChampionAlias:
    """The champion alias of one registered model: its aliases and its journal."""

    uri: str
    model_name: str
    journal: Journal
    trust: Trust
    """Where references may lead."""

    @classmethod
    def of(cls, config: Config) -> ChampionAlias:
        """The alias that the configured model competes for."""
        journal = Journal.of(config.run.storage_root, config.model_name)
        return cls(config.tracking.uri, config.model_name, journal, Trust.of(config))

    def claim(self, description: str = "") -> None:
        """Makes the registered model if it is not there, and ties it to this journal if it is tied to none.

        Raises TrackingError where it belongs to the journal of another storage root.
        """
        own = {JOURNAL_TAG: storage.absolute(self.journal.uri)}
        model_client.ensure_registered_model(self.uri, self.model_name, own, description)
        model = model_client.get_registered_model(self.uri, self.model_name)
        if model is not None and JOURNAL_TAG not in model.tags:  # made by hand, or by an older kftrain
            self._require_own_champion(model)
            model_client.set_registered_model_tag(self.uri, self.model_name, JOURNAL_TAG, own[JOURNAL_TAG])
            model = model_client.get_registered_model(self.uri, self.model_name)
        self._require_own(model)

    def _require_own(self, model: RegisteredModel | None) -> None:
        found = model.tags.get(JOURNAL_TAG) if model else None
        own = storage.absolute(self.journal.uri)
        if found is not None and found != own:
            raise self._other_root(found)

    def _require_own_champion(self, model: RegisteredModel) -> None:
        """A champion whose run lies below another root has its journal there."""
        number = model.aliases.get(CHAMPION)
        version = None if number is None else model_client.get_version(self.uri, self.model_name, number)
        reference = lineage.find(self.uri, version)
        root = storage.absolute(self.journal.uri).rsplit("/registry/", 1)[0]
        if reference is not None and not reference.run_uri.startswith(root + "/"):
            raise self._other_root(reference.run_uri)

    def _other_root(self, found: str) -> TrackingError:
        own = storage.absolute(self.journal.uri)
        what = "the registered model belongs to another storage root, where its journal of promotions is"
        moved = "if the root moved here with its journal, set the registered model's tag"
        fix = f"set run.storage_root or registry.model_name; or, {moved} {JOURNAL_TAG} to {own} in MLflow"
        return TrackingError(what, where=self.model_name, value=found, fix=fix)

    def remove_dead_writers(self) -> None:
        """Removes the marks of promotions that died. Takes `journal.WATCH_SECONDS` where there are some."""
        dead = self.journal.dead_writers()
        if dead and self.observe()[2] == "settled":
            self.journal.remove_writers(dead)

    def transact(self, propose: Callable[[list[Entry]], tuple[Result, Entry | None]]) -> Result:
        """Runs `propose` on the journal and appends what it proposes, again and again until nobody was faster.

        `propose` gets the settled journal and returns its result and the next entry, or None to leave all as it is.
        Raises TrackingError.
        """
        for _ in range(MAX_ROUNDS):
            result, entry = propose(self.settle())
            if entry is None:
                return result
            if self.observe()[2] != "external" and self._append(entry):  # `propose` may read for minutes
                return result
        raise TrackingError("other promotions are always faster", where=self.journal.uri, fix="try again later")

    def settle(self) -> list[Entry]:
        """The journal, after it and the alias were made to agree."""
        for _ in range(MAX_ROUNDS):
            entries, aliased, situation = self.observe()
            if situation == "settled":
                return entries
            if situation == "lagging":
                self._repair()
            else:
                self._append(next_entry(entries, "external", aliased, "the alias was changed outside of kftrain"))
        raise TrackingError("alias and journal never agree", where=self.journal.uri, fix="who else sets the alias?")

    def observe(self) -> tuple[list[Entry], int | None, Literal["settled", "lagging", "external"]]:
        """The journal, the alias, and how they stand to each other. Changes nothing. The order of reading matters."""
        entries = self.journal.entries()
        writers = self.journal.writers()
        model = model_client.get_registered_model(self.uri, self.model_name)
        self._require_own(model)
        aliased = model.aliases.get(CHAMPION) if model else None
        end = champion_version(entries)
        if aliased == end:
            return entries, aliased, "settled"
        gone = end is not None and not self.holds(entries, end)
        return entries, aliased, "lagging" if writers and not gone else "external"

    def point_challenger(self, version: int, awaits_person: bool) -> None:
        """Shows that a person decides about a version, or that nobody does any more."""
        if awaits_person:
            model_client.set_alias(self.uri, self.model_name, CHALLENGER, version)
        elif model_client.get_aliases(self.uri, self.model_name).get(CHALLENGER) == version:
            model_client.set_alias(self.uri, self.model_name, CHALLENGER, None)

    def exists(self, version: int) -> bool:
        """Whether the registry still has the version."""
        return model_client.get_version(self.uri, self.model_name, version) is not None

    def holds(self, entries: list[Entry], version: int) -> bool:
        """Whether the registry still has the version of the journal, not another one of its number."""
        digest = entered_digest(entries, version)
        return self.exists(version) if not digest else self.reference(entries, version) is not None

    def reference(self, entries: list[Entry], version: int | None) -> Reference | None:
        """The reference of a version; None where it has none, or is another one of this number than in the journal."""
        found = None if version is None else model_client.get_version(self.uri, self.model_name, version)
        reference = lineage.find(self.uri, found)
        digest = entered_digest(entries, version)
        return reference if reference and digest in ("", reference.export_digest) else None

    def _predecessor(self, entries: list[Entry]) -> int | None:
        return next((version for version in predecessors(entries) if self.holds(entries, version)), None)

    def _append(self, entry: Entry) -> bool:
        """Appends an entry and sets the alias; False if somebody was faster."""
        with self.journal.writing():
            try:
                self.journal.append(entry)
            except FileExistsError:
                return False
            self._apply()
        return True

    def _repair(self) -> None:
        with self.journal.writing():
            self._apply()

    def _apply(self) -> None:
        """Sets the aliases to the end of the journal until they are seen to agree with it.

        A champion that was deleted meanwhile can have no alias: whoever settles next enters that.
        """
        for _ in range(MAX_ROUNDS):
            entries = self.journal.entries()
            wanted = {CHAMPION: champion_version(entries), PREVIOUS_CHAMPION: self._predecessor(entries)}
            actual = model_client.get_aliases(self.uri, self.model_name)
            different = {aliased: version for aliased, version in wanted.items() if actual.get(aliased) != version}
            champion = different.get(CHAMPION)
            if not different or (champion is not None and not self.holds(entries, champion)):
                return
            for aliased, version in different.items():
                model_client.set_alias(self.uri, self.model_name, aliased, version)
        raise TrackingError("alias and journal never agree", where=self.journal.uri, fix="who else sets the alias?")
