"""`docs/tutorial.md`: every command runs, every file is written, in the order of the page."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
FILE = re.compile(r"# ((?!excerpt)\S+\.py)\n")
EXCERPT = re.compile(r"# excerpt of (\S+\.py)\n")


def blocks():
    """(language, text) of each block of code."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), flags=re.M | re.S)


def shell_of(language, text):
    """What a reader does with a block, as a shell script."""
    if language == "sh":
        return text
    if found := EXCERPT.match(text):
        quoted = text[found.end() :]
        return f"{sys.executable} - <<'END_OF_BLOCK'\nassert {quoted!r} in open({found[1]!r}).read()\nEND_OF_BLOCK\n"
    if language == "python":
        return f"cat > {FILE.match(text)[1]} <<'END_OF_BLOCK'\n{text}END_OF_BLOCK\n"
    files = re.findall(r"^(\S+\.\w+) ", text, flags=re.M)
    return f"ls {' '.join(files)}\n"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_page_runs(tmp_path):
    script = "set -eo pipefail\n" + "".join(shell_of(*block) for block in blocks())
    folder = os.path.dirname(sys.executable)
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    project = tmp_path / "handwriting"
    first, second = sorted(
        (project / "runs").iterdir(), key=lambda run: json.loads((run / "registration.json").read_text())["version"]
    )
    accuracy, decided = [
        [json.loads(next(run.glob(name)).read_text()) for run in (first, second)]
        for name in ("evaluation/*/*/metrics.json", "registration.json")
    ]
    assert 0.8 < accuracy[0]["metrics"]["accuracy"]["value"] < 0.97
    assert decided[1]["promoted"] and decided[1]["champion_version"] == 1 and decided[1]["improvement"]["low"] > 0
    assert ended.stdout.count("3 passed") == 2
    assert re.search(r"^predicted \[\d, \d, \d\] labels \[\d, \d, \d\]$", ended.stdout, flags=re.M)
    assert "refused, exit code 10" in ended.stdout and "did you mean 'steps'" in ended.stderr
    assert "champion: first model" in ended.stdout and "handwriting version 2" in ended.stdout
    assert "registry.example/handwriting-trainer:1" in ended.stdout and (project / "pipeline.yaml").exists()


def test_every_block_is_one_that_the_test_above_runs():
    kinds = {language for language, _ in blocks()}
    assert kinds == {"sh", "python", ""}
    assert all(FILE.match(text) or EXCERPT.match(text) for language, text in blocks() if language == "python")
