from __future__ import annotations

import math
from typing import Any

import pytest

from kftrain.reports import wording


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.58834, "1.588"),
        (0.0, "0"),
        (12345.678, "12,346"),
        (12_345, "12,345"),
        (0.05, "0.05000"),
        (0.000123, "1.230e-4"),
        (-2.5, "\u22122.500"),
        (1e18, "1.000e18"),
        (10**16, "10,000,000,000,000,000"),
        (1e305, "1.000e305"),
        (math.nan, "NaN"),
        (-math.inf, "\u2212infinite"),
        (None, "\u2013"),
        ("n/a", "n/a"),
    ],
)
def test_a_number_has_four_significant_digits(value: Any, text: str) -> None:
    assert wording.format_number(value) == text


@pytest.mark.parametrize(
    ("interval", "shown"),
    [
        ((2.33712, 2.28941, 2.38323), ("2.337", "2.289 to 2.383")),
        ((0.0609, 0.0431, 0.0788), ("0.061", "0.043 to 0.079")),
        ((1234.5, 1100.0, 1400.0), ("1,234", "1,100 to 1,400")),
        ((0.5, 0.5, 0.5), ("0.5000", "0.5000 to 0.5000")),
        ((math.nan, 0.0, 1.0), ("NaN", "0 to 1.000")),
    ],
)
def test_an_interval_has_the_digits_that_its_width_supports(
    interval: tuple[float, float, float], shown: tuple[str, str]
) -> None:
    assert wording.format_interval(*interval) == shown


def test_a_difference_has_a_sign() -> None:
    assert wording.format_interval(0.0005, -0.0031, 0.0042, signed=True) == ("+0.0005", "\u22120.0031 to +0.0042")


def test_a_difference_that_rounds_to_zero_has_none() -> None:
    assert wording.format_decimals(-0.0001, 2, signed=True) == "0.00"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(4.26, "4.3 s"), (48.3, "48.3 s"), (59.96, "60.0 s"), (200.4, "3 min 20 s"), (3600, "1 h"), (90_000, "1 d 1 h")],
)
def test_a_duration_has_its_two_largest_units(seconds: float, text: str) -> None:
    assert wording.format_duration(seconds) == text


def test_sizes_and_large_counts_have_units() -> None:
    assert wording.format_size(64_000_000) == "64.0 MB"
    assert wording.format_size(512) == "512 bytes"
    assert wording.format_size(5 * 10**15) == "5,000 TB"
    assert wording.format_large_count(1_861_248) == "1.86M"
    assert wording.format_large_count(812_000) == "812,000"
    assert wording.format_large_count(7_000_000_000) == "7.00B"


def test_clean_text_has_no_control_characters_no_bidi_overrides_and_no_passwords() -> None:
    assert wording.clean("a\x00b\x1b[31m\u202ec\ud800") == "a\ufffdb\ufffd[31m\ufffdc\ufffd"
    assert wording.clean("https://user:secret@host/x") == "https://host/x"


@pytest.mark.parametrize(
    "text",
    [
        "at https://me:p@SECRET@host",
        "https://a.blob/x?sv=1&sig=SECRET",
        "Authorization: Bearer SECRETSECRET",
        "k SECRET1",
    ],
)
def test_reports_show_no_more_of_a_secret_than_errors_do(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SECRET1")
    assert "SECRET" not in wording.clean(text) and wording.clean(text)[:2] == text[:2]
    assert wording.clean("git@github.com and a@b") == "git@github.com and a@b"
    assert wording.clean("two\nlines\tand \u00e9\U0001f600") == "two\nlines\tand \u00e9\U0001f600"
