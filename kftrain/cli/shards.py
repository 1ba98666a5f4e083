"""`kftrain shards`: what a dataset's shards hold, and whether they still do."""

from __future__ import annotations

import json

import click

from kftrain.cli.options import echo, json_option


@click.group("shards")
def shards_command() -> None:
    """Look at the shards of a dataset. URI: its manifest.json, its folder, or a run."""


@shards_command.command()
@click.argument("uri")
@json_option
def show(uri: str, as_json: bool) -> None:
    """Print what the shards hold."""
    from kftrain.data.shards import manifest
    from kftrain.stages.dataset import find_manifest

    described = manifest.describe(manifest.read_manifest(find_manifest(uri)))
    if as_json:
        echo(json.dumps(described, indent=2))
        return
    for key in ("dataset_digest", "source", "task"):
        echo(f"{key:16}{described[key]}")
    for name, kind in described["fields"].items():
        echo(f"{'field':16}{name}: {kind}")
    for name, split in described["splits"].items():
        echo(f"{name:16}" + ", ".join(f"{value:,} {key}" for key, value in split.items()))


@shards_command.command()
@click.argument("uri")
@click.option("--quick", is_flag=True, help="Compare sizes only.")
@json_option
def verify(uri: str, quick: bool, as_json: bool) -> None:
    """Compare every shard with the manifest, and its keys; exit code 11 names the first that is wrong."""
    from kftrain.data.shards import manifest
    from kftrain.stages.dataset import find_manifest

    found = find_manifest(uri)
    manifest.verify_shards(found, "size" if quick else "sha256")
    if not quick:
        manifest.verify_keys(found)
    splits = manifest.read_manifest(found).splits
    result = {
        "manifest_uri": found,
        "checked": "size" if quick else "sha256",
        "shards": sum(len(split.shards) for split in splits.values()),
        "bytes": sum(split.num_bytes for split in splits.values()),
    }
    echo(json.dumps(result) if as_json else f"{result['shards']} shards are as the manifest says: {found}")
