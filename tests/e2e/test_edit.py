"""From a changed line of Python to a job that runs it: only the code's layers are built and loaded."""

import dataclasses
import shutil
import time

from e2e.commands import kftrain, options, running
from e2e.images import ROOT

LINE = 'return f"attempt {attempt}: '
FILES = ("pyproject.toml", "constraints.txt", "README.md", ".dockerignore")
FOLDERS = ("kftrain", "components", "pipelines", "images")


def test_a_changed_line_runs_on_the_cluster(settings, builder, images, tmp_path, capsys):
    for name in FILES:
        shutil.copy2(ROOT / name, tmp_path / name)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tmp_path / name)
    one = {"launch.nodes": 1, "launch.processes_per_node": 1, "train.steps": 5}
    run_uri = kftrain("shard", *options({**settings, **one}), folder=tmp_path)["run_uri"]
    start = time.monotonic()
    session = tmp_path / "kftrain" / "train" / "session.py"
    session.write_text(session.read_text().replace(LINE, LINE.replace("{attempt}", "{attempt} of the edited code")))
    edited = dataclasses.replace(builder, root=tmp_path)
    image = edited.ensure("trainer", set(images.values()) | {edited.dependencies("trainer")})
    loaded = time.monotonic()
    kftrain("shard", *options({**settings, **one}), "--run", run_uri.rsplit("/", 1)[-1], *_with(image), folder=tmp_path)
    with running("train", run_uri, folder=tmp_path) as command:
        command.wait_for("attempt 1 of the edited code")
        seconds = time.monotonic() - start
        command.finish()
    with capsys.disabled():
        print(f"\nfrom a changed line to the first step: {seconds:.0f} s, of them {loaded - start:.0f} s for the image")


def _with(image):
    return ["--set", f"launch.kubernetes.trainer_image={image}"]
