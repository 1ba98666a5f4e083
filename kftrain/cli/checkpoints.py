"""`kftrain checkpoints`: what is committed, whether it is whole, and a copy for other programs."""

from __future__ import annotations

import json
from typing import Any

import click

from kftrain import storage
from kftrain.checkpoint import commit
from kftrain.cli.options import json_option
from kftrain.contracts import RunPaths
from kftrain.errors import CheckpointError


@click.group("checkpoints")
def checkpoints_command() -> None:
    """Look at the checkpoints of a run."""


@checkpoints_command.command("list")
@click.argument("run_uri")
@json_option
def list_(run_uri: str, as_json: bool) -> None:
    """List the committed checkpoints of a run, newest first."""
    paths = RunPaths(storage.absolute(run_uri))
    rows = [_row(storage.join(paths.checkpoints, str(name))) for name in commit.committed(paths)]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    if not rows:
        click.echo("no committed checkpoint")
    for row in rows:
        click.echo(f"step {row['step']}, attempt {row['attempt']}, {row['bytes'] / 1e6:,.1f} MB  {row['uri']}")


@checkpoints_command.command()
@click.argument("uri")
def verify(uri: str) -> None:
    """Compare every file of a checkpoint, or of a run's newest one, with its manifest; exit code 12: one is damaged."""
    chosen = _checkpoint(uri)
    manifest, digest = commit.read_manifest(chosen)
    commit.verify_files(chosen, manifest.files)
    click.echo(f"{len(manifest.files)} files are as they were committed: {chosen} (digest {digest[:12]})")


@checkpoints_command.command()
@click.argument("uri")
@json_option
def export(uri: str, as_json: bool) -> None:
    """Write one folder of safetensors from a checkpoint (or from a run's newest one)."""
    from kftrain.stages.resolve import load_config
    from kftrain.tasks import build_task
    from kftrain.train.session import export_model

    chosen = _checkpoint(uri)
    paths = RunPaths(chosen.rsplit("/", 2)[0])
    config = load_config(paths.uri)
    folder, digest = export_model(paths, config, build_task(config.task), chosen)
    click.echo(json.dumps({"export_uri": folder, "export_digest": digest}) if as_json else folder)


def _row(uri: str) -> dict[str, Any]:
    manifest, digest = commit.read_manifest(uri)
    return {
        "uri": uri,
        "step": manifest.step,
        "attempt": manifest.attempt,
        "digest": digest,
        "bytes": sum(entry.bytes for entry in manifest.files.values()),
        "world_size": manifest.world_size,
    }


def _checkpoint(uri: str) -> str:
    """A checkpoint's URI, or the newest one of a run. Raises CheckpointError."""
    absolute = storage.absolute(uri)
    if commit.CheckpointName.parse(RunPaths(absolute).run_id) is not None:
        return absolute
    names = commit.committed(RunPaths(absolute))
    if not names:
        raise CheckpointError("no committed checkpoint", where=absolute, fix="is it a run's URI?")
    return storage.join(RunPaths(absolute).checkpoints, str(names[0]))
