"""Packages that give names of their modules without importing them before they are asked for (PEP 562).

`kftrain.config` reads the section of every package: what is imported along with a package must be little, and nothing
of it may need the configuration.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def attributes(package: str, names: Mapping[str, Iterable[str]]) -> Callable[[str], Any]:
    """Make the `__getattr__` of a package: `names` says which names each module gives to it."""
    homes = {name: module for module, given in names.items() for name in given}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return get
