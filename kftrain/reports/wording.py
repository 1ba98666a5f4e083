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

from kftrain.core.credentials import redact

MINUS = "\u2212"
REPLACEMENT = "\ufffd"
SHORT_DIGEST_CHARACTERS = 12
MAX_DECIMALS = 8
LARGE_UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"))

_FORBIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def clean(value: Any) -> str:
    """Return text that is safe to show, without credentials and control characters; it is not yet escaped."""
    return _FORBIDDEN.sub(REPLACEMENT, redact(str(value)))


def to_finite(value: Any) -> float | None:
    """Return the value as a finite float within 1e300, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) <= 1e300 else None


def format_number(value: Any, significant: int = 4) -> str:
    """Format a figure with these significant digits; tiny and huge ones in scientific notation."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "\u2013" if value is None else clean(value)
    if isinstance(value, int) or value == 0:
        return format_count(int(value))
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("infinite" if value > 0 else f"{MINUS}infinite")
    if not 1e-3 <= abs(value) < 1e15:
        return _use_minus_sign(_format_scientific(value, significant - 1))
    return format_decimals(value, significant - 1 - math.floor(math.log10(abs(value))))


def format_count(value: int) -> str:
    """Format a whole number with thousands separated: `12,345`."""
    return _use_minus_sign(f"{value:,}")


def format_decimals(value: float, decimals: int, signed: bool = False) -> str:
    """Format a figure with this number of decimals (none if negative), thousands separated."""
    sign = "+" if signed else ""
    text = f"{value:{sign},.{min(max(decimals, 0), MAX_DECIMALS)}f}"
    return _use_minus_sign(text if text.strip("+-0.,") else text.replace("-", "").replace("+", ""))


def format_interval(value: float, low: float, high: float, signed: bool = False) -> tuple[str, str]:
    """Format a value and its interval with as many decimals as give the interval's half width two digits."""
    half_width = (high - low) / 2
    if to_finite(value) is None or not (math.isfinite(half_width) and 1e-9 < half_width < 1e12):
        return format_number(value), f"{format_number(low)} to {format_number(high)}"
    decimals = 1 - math.floor(math.log10(half_width))
    texts = [format_decimals(x, decimals, signed) for x in (value, low, high)]
    return texts[0], f"{texts[1]} to {texts[2]}"


def format_percent(fraction: float) -> str:
    """Format a share: `96.4%`. Always one decimal: whole percents would hide what accuracies differ by."""
    return f"{format_decimals(100 * fraction, 1)}%"


def format_level(confidence: float) -> str:
    """Format the confidence of an interval: `95%`, `97.5%`."""
    return f"{format_number(100 * confidence, 3).removesuffix('.0')}%"


def format_size(num_bytes: Any) -> str:
    """Format bytes in decimal units: `64.0 MB`."""
    amount = to_finite(num_bytes)
    if amount is None:
        return format_number(num_bytes)
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if abs(amount) < 1000 or unit == "TB":
            break
        amount /= 1000
    return f"{format_count(int(amount))} bytes" if unit == "bytes" else f"{format_number(amount, 3)} {unit}"


def format_large_count(value: int) -> str:
    """Format a number of parameters or samples: exact below a million, then `1.86M`, billions as `7.00B`."""
    for unit, suffix in LARGE_UNITS:
        if value >= unit:
            return f"{format_number(value / unit, 3)}{suffix}"
    return format_count(value)


def format_duration(seconds: Any) -> str:
    """Format a time span with its two largest units: `3 min 20 s`."""
    total = to_finite(seconds)
    if total is None:
        return format_number(seconds)
    if total < 60:
        return f"{format_number(float(total), 2 if total < 10 else 3)} s"
    whole = round(total)
    spans = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
    span, unit, part, part_unit = next(span for span in spans if whole >= span[0])
    rest = whole % span // part
    return f"{format_count(whole // span)} {unit}" + (f" {rest} {part_unit}" if rest else "")


def format_plural(amount: int, singular: str) -> str:
    """Return a number with its noun: `1 sample`, `2,000 samples`."""
    return f"{format_count(amount)} {singular}{'' if amount == 1 else 's'}"


def format_label(name: str) -> str:
    """Turn a metric's name into words: `bits_per_byte` is `Bits per byte`."""
    return capitalize(clean(name).replace("_", " ").strip())


def capitalize(text: str) -> str:
    """Write the first letter large and leave the others, unlike `str.capitalize`."""
    return f"{text[:1].upper()}{text[1:]}"


def shorten_digest(digest: str) -> str:
    """Return the start of a digest, enough to tell two of them apart by eye."""
    return clean(digest)[:SHORT_DIGEST_CHARACTERS]


def cut_text(text: str, max_characters: int) -> str:
    """Cut text to a number of characters, the last of them an ellipsis."""
    return text if len(text) <= max_characters else text[: max_characters - 1].rstrip() + "\u2026"


def estimate_width_px(text: str, character_px: float = 6.7) -> float:
    """Estimate the width of a label, on the wide side; the default fits 11 px type of the widest interface fonts."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return (len(text) + wide) * character_px


def _format_scientific(value: float, decimals: int) -> str:
    mantissa, exponent = f"{value:.{max(decimals, 0)}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _use_minus_sign(text: str) -> str:
    return re.sub(r"^-", MINUS, text)
