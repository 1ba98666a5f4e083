"""The record of the suite: one cell for each backend and promise, and the table made of it.

python tests/launchers/record.py          # writes the table of record.json into docs/launchers.md
"""

import json
from pathlib import Path

if __package__ in (None, ""):
    import sys

    sys.path.insert(0, str(Path(__file__).parents[1]))

from launchers.promises import PROMISES

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("record.json")
PAGE = ROOT / "docs" / "launchers.md"
BEGIN, END = "<!-- made by tests/launchers/record.py -->", "<!-- end of what is made -->"

WORKS, REFUSED, NOT_RUN, FAILED = "works", "refused", "not run", "failed"


def read_cells(path=FILE):
    """Backend -> promise -> [outcome, reason]."""
    return json.loads(path.read_text()) if path.exists() else {}


def merge_cells(old, new):
    """The older record with the cells that were run now; a cell that was not run keeps what is known of it."""
    merged = {backend: dict(row) for backend, row in old.items()}
    for backend, row in new.items():
        for promise, cell in row.items():
            known = merged.setdefault(backend, {}).get(promise)
            if known is None or cell[0] != NOT_RUN:
                merged[backend][promise] = cell
    return merged


def write_cells(cells, path=FILE):
    ordered = {backend: {name: row[name] for name in PROMISES if name in row} for backend, row in cells.items()}
    path.write_text(json.dumps(ordered, indent=1) + "\n")


def render(cells):
    """The table, a row for each promise, and the reasons of all cells that are not `works` below it."""
    backends = list(cells)
    lines = [f"| promise | {' | '.join(backends)} |", f"|---|{'---|' * len(backends)}"]
    reasons = []
    for promise, text in PROMISES.items():
        words = []
        for backend in backends:
            outcome, reason = cells[backend].get(promise, [NOT_RUN, "this suite has not seen it yet"])
            if reason and [outcome, reason] not in reasons:
                reasons.append([outcome, reason])
            number = f" ({reasons.index([outcome, reason]) + 1})" if reason else ""
            words.append(f"{outcome}{number}")
        lines.append(f"| {promise}: {text} | {' | '.join(words)} |")
    notes = [f"| {number} | {' | '.join(reason)} |" for number, reason in enumerate(reasons, 1)]
    return "\n".join([*lines, "", "| | outcome | reason |", "|---|---|---|", *notes])


def replace_table(page, cells):
    """The page with the table of these cells between the two marks."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{render(cells)}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(replace_table(PAGE.read_text(), read_cells()))
