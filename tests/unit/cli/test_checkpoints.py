"""`kftrain checkpoints`, on folders that somebody has damaged or invented."""

import json

import pytest
from click.testing import CliRunner
from helpers.documents import entry_of

from kftrain.cli import cli
from kftrain.core import storage
from kftrain.errors import CheckpointError
from kftrain.run import commit
from kftrain.run.commit import CheckpointManifest, CheckpointName
from kftrain.run.paths import RunPaths


@pytest.fixture
def paths(tmp_path):
    """A run with two checkpoints of one file each."""
    paths = RunPaths.of(str(tmp_path), "r")
    for step in (10, 20):
        name = CheckpointName(step, 1)
        uri = storage.join(paths.checkpoints, str(name))
        storage.publish(storage.join(uri, "__0_0.distcp"), b"state")
        manifest = CheckpointManifest(
            step=step,
            samples_consumed=step,
            attempt=1,
            world_size=1,
            dataset_digest="d",
            training_digest="t",
            training_identity={},
            files={"__0_0.distcp": entry_of(storage.join(uri, "__0_0.distcp"))},
        )
        commit.commit(paths, name, manifest)
    return paths


def run(*arguments):
    return CliRunner().invoke(cli, ["checkpoints", *arguments], catch_exceptions=True)


def test_a_list_goes_on_after_a_damaged_checkpoint_and_says_which_it_is(paths):
    storage.publish(storage.join(paths.checkpoints, "step-00000020-a1", commit.COMMITTED), b"\x80")
    shown = run("list", paths.uri)
    assert shown.exit_code == 0
    first, second = shown.output.splitlines()
    assert "step 20, attempt 1, damaged" in first and "not the one that was committed" in first
    assert second.startswith("step 10, attempt 1, 0.0 MB")
    rows = json.loads(run("list", paths.uri, "--json").output)
    assert [(row["step"], "problem" in row) for row in rows] == [(20, True), (10, False)]


@pytest.mark.parametrize("place", ["no/such", "r/checkpoints/step-5"])
def test_a_list_of_what_is_not_there_is_an_error(paths, place):
    failed = run("list", storage.join(paths.storage_root, place))
    assert isinstance(failed.exception, CheckpointError)
    assert place in str(failed.exception)


def test_a_run_without_checkpoints_has_an_empty_list(tmp_path):
    storage.publish(str(tmp_path / "r" / "config.yaml"), "run: {}")
    assert run("list", str(tmp_path / "r")).output == "no committed checkpoint\n"


@pytest.mark.parametrize("verb", ["verify", "export"])
def test_a_folder_of_a_foreign_name_is_no_checkpoint(paths, verb):
    storage.publish(storage.join(paths.checkpoints, "step-5", commit.COMMITTED), "mine")
    failed = run(verb, storage.join(paths.checkpoints, "step-5"))
    assert isinstance(failed.exception, CheckpointError)
