"""What only a GPU can show: `pytest tests/gpu` on a machine with one. Elsewhere every test says why it is skipped.

Figures that tests record are written as a table in Markdown, which goes into docs/performance.md: to the file that
GPU_TABLE names, or else to build/gpu.md.
"""

import os
from pathlib import Path

import pytest
import torch

ROWS = []


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="this machine has no GPU that torch can use"))


@pytest.fixture
def record():
    """Takes a row of the table: what was measured, its bar, and the figure."""

    def take(name, bar, figure):
        ROWS.append(f"| {name} | {bar} | {figure} |")

    return take


def pytest_sessionfinish():
    if not ROWS:
        return
    path = Path(os.environ.get("GPU_TABLE", "build/gpu.md"))
    path.parent.mkdir(parents=True, exist_ok=True)
    machine = f"Measured on {torch.cuda.get_device_name()}, torch {torch.__version__}."
    head = "| figure | bar | measured |\n|---|---|---|"
    path.write_text("\n".join([machine, "", head, *ROWS]) + "\n")
