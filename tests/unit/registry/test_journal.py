"""The journal: exclusive, ordered, complete; and what a rollback restores."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kftrain.core import storage
from kftrain.errors import TrackingError
from kftrain.registry import journal
from kftrain.registry.journal import (
    Journal,
    find_champion_version,
    list_former_champions,
    list_predecessors,
    make_next_entry,
)


def entries_of(*changes):
    entries = []
    for kind, version in changes:
        entries.append(make_next_entry(entries, kind, version, "because"))
    return entries


def test_an_entry_is_appended_by_one_writer_only(tmp_path):
    book = Journal.of(str(tmp_path), "toy")
    first = make_next_entry(book.entries(), "promote", 1, "first")
    assert book.append(first)
    assert not book.append(make_next_entry([], "promote", 2, "late"))
    assert book.append(make_next_entry([first], "promote", 3, "better"))
    assert [(e.number, e.version, e.previous) for e in book.entries()] == [(1, 1, None), (2, 3, 1)]
    assert (tmp_path / "registry" / "toy" / "promotions" / "1.json").exists()


def test_equal_entries_of_two_processes_are_told_apart_and_old_ones_are_still_read(tmp_path):
    first, second = (make_next_entry([], "promote", 1, "same").to_dict() for _ in range(2))
    assert storage.dump_json(first) != storage.dump_json(second)
    book = Journal.of(str(tmp_path), "toy")
    old = {name: value for name, value in first.items() if name != "entry_id"}
    storage.create_json(f"{book.uri}/promotions/1.json", old)
    assert book.entries()[0].version == 1


def test_a_journal_with_a_hole_is_refused(tmp_path):
    book = Journal.of(str(tmp_path), "toy")
    for entry in entries_of(("promote", 1), ("promote", 2), ("promote", 3)):
        book.append(entry)
    storage.remove(f"{book.uri}/promotions/2.json")
    with pytest.raises(TrackingError, match=r"2\.json"):
        book.entries()


def test_rollbacks_go_further_back_each_time_and_a_promotion_starts_anew():
    history = [("promote", 1), ("promote", 2), ("promote", 3)]
    assert list_predecessors(entries_of(*history)) == [2, 1]
    history.append(("rollback", 2))
    assert list_predecessors(entries_of(*history)) == [1]
    history.append(("promote", 4))
    assert list_predecessors(entries_of(*history)) == [2, 1]
    history.append(("external", None))
    assert list_predecessors(entries_of(*history)) == [4, 2, 1]
    assert find_champion_version(entries_of(*history)) is None


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["promote", "rollback"]), max_size=30))
def test_rollback_is_the_inverse_of_promotion(kinds):
    stack, entries = [], []
    for kind in kinds:
        if kind == "promote":
            stack.append(len(entries) + 1)
        elif len(stack) > 1:
            stack.pop()
        else:
            continue
        entries.append(make_next_entry(entries, kind, stack[-1], ""))
    assert list_predecessors(entries) == stack[:-1][::-1]
    assert find_champion_version(entries) == (stack[-1] if stack else None)


def test_former_champions_are_named_once_newest_first():
    history = entries_of(("promote", 1), ("promote", 2), ("rollback", 1), ("external", None))
    assert [(entry.number, entry.version) for entry in list_former_champions(history)] == [(3, 1), (2, 2)]
    assert list_former_champions([]) == []


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(journal, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(journal, "WATCH_SECONDS", 1.0)


@pytest.mark.parametrize("written", [0.0, 4e9])
def test_a_mark_is_dead_when_it_does_not_change_whatever_time_stands_in_it(tmp_path, impatient, written):
    book = Journal.of(str(tmp_path), "toy")
    storage.create_json(f"{book.uri}/writers/old.json", {"time": written})
    with book.writing():
        assert book.dead_writers() == ["old.json"]
        book.remove_writers(["old.json"])
        assert len(book.writers()) == 1
    assert book.writers() == [] and book.dead_writers() == []


def test_a_writer_that_fails_leaves_its_mark_which_then_is_dead(tmp_path, impatient):
    book = Journal.of(str(tmp_path), "toy")
    with pytest.raises(KeyError), book.writing():
        raise KeyError
    [mark] = book.writers()
    assert book.dead_writers() == [mark]


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"schema_version": 1}', b'{"schema_version": 2}'])
def test_an_entry_that_is_damaged_is_to_be_restored_never_deleted(tmp_path, content):
    storage.publish(f"{tmp_path}/promotions/1.json", content)
    with pytest.raises(TrackingError, match=r"1\.json .*; restore it, never delete it"):
        Journal(str(tmp_path)).entries()
