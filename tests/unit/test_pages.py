"""The pages are short, fit a screen, and their links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MADE = {"architecture.md", "adding.md", "configuration.md"}
"""Written by `make docs`, and a part of it: these are looked up, not read."""

PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "images" / "README.md",
]
MAX_WORDS, MAX_COLUMNS, MAX_README_LINES = 1500, 120, 150

written = pytest.mark.parametrize("page", [p for p in PAGES if p.name not in MADE], ids=lambda p: p.name)


def prose(text):
    """A page without its code, and without a table that `make docs` writes into it."""
    return re.sub(r"^```.*?^```$|^<!--.*?^<!-- end of.*?-->$", "", text, flags=re.M | re.S)


def anchors(text):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(text), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_fits_on_a_few_screens():
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES


@written
def test_a_page_has_no_more_words_than_one_reads(page):
    words = [word for word in prose(page.read_text()).split() if re.search(r"\w", word)]
    assert len(words) <= MAX_WORDS


@written
def test_no_line_wraps(page):
    """A row of a table cannot be broken into lines."""
    lines = enumerate(page.read_text().splitlines(), 1)
    assert [number for number, line in lines if len(line) > MAX_COLUMNS and not line.startswith("|")] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text()).replace("(\n", "(")):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path) if path else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found.read_text()), target


@pytest.mark.parametrize("index", ["README.md", "docs/README.md"])
def test_the_indexes_link_every_page_in_the_same_order(index):
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    links = re.findall(r"\]\((?:docs/)?([\w-]+\.md)\)", (ROOT / index).read_text().split("# Read on")[-1])
    in_order = re.findall(r"^\d+\. \[([\w-]+\.md)\]", (ROOT / "docs" / "README.md").read_text(), flags=re.M)
    assert [name for name in dict.fromkeys(links) if name in pages] == in_order
    assert sorted(in_order) == sorted(pages)
