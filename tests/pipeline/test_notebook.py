"""`examples/quickstart.ipynb`: its cells run, in order, in a fresh Python."""

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


def code_cells():
    return ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow
def test_every_cell_runs(tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    ended = subprocess.run(
        [sys.executable, "-c", "\n".join(code_cells())], cwd=tmp_path / "examples", capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[0] == "60 steps of vision_transformer"
    accuracy, _, reason, predicted, labels, size = lines[1:]
    assert accuracy.startswith("accuracy: 0.") and reason.startswith("first model")
    assert predicted.count(",") == labels.count(",") == 7
    assert int(size.split()[0]) > 100
    assert "step 60/60" in ended.stderr and list((tmp_path / ".demo" / "runs").iterdir())


def test_no_output_is_kept_and_the_readme_uses_what_the_notebook_runs():
    assert not [cell for cell in NOTEBOOK["cells"] if cell.get("outputs") or cell.get("execution_count")]
    in_readme = set(re.findall(r"kftrain\.([a-z]+_[a-z]+)\(", (ROOT / "README.md").read_text()))
    assert in_readme == set(kftrain.__all__) - {"CompletedRun", "compile_pipeline"}
    text = "".join(line for cell in NOTEBOOK["cells"] for line in cell["source"])
    assert set(re.findall(r"kftrain\.([a-z]+_[a-z]+)\(", text)) == set(kftrain.__all__) - {"CompletedRun"}
