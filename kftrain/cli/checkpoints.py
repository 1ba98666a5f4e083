"""`kftrain checkpoints`: what is committed, whether it is whole, and a copy for other programs."""

from __future__ import annotations

import json
from typing import Any

import click

from kftrain.cli.options import json_option
from kftrain.client.console import echo
from kftrain.core import storage
from kftrain.errors import CheckpointError
from kftrain.run import commit
from kftrain.run.commit import CheckpointName
from kftrain.run.paths import RunPaths


@click.group("checkpoints")
def checkpoints_command() -> None:
    """Look at the checkpoints of a run."""


@checkpoints_command.command("list")
@click.argument("run_uri")
@json_option
def list_checkpoints_command(run_uri: str, as_json: bool) -> None:
    """List the committed checkpoints of a run, newest first."""
    paths = RunPaths(storage.absolute(run_uri))
    names = commit.list_committed(paths)
    if not names and not storage.exists(paths.uri):
        raise CheckpointError("there is no such run", where=paths.uri, fix="check the run's URI")
    rows = [_describe(storage.join(paths.checkpoints, str(name)), name) for name in names]
    if as_json:
        echo(json.dumps(rows, indent=2))
        return
    if not rows:
        echo("no committed checkpoint")
    for row in rows:
        state = f"damaged: {row['problem']}" if "problem" in row else f"{row['bytes'] / 1e6:,.1f} MB  {row['uri']}"
        echo(f"step {row['step']}, attempt {row['attempt']}, {state}")


@checkpoints_command.command("verify")
@click.argument("uri")
def verify_checkpoint_command(uri: str) -> None:
    """Compare every file of a checkpoint, or of a run's newest one, with its manifest; exit code 12: one is damaged."""
    chosen = _find_checkpoint(uri)
    manifest, digest = commit.read_checkpoint_manifest(chosen)
    commit.verify_files(chosen, manifest.files)
    echo(f"{len(manifest.files)} files are as they were committed: {chosen} (digest {digest[:12]})")


@checkpoints_command.command("export")
@click.argument("uri")
@json_option
def export_command(uri: str, as_json: bool) -> None:
    """Write one folder of safetensors from a checkpoint (or from a run's newest one)."""
    from kftrain.run.config import read_config
    from kftrain.train.completing import build_task_of_run, export_model
    from kftrain.trust import permit

    chosen = _find_checkpoint(uri)
    paths = RunPaths(chosen.rsplit("/", 2)[0])
    config = permit(read_config(paths))
    folder, digest = export_model(paths, config, build_task_of_run(paths, config), chosen)
    echo(json.dumps({"export_uri": folder, "export_digest": digest}) if as_json else folder)


def _describe(uri: str, name: CheckpointName) -> dict[str, Any]:
    row: dict[str, Any] = {"uri": uri, "step": name.step, "attempt": name.attempt}
    try:
        manifest, digest = commit.read_checkpoint_manifest(uri)
    except CheckpointError as error:  # the others are listed all the same
        return {**row, "problem": error.line}
    num_bytes = sum(entry.bytes for entry in manifest.files.values())
    return {**row, "digest": digest, "bytes": num_bytes, "world_size": manifest.world_size}


def _find_checkpoint(uri: str) -> str:
    """Return the URI of a checkpoint, or of a run's newest one. Raises CheckpointError."""
    absolute = storage.absolute(uri)
    if CheckpointName.parse(RunPaths(absolute).run_id) is not None:
        return absolute
    names = commit.list_committed(RunPaths(absolute))
    if not names:
        raise CheckpointError("no committed checkpoint", where=absolute, fix="is it a run's URI?")
    return storage.join(RunPaths(absolute).checkpoints, str(names[0]))
