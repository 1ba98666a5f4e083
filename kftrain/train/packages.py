"""Which versions of the packages that a model needs a training has used: what whoever serves it installs."""

from __future__ import annotations

import importlib.metadata
import sys

DISTRIBUTIONS = {
    "torch": "torch",
    "numpy": "numpy",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "PIL": "pillow",
}
"""Top-level module -> the distribution that it comes from."""


def packages_in_use() -> dict[str, str]:
    """Distribution -> version, of those that this process has imported."""
    found = {}
    for module, distribution in DISTRIBUTIONS.items():
        if module in sys.modules:
            try:
                found[distribution] = importlib.metadata.version(distribution)
            except importlib.metadata.PackageNotFoundError:  # built in some way of its own
                continue
    return found
