"""The notebooks in `examples/`: their cells run, in order, in a fresh Python."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kftrain

ROOT = Path(__file__).parents[2]
NOTEBOOK = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text())
COMPARISON = json.loads((ROOT / "examples" / "compare.ipynb").read_text())


def run_cells(notebook, folder):
    """What the cells print, one after another in one process."""
    shutil.copytree(ROOT / "examples", folder / "examples")
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    ended = subprocess.run(
        [sys.executable, "-c", "\n".join(cells)], cwd=folder / "examples", capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    return ended


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_comparison_runs(tmp_path):
    lines = run_cells(COMPARISON, tmp_path).stdout.splitlines()
    assert re.match(r"Version \d .* version \d", lines[0])
    assert any(re.match(r"v\d - v\d accuracy: [+-]0\.\d{3} \(", line) for line in lines)
    assert sum(line.startswith("class ") for line in lines) == 10
    assert any("{'optimizer.learning_rate': [" in line for line in lines)
    assert any(re.match(r"v\d: \d+ process seconds, goodput \d+%", line) for line in lines)
    page = (tmp_path / ".demo" / "compare.html").read_text()
    assert page.startswith("<!DOCTYPE html>") and "Loss over samples" in page


@pytest.mark.slow
def test_every_cell_runs(tmp_path):
    ended = run_cells(NOTEBOOK, tmp_path)
    lines = ended.stdout.splitlines()
    assert lines[0] == "60 steps of vision_transformer"
    accuracy, _, reason, predicted, labels, size = lines[1:]
    assert accuracy.startswith("accuracy: 0.") and reason.startswith("first model")
    assert predicted.count(",") == labels.count(",") == 7
    assert int(size.split()[0]) > 100
    assert "step 60/60" in ended.stderr and list((tmp_path / ".demo" / "runs").iterdir())


def test_no_output_is_kept_and_the_readme_uses_what_the_notebook_runs():
    cells = [*NOTEBOOK["cells"], *COMPARISON["cells"]]
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]
    in_readme = set(re.findall(r"kftrain\.([a-z]+_[a-z]+)\(", (ROOT / "README.md").read_text()))
    of_scripts = {"commit", "complete", "report", "should_stop"}
    of_notebooks = set(kftrain.__all__) - {"CompletedRun"} - of_scripts
    assert in_readme == of_notebooks - {"compile_pipeline"}
    text = "".join(line for cell in NOTEBOOK["cells"] for line in cell["source"])
    assert set(re.findall(r"kftrain\.([a-z]+_[a-z]+)\(", text)) == of_notebooks
