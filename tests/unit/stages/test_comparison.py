"""What a comparison gathers of each run, and what it says where that is gone or may not be read."""

import dataclasses
import sys

import pytest
import yaml
from click.testing import CliRunner
from helpers.documents import finished_run

from kftrain import registry
from kftrain.cli import cli
from kftrain.core import storage
from kftrain.errors import EvaluationError
from kftrain.registry import ComparedVersion, ComparedVersions
from kftrain.registry.reference import Reference
from kftrain.run.attempts import Claim
from kftrain.run.documents import Completion, Evaluation, read
from kftrain.stages import comparison, preflight, register
from kftrain.stages.comparison import compare_versions


def reference_to(run_uri):
    texts = ("export_uri", "export_digest", "checkpoint_digest", "dataset_digest")
    digests = ("training_digest", "evaluation_digest")
    return Reference(run_uri=run_uri, **dict.fromkeys((*texts, *digests), "x"))


@pytest.fixture
def run(tmp_path):
    paths, config = finished_run(tmp_path)
    claim = Claim(attempt=1, start_step=0, world_size=2, host="h", process_id=1, start_time=5.0)
    storage.create_json(paths.attempt(1), claim.to_dict())
    storage.publish_json(paths.history, [{"step": 20, "loss": 0.5, "samples_per_second": 160.0, "seconds": 2.5}])
    return paths, config


@pytest.fixture
def registered(run, monkeypatch):
    """Two versions of the same run, the first of which is champion."""
    paths, config = run
    evaluation = next(storage.local_path(paths.uri).glob("evaluation/*/*/metrics.json"))
    first = ComparedVersion(1, ("champion",), reference_to(paths.uri), read(Evaluation, str(evaluation)))
    found = ComparedVersions(config.model_name, "e" * 64, 1, [dataclasses.replace(first, version=2, aliases=()), first])
    monkeypatch.setattr(registry, "compare", lambda *arguments: found)
    return found


def test_configuration_data_curve_and_timeline_of_each_run_are_there(run, registered):
    paths, config = run
    found = compare_versions(config)
    version = found.versions[1]
    assert (found.baseline, found.metric, found.goal) == (1, "accuracy", "maximize")
    assert version.completion == read(Completion, paths.complete) and version.history[0]["step"] == 20
    assert version.settings["train.steps"] == "20" and version.data["splits.train.samples"] == "1633"
    assert version.timeline.step_seconds == pytest.approx(2.0) and version.timeline.wall_seconds == 3.0
    assert not version.has_gpus and not version.tokens_per_sample and not version.problem


def test_a_run_that_is_gone_or_lies_elsewhere_is_said_and_the_others_are_shown(run, registered, tmp_path):
    _, config = run
    gone, elsewhere = f"{config.run.storage_root}/runs/gone", f"{tmp_path}/elsewhere/runs/r-1"
    registered.versions[:] = [
        dataclasses.replace(registered.versions[0], reference=reference_to(gone)),
        dataclasses.replace(registered.versions[0], version=3, reference=reference_to(elsewhere)),
        registered.versions[1],
    ]
    first, second, third = compare_versions(config).versions
    assert first.problem.startswith("its run cannot be read") and "gone" in first.problem
    assert elsewhere in second.problem and "trusted_roots" in second.problem
    assert not first.settings and not second.settings and third.settings


def test_code_that_another_run_names_is_not_called(run, registered, tmp_path, monkeypatch):
    paths, config = run
    (tmp_path / "planted.py").write_text("raise SystemExit('another run's code runs')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    saved = yaml.safe_load(storage.read_text(paths.config))
    storage.publish(paths.config, yaml.safe_dump({**saved, "task": {"kind": "planted:Task"}}))
    monkeypatch.setattr(comparison, "is_stream", lambda schema: True)
    version = compare_versions(config).versions[0]
    assert "planted" not in sys.modules
    assert "planted:Task" in version.problem and "trusted_kinds" in version.problem


def test_the_command_writes_a_page_and_markdown_and_says_where(run, registered, tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "require_database", lambda uri: None)
    paths, _ = run
    page, text = tmp_path / "new" / "c.html", tmp_path / "c.md"
    done = CliRunner().invoke(cli, ["models", "compare", "--run", paths.uri, "--html", page, "--markdown", text])
    assert done.exit_code == 0, done.output
    assert f"page: {page}" in done.output and "version 1 (champion): accuracy 0.900" in done.output
    assert page.read_text().startswith("<!DOCTYPE html>") and text.read_text().startswith("## Comparison")
    (tmp_path / "file").write_text("")
    refused = CliRunner().invoke(cli, ["models", "compare", "--run", paths.uri, "--html", tmp_path / "file" / "c.html"])
    assert refused.exit_code != 0 and "cannot be written" in str(refused.exception)


def test_the_register_step_leaves_the_page_where_there_is_more_than_one_version(run, registered):
    paths, config = run
    page = register._comparison(paths, config)
    assert page == storage.read_text(paths.comparison) and page.startswith("<!DOCTYPE html>")
    del registered.versions[1:]
    storage.remove(paths.comparison)
    assert register._comparison(paths, config) == "" and not storage.exists(paths.comparison)


def test_a_page_that_cannot_be_made_is_a_warning(run, monkeypatch, capsys):
    def fails(*arguments):
        raise EvaluationError("statistics.npz is damaged")

    monkeypatch.setattr(registry, "compare", fails)
    assert register._comparison(*run) == ""
    assert "warning: there is no comparison page: statistics.npz is damaged" in capsys.readouterr().out
