"""Numbered records: one winner for each number, and what is read of a folder that holds other files, too."""

import threading
from dataclasses import dataclass

import pytest

from kftrain.core import storage
from kftrain.core.records import NumberedRecords, parse_number
from kftrain.errors import DataError


@dataclass
class Note:
    text: str

    def to_dict(self):
        return {"text": self.text}


@pytest.fixture
def notes(tmp_path):
    return NumberedRecords(str(tmp_path / "notes"), storage.read_json)


def test_an_empty_folder_has_no_last_record(notes):
    assert (notes.last_number(), notes.read_last(), notes.read_all()) == (0, None, [])


def test_records_are_read_by_their_numbers_and_not_by_their_names(notes):
    for number in (9, 10, 2):
        assert notes.append(number, Note(str(number)))
    assert notes.list_names() == ["2.json", "9.json", "10.json"]
    assert [record["text"] for record in notes.read_all()] == ["2", "9", "10"]
    assert notes.last_number() == 10 and notes.read_last() == notes.read(10) == {"text": "10"}


def test_a_number_is_given_once_and_nothing_is_overwritten(notes):
    assert notes.append(1, Note("first")) and not notes.append(1, Note("second"))
    assert storage.read_json(notes.build_uri(1)) == {"text": "first"}


def test_of_many_that_append_at_once_one_has_the_number(notes):
    winners, barrier = [], threading.Barrier(8)

    def append(text):
        barrier.wait(240)
        if notes.append(1, Note(text)):
            winners.append(text)

    threads = [threading.Thread(target=append, args=(str(i),)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert [{"text": text} for text in winners] == [notes.read(1)]


def test_damaged_records_are_left_out_where_the_reader_says_so(notes):
    notes.append(1, Note("good"))
    storage.publish(notes.build_uri(2), "{")
    assert notes.read_all(DataError) == [{"text": "good"}]
    with pytest.raises(DataError, match=r"2\.json is not valid JSON"):
        notes.read_all()


def test_other_files_have_no_number(notes):
    storage.publish(f"{notes.uri}/notes.json", "{}")
    storage.publish(f"{notes.uri}/7.txt", "")
    assert notes.last_number() == 0 and notes.list_names() == ["notes.json"]
    assert [parse_number(name) for name in ("a/b/12.json", "x.json", "-1.json", "7.txt")] == [12, 0, 0, 0]
