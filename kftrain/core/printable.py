"""Foreign text as a terminal may show it: without what would move the cursor, set the title or hide a line."""

from __future__ import annotations

import re

_SEQUENCE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x9b[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\\\|\x9c)?"  # titles, clipboard
    r"|\x1b[ -/]*[0-~]"  # the other escapes
)
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters that are left, those that turn the direction of writing, and halves of characters."""


def printable(text: str) -> str:
    """Return the text without escape sequences, its other control characters but tab and newline replaced."""
    if text.isascii() and text.isprintable():
        return text
    return _CONTROL.sub("\ufffd", _SEQUENCE.sub("", text).replace("\r\n", "\n"))
