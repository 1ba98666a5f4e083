"""docs/schedules.md: each command with an output is run, in order, and prints what the page shows."""

import re
import shlex
from pathlib import Path

import fsspec
import pytest
import yaml

from kftrain import cli
from kftrain.schedule import apply

PAGE = Path(__file__).parents[3] / "docs" / "schedules.md"
ROOT = "memory://page/root"
CONFIG = f"""
run: {{name: lm, storage_root: "{ROOT}"}}
tracking: {{uri: "http://mlflow:5000"}}
launch: {{backend: pytorchjob, nodes: 2}}
data: {{source: "s3://raw/lm", window: {{by: path}}}}
"""

pytestmark = pytest.mark.usefixtures("nobody_logged_in")


def blocks():
    return re.findall(r"^```(\w*)\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def commands():
    """(command, output) of the page's transcripts, in order."""
    found = []
    for language, text in blocks():
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:] if not language else []:
            command, _, output = part.partition("\n")
            found.append((command.partition("#")[0].strip(), output))
    return found


def without_digests(text):
    return re.sub(r"(kftrain-train-[\d.]+)-[0-9a-f]{8}", r"\1-…", text)


@pytest.fixture
def page(server, tmp_path, monkeypatch, capfd):
    """Runs a command of the page where its files are; gives what it prints."""
    monkeypatch.setattr(apply, "SETTLE_SECONDS", 0.0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KF_PIPELINES_ENDPOINT", server.url)
    (tmp_path / "lm.yaml").write_text(CONFIG)
    (tmp_path / "schedule.yaml").write_text(next(text for language, text in blocks() if language == "yaml"))

    def run(command):
        program, *arguments = shlex.split(command)
        assert program == "kftrain"
        host = [] if "backfill" in arguments else ["--host", server.url]
        with pytest.raises(SystemExit):
            cli.main([*arguments, *host])
        captured = capfd.readouterr()
        return captured.err + captured.out

    yield run
    fsspec.filesystem("memory").store.clear()


def test_the_commands_print_what_the_page_shows(page, server, tmp_path):
    shown = [(command, output) for command, output in commands() if output]
    assert [command.split()[2] for command, _ in shown] == [
        "diff",
        "apply",
        "apply",
        "diff",
        "apply",
        "list",
        "backfill",
    ]
    for number, (command, output) in enumerate(shown):
        if number == 3:  # the schedule is changed while a run of it lives
            live = server.fire("r-1")
            file = yaml.safe_load((tmp_path / "schedule.yaml").read_text())
            changed = {**file, "cron": "0 30 3 * * *", "knobs": {}}
            (tmp_path / "schedule.yaml").write_text(yaml.safe_dump(changed))
        if number == 5:  # the run has ended, and somebody presses a button
            live["state"] = "SUCCEEDED"
            page("kftrain schedule apply -f schedule.yaml")
            server.recurring[0]["mode"] = "DISABLE"
        assert without_digests(page(command)) == without_digests(output), command


def test_the_commands_without_an_output_are_there(page, server):
    page("kftrain schedule apply -f schedule.yaml")
    for command, output in commands():
        if not output and "run-now" not in command:
            assert "rror" not in page(command), command
    assert not server.recurring
