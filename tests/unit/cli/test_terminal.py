"""Names and messages that other people wrote steer no terminal, whichever command shows them."""

import ast
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers.documents import digits_config, opened_run

import kftrain.cli
import kftrain.client
from kftrain import registry
from kftrain.cli import cli
from kftrain.core import progress, storage
from kftrain.data.shards import manifest
from kftrain.launch.base import JobStatus
from kftrain.launch.kubernetes.control import ClusterJobs
from kftrain.registry import AuditFinding
from kftrain.reports.versions import ReportedVersion, VersionComparison
from kftrain.run.error import read_error
from kftrain.stages import comparison, preflight

HOSTILE = "caf\u00e9\x1b[2J\x1b]0;owned\x07\x1b[1A\r\x9b31m\u202e!"
SHOWN = "caf\u00e9"


def invoke(*arguments):
    done = CliRunner().invoke(cli, arguments, standalone_mode=False)
    assert done.exception is None, done.output
    return done.output


def assert_harmless(output):
    assert SHOWN in output
    assert not set("\x1b\x07\r\x9b\u202e") & set(output)


def test_models(monkeypatch):
    version = ReportedVersion(1, (HOSTILE,), problem=HOSTILE)
    found = VersionComparison("m", HOSTILE, "minimize", 0.95, 1, "d", [version])
    monkeypatch.setattr(preflight, "require_database", lambda uri: None)
    monkeypatch.setattr(comparison, "compare_versions", lambda *arguments: found)
    assert_harmless(invoke("models", "compare"))
    monkeypatch.setattr(registry, "audit", lambda *arguments: [AuditFinding(1, f"tag {HOSTILE} differs")])
    assert_harmless(invoke("models", "audit"))


def test_runs_and_status_of_a_run_here(tmp_path):
    paths = opened_run(digits_config(tmp_path), "a-1").paths
    storage.publish_json(paths.error, {"kind": "DataError", "exit_code": 11, "line": HOSTILE, "stage": HOSTILE})
    assert read_error(paths.error).line == HOSTILE
    assert_harmless(invoke("runs", f"{tmp_path}/store"))
    assert_harmless(invoke("status", paths.uri))


def test_status_of_jobs(monkeypatch):
    job = JobStatus(**dict.fromkeys(JobStatus.__dataclass_fields__, HOSTILE) | {"age_seconds": 1.0})
    monkeypatch.setattr(ClusterJobs, "describe", lambda self, run: [job])
    assert_harmless(invoke("status"))


def test_shards(monkeypatch):
    described = {"dataset_digest": "d", "source": HOSTILE, "task": HOSTILE, "fields": {HOSTILE: "uint8"}, "splits": {}}
    described["components"] = {HOSTILE: HOSTILE}
    monkeypatch.setattr("kftrain.tasks.run_dataset.find_manifest", lambda uri: uri)
    monkeypatch.setattr(manifest, "read_manifest", lambda uri: None)
    monkeypatch.setattr(manifest, "describe", lambda found: described)
    assert_harmless(invoke("shards", "show", "x"))


def test_what_is_logged(capsys):
    progress.to_log(f"warning: {HOSTILE}")
    assert_harmless(capsys.readouterr().out)


ROOMS = [Path(room.__file__).parent for room in (kftrain.cli, kftrain.client)]


@pytest.mark.parametrize(
    "module", sorted(path for room in ROOMS for path in room.glob("*.py")), ids=lambda path: path.stem
)
def test_commands_print_by_the_one_function_that_makes_text_printable(module):
    calls = [ast.unparse(node.func) for node in ast.walk(ast.parse(module.read_text())) if isinstance(node, ast.Call)]
    ways = {"print", "click.echo", "click.secho", "click.echo_via_pager", "sys.stdout.write", "sys.stderr.write"}
    assert [call for call in calls if call in ways] == (["click.echo"] if module.stem == "console" else [])
