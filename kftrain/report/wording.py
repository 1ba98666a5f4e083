"""Figures and foreign text as people read them.

Numbers get as many digits as carry information: a metric four significant ones, an interval as many as
leave its half width two. Text that somebody else wrote passes `clean` before it is shown: control
characters, which XML does not allow, and bidirectional overrides, which make text read as something else,
become a replacement character; credentials are left out.
"""

from __future__ import annotations

import math
import re
import unicodedata
from typing import Any

from kftrain.core.credentials import redacted

MINUS = "\u2212"
REPLACEMENT = "\ufffd"
SHORT_DIGEST_CHARACTERS = 12
MAX_DECIMALS = 8
LARGE_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"))

_FORBIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def clean(value: Any) -> str:
    """Text that is safe to show, one character for one, but for credentials; not yet escaped."""
    return _FORBIDDEN.sub(REPLACEMENT, redacted(str(value)))


def finite(value: Any) -> float | None:
    """The value as a finite float within 1e300, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) <= 1e300 else None


def number(value: Any, significant: int = 4) -> str:
    """A figure with so many significant digits and thousands separated; tiny and huge ones in scientific notation."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "\u2013" if value is None else clean(value)
    if isinstance(value, int) or value == 0:
        return count(int(value))
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("infinite" if value > 0 else f"{MINUS}infinite")
    if not 1e-3 <= abs(value) < 1e15:
        return _minus(_scientific(value, significant - 1))
    return fixed(value, significant - 1 - math.floor(math.log10(abs(value))))


def count(value: int) -> str:
    """A whole number with thousands separated: `12,345`."""
    return _minus(f"{value:,}")


def fixed(value: float, decimals: int, signed: bool = False) -> str:
    """A figure with a given number of decimals (none if negative), thousands separated."""
    sign = "+" if signed else ""
    text = f"{value:{sign},.{min(max(decimals, 0), MAX_DECIMALS)}f}"
    return _minus(text if text.strip("+-0.,") else text.replace("-", "").replace("+", ""))


def interval(value: float, low: float, high: float, signed: bool = False) -> tuple[str, str]:
    """A value and its interval with as many decimals as give the interval's half width two digits."""
    half_width = (high - low) / 2
    if finite(value) is None or not (math.isfinite(half_width) and 1e-9 < half_width < 1e12):
        return number(value), f"{number(low)} to {number(high)}"
    decimals = 1 - math.floor(math.log10(half_width))
    shown = [fixed(x, decimals, signed) for x in (value, low, high)]
    return shown[0], f"{shown[1]} to {shown[2]}"


def percent(fraction: float) -> str:
    """A share: `96.4%`. Always one decimal: whole percents would hide what accuracies differ by."""
    return f"{fixed(100 * fraction, 1)}%"


def size(num_bytes: Any) -> str:
    """Bytes in decimal units: `64.0 MB`."""
    amount = finite(num_bytes)
    if amount is None:
        return number(num_bytes)
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if abs(amount) < 1000 or unit == "TB":
            break
        amount /= 1000
    return f"{count(int(amount))} bytes" if unit == "bytes" else f"{number(amount, 3)} {unit}"


def large_count(value: int) -> str:
    """A number of parameters or samples: exact below a million, then `1.86M`, billions as `7.00B`."""
    for unit, suffix in LARGE_UNITS:
        if value >= unit:
            return f"{number(value / unit, 3)}{suffix}"
    return count(value)


def duration(seconds: Any) -> str:
    """A time span with its two largest units: `3 min 20 s`."""
    total = finite(seconds)
    if total is None:
        return number(seconds)
    if total < 60:
        return f"{number(float(total), 2 if total < 10 else 3)} s"
    whole = round(total)
    spans = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
    span, unit, part, part_unit = next(each for each in spans if whole >= each[0])
    rest = whole % span // part
    return f"{count(whole // span)} {unit}" + (f" {rest} {part_unit}" if rest else "")


def plural(amount: int, singular: str) -> str:
    """`1 sample`, `2,000 samples`."""
    return f"{count(amount)} {singular}{'' if amount == 1 else 's'}"


def label(name: str) -> str:
    """A metric's name as words: `bits_per_byte` is `Bits per byte`."""
    words = clean(name).replace("_", " ").strip()
    return words[:1].upper() + words[1:]


def short(digest: str) -> str:
    """The start of a digest; enough to tell two of them apart by eye."""
    return clean(digest)[:SHORT_DIGEST_CHARACTERS]


def ellipsis(text: str, max_characters: int) -> str:
    """The text cut to a number of characters, the last of them an ellipsis."""
    return text if len(text) <= max_characters else text[: max_characters - 1].rstrip() + "\u2026"


def width_px(text: str, character_px: float = 6.7) -> float:
    """Width of a label, estimated on the wide side; the default fits 11 px type of the widest interface fonts."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return (len(text) + wide) * character_px


def _scientific(value: float, decimals: int) -> str:
    mantissa, exponent = f"{value:.{max(decimals, 0)}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _minus(text: str) -> str:
    return re.sub(r"^-", MINUS, text)
