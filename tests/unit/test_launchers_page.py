"""The matrix in docs/launchers.md is what the suite has recorded, and says nothing else."""

from launchers import record
from launchers.promises import PROMISES


def test_the_page_shows_the_record():
    page = record.PAGE.read_text()
    assert record.replace_table(page, record.read_cells()) == page


def test_the_record_names_promises_and_outcomes_only():
    for row in record.read_cells().values():
        assert row.keys() <= PROMISES.keys()
        assert {outcome for outcome, _ in row.values()} <= {record.WORKS, record.REFUSED, record.NOT_RUN}
        assert all(reason for outcome, reason in row.values() if outcome != record.WORKS)


def test_a_cell_that_was_not_run_keeps_what_is_known_of_it():
    old = {"local": {"trains": [record.WORKS, ""], "waits": [record.NOT_RUN, "old"]}}
    new = {"local": {"trains": [record.NOT_RUN, "no time"], "waits": [record.REFUSED, "new"]}}
    merged = record.merge_cells(old, new)
    assert merged == {"local": {"trains": [record.WORKS, ""], "waits": [record.REFUSED, "new"]}}
    assert "within seconds, and waiting ends | refused (2) |" in record.render(merged)
