"""Two promoting processes in every order of their calls, killed between any two, while a person edits the alias."""

import random
import threading

import pytest

from kftrain.registry import champion_alias, journal, lineage
from kftrain.registry.champion_alias import ChampionAlias
from kftrain.registry.journal import Journal, find_champion_version, make_next_entry
from kftrain.tracking.model_client import ModelVersion, RegisteredModel
from kftrain.trust import Trust

NUM_VERSIONS = 6
"""A version's number is its quality, too."""


class Killed(BaseException):
    """A process that ends here, whatever it was doing."""


class World:
    """A registry in memory, and one turn at a time for the threads that use it."""

    def __init__(self, seed, edits, kills):
        self.random = random.Random(seed)
        self.edits = edits
        self.kills = kills
        self.aliases = {}
        self.versions = set(range(1, NUM_VERSIONS + 1))
        self.num_edits = 0
        self.lock = threading.Condition()
        self.waiting = set()
        self.chosen = None
        self.alive = 0

    def turn(self):
        """Waits until all others wait too and this thread is drawn; it may be killed instead, and a person may act."""
        me = threading.current_thread()
        if not isinstance(me, Process):
            return
        with self.lock:
            self.waiting.add(me)
            self.draw()
            self.lock.wait_for(lambda: self.chosen is me, timeout=600)
            self.waiting.discard(me)
            self.chosen = None
        if self.random.random() < self.kills:
            raise Killed
        if self.random.random() < self.edits:
            self.num_edits += 1
            self.edit()

    def draw(self):
        if self.chosen is None and self.waiting and len(self.waiting) == self.alive:
            self.chosen = self.random.choice(sorted(self.waiting, key=lambda thread: thread.name))
            self.lock.notify_all()

    def edit(self):
        choice = self.random.choice(["set", "remove", "delete"])
        if choice == "set":
            self.aliases["champion"] = self.random.choice(sorted(self.versions))
        else:
            gone = self.aliases.pop("champion", None)
            if choice == "delete" and len(self.versions) > 2:
                self.versions.discard(gone)

    def get_registered_model(self, uri, name):
        self.turn()
        return RegisteredModel(dict(self.aliases), {})

    def get_version(self, uri, name, number):
        self.turn()
        return ModelVersion(name, number, "", "", {}) if number in self.versions else None

    def set_alias(self, uri, name, aliased, version):
        self.turn()
        if version is None:
            self.aliases.pop(aliased, None)
        elif version in self.versions:  # MLflow refuses others
            self.aliases[aliased] = version


class Process(threading.Thread):
    def __init__(self, world, book, version):
        super().__init__(name=f"process-{version}")
        self.world = world
        self.book = book
        self.version = version
        self.problem = None
        self.killed = False

    def run(self):
        try:
            self.book.transact(self.propose)
        except Killed:
            self.killed = True
        except Exception as error:  # noqa: BLE001 - shown by the assertion of the test
            self.problem = error
        finally:
            with self.world.lock:
                self.world.alive -= 1
                self.world.draw()

    def propose(self, entries):
        """Better than the champion, or than the last one that is left."""
        present = [e.version for e in reversed(entries) if e.version in self.world.versions]
        rival = find_champion_version(entries) or next(iter(present), None)
        if self.version not in self.world.versions or (rival is not None and rival >= self.version):
            return False, None
        return True, make_next_entry(entries, "promote", self.version, "better")


def play(tmp_path, monkeypatch, seed, edits, kills):
    world = World(seed, edits, kills)
    for name in ("get_registered_model", "get_version", "set_alias"):
        monkeypatch.setattr(champion_alias.model_client, name, getattr(world, name))
    monkeypatch.setattr(lineage, "find_reference", lambda uri, version: None)
    monkeypatch.setattr(journal, "BEAT_SECONDS", 1000.0)
    for name in ("entries", "writers", "append"):
        original = getattr(Journal, name)

        def stepped(self, *arguments, original=original):
            world.turn()
            return original(self, *arguments)

        monkeypatch.setattr(Journal, name, stepped)
    book = ChampionAlias("", "toy", Journal(str(tmp_path / str(seed))), Trust())
    for pair in ((1, 3), (2, 5), (6, 4)):
        processes = [Process(world, book, version) for version in pair]
        world.alive = len(processes)
        for process in processes:
            process.start()
        for process in processes:
            process.join(600)
        assert [process.problem for process in processes] == [None, None]
    return world, book


@pytest.mark.parametrize("kills", [0.0, 0.05])
def test_without_edits_the_champion_never_gets_worse_and_nothing_is_taken_for_an_edit(tmp_path, monkeypatch, kills):
    for seed in range(40):
        with monkeypatch.context() as patch:
            world, book = play(tmp_path / str(kills), patch, seed, edits=0.0, kills=kills)
            entries = book.settle()
            assert {entry.kind for entry in entries} <= {"promote"}, seed
            versions = [entry.version for entry in entries]
            assert versions == sorted(versions), seed
            assert world.aliases.get("champion") == find_champion_version(entries), seed
            if not kills:
                assert versions[-1] == NUM_VERSIONS and book.journal.writers() == [], seed


@pytest.mark.parametrize("kills", [0.0, 0.05])
def test_with_edits_alias_and_journal_agree_in_the_end_and_only_edits_make_it_worse(tmp_path, monkeypatch, kills):
    for seed in range(40):
        with monkeypatch.context() as patch:
            world, book = play(tmp_path / str(kills), patch, 1000 + seed, edits=0.05, kills=kills)
            entries = book.settle()
            assert world.aliases.get("champion") == find_champion_version(entries), seed
            external = [entry for entry in entries if entry.kind == "external"]
            assert len(external) <= world.num_edits, seed
